"""Loss scaling and automatic mixed precision for JAX and Optax.

Train with a scaled loss:

* `loss_scaled` wraps an Optax optimizer: it unscales the gradients, skips a step that
  overflowed, and adjusts the loss scale;
* `scaled_value_and_grad` and `scaled_grad` give it the gradients of the scaled loss;
* `where_applied` lets a skipped step change nothing outside the optimizer either;
* `loss_scale_optimizer` has Keras's signature; `ema_params` and `finalize_params` read
  its moving average.

Choose how the loss scale changes:

* `dynamic_loss_scale` grows and backs off; `smooth_loss_scale` grows in small steps;
  `headroom_loss_scale` follows the largest gradient; `static_loss_scale` never changes;
  `no_loss_scale` does nothing;
* `presets` has the rules of PyTorch, Keras, MindSpore, Flax and others, under the names
  that these systems use;
* `LossScale` is the type of every rule, which you can also make yourself.

Run a float32 model in half precision:

* `autocast` casts each operation where that is safe; `full_precision` marks a part to
  leave alone, and `low_precision` a fused kernel, whose inputs are cast before it is
  traced; `autocast_report` prints what happens to each operation;
* `cast_params` casts parameters, and `master_weights` trains them in half precision.

Look at a state, change it, or write the step by hand:

* `loss_scale_metrics` is for loggers; `raise_if_stalled` raises `LossScaleStalledError`
  if too many steps in a row were skipped;
* `get_loss_scale`, `set_loss_scale`, `find_loss_scale_state` and `adopt_inner_state`
  work on the states, `LossScaleState` and `LossScaledState`;
* `scale`, `unscale`, `all_finite` and `max_magnitude` are the parts of a step;
* `diagnostics` looks for overflow and underflow in any pytree; `plotting` draws it.
"""

from optax_lossscale import diagnostics, plotting, presets
from optax_lossscale._autocast.markers import full_precision, low_precision
from optax_lossscale._autocast.report import autocast_report
from optax_lossscale._autocast.transform import autocast
from optax_lossscale._finite import all_finite, max_magnitude
from optax_lossscale._grad import scaled_grad, scaled_value_and_grad
from optax_lossscale._headroom import headroom_loss_scale
from optax_lossscale._keras.optimizer import (
    ema_params,
    finalize_params,
    loss_scale_optimizer,
)
from optax_lossscale._masking import where_applied
from optax_lossscale._master_weights import cast_params, master_weights
from optax_lossscale._rules import (
    LossScale,
    dynamic_loss_scale,
    no_loss_scale,
    static_loss_scale,
)
from optax_lossscale._scaling import scale, unscale
from optax_lossscale._smooth import smooth_loss_scale
from optax_lossscale._state import (
    LossScaledState,
    LossScaleState,
    find_loss_scale_state,
    get_loss_scale,
    set_loss_scale,
)
from optax_lossscale._telemetry import (
    LossScaleStalledError,
    loss_scale_metrics,
    raise_if_stalled,
)
from optax_lossscale._transform import adopt_inner_state, loss_scaled

__version__ = "0.1.0"

__all__ = [
    "LossScale",
    "LossScaleStalledError",
    "LossScaleState",
    "LossScaledState",
    "adopt_inner_state",
    "all_finite",
    "autocast",
    "autocast_report",
    "cast_params",
    "diagnostics",
    "dynamic_loss_scale",
    "ema_params",
    "finalize_params",
    "find_loss_scale_state",
    "full_precision",
    "get_loss_scale",
    "headroom_loss_scale",
    "loss_scale_metrics",
    "loss_scale_optimizer",
    "loss_scaled",
    "low_precision",
    "master_weights",
    "max_magnitude",
    "no_loss_scale",
    "plotting",
    "presets",
    "raise_if_stalled",
    "scale",
    "scaled_grad",
    "scaled_value_and_grad",
    "set_loss_scale",
    "smooth_loss_scale",
    "static_loss_scale",
    "unscale",
    "where_applied",
]
