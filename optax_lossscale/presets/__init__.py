"""The rules of other systems, under the names and defaults that they have there.

A function with the name of a system returns a `LossScale`, which you pass to
`loss_scaled` or call by hand. Its scale follows the system step by step: exactly if the
factors are powers of two, and otherwise to within 1 ulp for each change. Every rule
departs from its system in three ways, which the functions' docstrings do not repeat:

* The scale stays within `[2**-126, 2**126]`, so neither the scale nor its reciprocal
  is ever zero, subnormal or infinite. Backoff stops at `2**-126`, and growth beyond
  `2**126` is refused. Several of these systems let the scale reach zero or infinity,
  and from then on they no longer train.
* Gradients are checked after they are unscaled, in float32.
* No rule raises an error inside a step. If a system raises because the run is stuck,
  call `raise_if_stalled` outside the step instead.

Scales and factors are dimensionless. Intervals and windows are in finite steps;
`hysteresis` and `delayed_shift` are in nonfinite steps. When the rule is made, a
setting outside its range raises `ValueError`, and a setting that is not a number raises
`TypeError`.

Example:
  >>> import optax, optax_lossscale as ols
  >>> tx = ols.loss_scaled(optax.adam(1e-3), ols.presets.torch(growth_interval=100))
  >>> ols.get_loss_scale(tx.init({}))
  Array(65536., dtype=float32)
"""

from optax_lossscale.presets._state_dicts import (
    from_torch_state_dict,
    to_torch_state_dict,
)
from optax_lossscale.presets._systems import (
    apex,
    deepspeed,
    fairseq,
    flax,
    jmp,
    keras,
    megatron,
    mindspore_dynamic,
    mindspore_fixed,
    tf_keras,
    torch,
)

__all__ = [
    "apex",
    "deepspeed",
    "fairseq",
    "flax",
    "from_torch_state_dict",
    "jmp",
    "keras",
    "megatron",
    "mindspore_dynamic",
    "mindspore_fixed",
    "tf_keras",
    "to_torch_state_dict",
    "torch",
]
