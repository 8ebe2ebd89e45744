"""Loss scaling for Optax, as pure functions on a small pytree."""

from optax_lossscale import diagnostics, plotting, presets
from optax_lossscale._autocast.report import autocast_report
from optax_lossscale._autocast.transform import autocast, full_precision
from optax_lossscale._finite import all_finite, max_magnitude
from optax_lossscale._grad import scaled_grad, scaled_value_and_grad
from optax_lossscale._headroom import headroom_loss_scale
from optax_lossscale._keras.optimizer import (
    ema_params,
    finalize_params,
    loss_scale_optimizer,
)
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
]
