"""Loss scaling and automatic mixed precision for JAX and Optax.

Train a model that was written for float32 in float16:

    >>> import jax.numpy as jnp, optax, optax_lossscale as ols
    >>> params, x, y = jnp.zeros(3), jnp.ones((8, 3)), jnp.ones(8)
    >>> loss_fn = ols.autocast(lambda params, x, y: jnp.mean((x @ params - y) ** 2))
    >>> tx = ols.loss_scaled(optax.sgd(0.1))
    >>> opt_state = tx.init(params)

Each step, usually inside `jax.jit`, is then

    >>> loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, x, y)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(loss, ols.get_loss_scale(opt_state))
    1.0 32768.0

The training step:

* `loss_scaled` wraps an Optax optimizer, so that it unscales the gradients, skips a
  step that overflowed, and adjusts the loss scale.
* `scaled_value_and_grad` and `scaled_grad` compute the gradients of the scaled loss.
* `scaled_backward` gives a trainer that differentiates the loss itself a function with
  the true loss and the true gradients, which are scaled only on their way.
* `where_applied` keeps what lives outside the optimizer, such as batch statistics,
  unchanged when a step is skipped.

Rules, which decide how the loss scale changes:

* `dynamic_loss_scale`, the default, grows the scale after many finite steps, and halves
  it after an overflow.
* `headroom_loss_scale` sets the scale from the largest recent gradients.
* `static_loss_scale` keeps one scale, and `no_loss_scale` turns loss scaling off.
* `presets` is a module with the rules of PyTorch, Keras, Flax and others, under their
  own names.
* `LossScale` is the type of every rule. Make one to write a rule of your own.

Mixed precision:

* `autocast` runs matrix products and convolutions in half precision, and
  nothing else.
* `full_precision` marks a function to leave as it is, and `low_precision` one that
  takes half-precision inputs, such as a fused kernel.
* `autocast_report` prints the dtype in which each product computes, and why.
* `save_products` is a policy for `jax.checkpoint`, which saves the low products.
* `cast_params` casts parameters to half precision, and `master_weights` trains them.

States and metrics:

* `get_loss_scale`, `set_loss_scale` and `find_loss_scale_state` find the loss scale in
  any pytree, such as an optimizer state or a `TrainState`.
* `LossScaledState` is the state of a wrapped optimizer. It holds a `LossScaleState`.
* `adopt_inner_state` continues a run that was saved without loss scaling.
* `loss_scale_metrics` returns the scale and the counters for any logger.
* `raise_if_stalled` raises `LossScaleStalledError` if too many steps in a row were
  skipped.

The parts of a step, to write one by hand:

* `scale`, `unscale`, `all_finite` and `max_magnitude`.

For those who know Keras:

* `loss_scale_optimizer` has the signature and the options of its `LossScaleOptimizer`.
* `ema_params` and `finalize_params` read the moving average that it keeps.

Modules:

* `diagnostics` shows every operation of a program with its numbers, and looks for
  overflow and underflow in any pytree. `plotting` draws what it finds.
* `optax_lossscale.compat.flax`, which you import by this name, has a `DynamicScale` as
  Flax has it.
"""

import importlib as _importlib
import typing as _typing

from optax_lossscale import presets
from optax_lossscale._autocast import context as _context  # noqa: F401
from optax_lossscale._ground.states import LossScaledState, LossScaleState
from optax_lossscale._masters.cast_params import cast_params
from optax_lossscale._masters.master_weights import master_weights
from optax_lossscale._scaling.backward import scaled_backward
from optax_lossscale._scaling.finite import all_finite, max_magnitude
from optax_lossscale._scaling.grad import scaled_grad, scaled_value_and_grad
from optax_lossscale._scaling.headroom import headroom_loss_scale
from optax_lossscale._scaling.masking import where_applied
from optax_lossscale._scaling.metrics import (
    LossScaleStalledError,
    loss_scale_metrics,
    raise_if_stalled,
)
from optax_lossscale._scaling.rules import (
    LossScale,
    dynamic_loss_scale,
    no_loss_scale,
    static_loss_scale,
)
from optax_lossscale._scaling.scale import scale, unscale
from optax_lossscale._scaling.state import (
    find_loss_scale_state,
    get_loss_scale,
    set_loss_scale,
)
from optax_lossscale._scaling.wrapper import adopt_inner_state, loss_scaled
from optax_lossscale.compat.keras import (
    ema_params,
    finalize_params,
    loss_scale_optimizer,
)

if _typing.TYPE_CHECKING:  # At run time `__getattr__` loads them.
    from optax_lossscale import diagnostics, plotting
    from optax_lossscale._autocast.loops import save_products
    from optax_lossscale._autocast.markers import full_precision, low_precision
    from optax_lossscale._autocast.report import autocast_report
    from optax_lossscale._autocast.transform import autocast

__version__ = "0.5.0"

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
    "save_products",
    "scale",
    "scaled_backward",
    "scaled_grad",
    "scaled_value_and_grad",
    "set_loss_scale",
    "static_loss_scale",
    "unscale",
    "where_applied",
]

# What is loaded when it is first used: what needs more of JAX than it promises to keep,
# and the classes that only pickles name.
_LATER = {
    "autocast": "_autocast.transform",
    "autocast_report": "_autocast.report",
    "diagnostics": "diagnostics",
    "full_precision": "_autocast.markers",
    "low_precision": "_autocast.markers",
    "plotting": "plotting",
    "save_products": "_autocast.loops",
    "AverageAfterState": "compat._keras_parts",
    "DecayFirstState": "compat._keras_parts",
    "DynamicRuleState": "_scaling.rules",
    "FairseqRuleState": "presets._systems",
    "HeadroomRuleState": "_scaling.headroom",
    "MasterWeightsState": "_ground.states",
    "NoLossScaleRuleState": "_ground.states",
}


if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _importlib.import_module(f"{__name__}.{_LATER[name]}")
        return getattr(module, name, module)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
