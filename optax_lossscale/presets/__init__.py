"""The rules of other systems, under the names and defaults that they have there.

A function with the name of a system returns a `LossScale`, which you pass to
`loss_scaled` or call by hand. With scale `s` and `n` finite steps since the last growth
or nonfinite step, a step does

    finite:     n = n + 1;  if n >= interval: s = min(s * factor, cap), n = 0
    nonfinite:  n = 0;      s = max(s / factor, floor)

The settings keep the names of their system, and each function says what is peculiar:

| preset | first scale | factor | interval | floor, cap | nonfinite steps |
|---|---|---|---|---|---|
| torch | init_scale | growth_factor | growth_interval | | 1 |
| keras | initial_scale | 2 | dynamic_growth_steps | | 1 |
| tf_keras | initial_scale | 2 | dynamic_growth_steps | 1 | 1 |
| mindspore_dynamic | init_loss_scale | scale_factor | scale_window | 1 | 1 |
| mindspore_fixed | loss_scale | 1 | | | |
| flax | scale | growth_factor | growth_interval + 1 | minimum_scale | 1 |
| jmp | loss_scale | factor | period | min_loss_scale | 1 |
| apex | init_scale | 2 | scale_window | min_loss_scale, max_loss_scale | 1 |
| megatron | initial_scale | growth_factor | growth_interval | min_scale | hysteresis |
| deepspeed | init_scale | 2 | scale_window | min_scale | delayed_shift |
| fairseq | init_scale | scale_factor | scale_window | threshold | by tolerance |

The last column is the number of nonfinite steps that it takes to back off. Systems with
a `growth_factor` also have a `backoff_factor`, by which backoff multiplies `s`. A floor
applies from the first backoff on. Without one it is `2**-126`, and a cap is `2**126`.

Scales, floors and caps are from `2**-126` to `2**126`, dimensionless; a floor of None
or 0 means `2**-126`. Factors are above 1, and a `backoff_factor` strictly between 0 and
1. Numbers of steps are at least 1. When the rule is made, a setting outside its range
raises `ValueError`, and one of the wrong kind raises `TypeError`.

Scales follow the system step by step: exactly if the factors are powers of two, and
otherwise to within 1 ulp for each change. Every rule departs from its system in three
ways, which the functions do not repeat:

* The scale stays within `[2**-126, 2**126]`, so neither the scale nor its reciprocal
  is ever zero, subnormal or infinite. Several of these systems let the scale reach zero
  or infinity, and from then on they no longer train: PyTorch's is zero after 166
  nonfinite steps in a row, and Keras's on JAX after 142; Megatron's can be infinite.
* Gradients are checked after they are unscaled, in float32.
* No rule raises an error inside a step. DeepSpeed raises one at its floor, fairseq at
  its `min_loss_scale`, and MindSpore after 1000 nonfinite steps in a row. Here the run
  goes on; call `raise_if_stalled` outside the step instead.

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
