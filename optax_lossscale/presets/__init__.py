"""The rules of other systems, under the names and defaults that they have there.

Each function returns a `LossScale` for `loss_scaled`, or to use by hand, and
follows its system's scale step by step: exactly where factors are powers of two,
within 1 ulp a change otherwise. Three things hold for all of them, and
are the departures that no docstring repeats:

* the scale never leaves `[2**-126, 2**126]`, so it is never zero, subnormal or
  infinite, and neither is its reciprocal: backoff stops at `2**-126`, and growth
  past `2**126` is refused, where several of these systems reach zero or infinity
  and train no more;
* gradients are checked after they are unscaled, in float32;
* no rule raises in a step: where a system raises because the run is stuck,
  `raise_if_stalled` does, outside the step.

Scales and factors are dimensionless, and intervals, windows and counts are finite
steps. What is outside its range raises `ValueError`, what is not a number
`TypeError`, when the rule is made.

Example:
  >>> import optax, optax_lossscale as ols
  >>> tx = ols.loss_scaled(optax.adam(1e-3), ols.presets.torch(growth_interval=100))
  >>> ols.get_loss_scale(tx.init({}))
  Array(65536., dtype=float32)
"""

from optax_lossscale.presets._jax import flax, jmp
from optax_lossscale.presets._keras import keras, tf_keras
from optax_lossscale.presets._mindspore import mindspore_dynamic, mindspore_fixed
from optax_lossscale.presets._torch import (
    from_torch_state_dict,
    to_torch_state_dict,
    torch,
)
from optax_lossscale.presets._trainers import apex, deepspeed, fairseq, megatron

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
