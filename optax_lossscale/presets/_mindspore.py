"""The rules of MindSpore's two loss scale managers."""

from __future__ import annotations

import numpy as np

from optax_lossscale._checks import (
    check_count,
    check_factor,
    check_flag,
    check_scale,
)
from optax_lossscale._rules import LossScale, shows_settings, static_loss_scale
from optax_lossscale.presets._rules import symmetric


@shows_settings
def mindspore_fixed(
    loss_scale: float = 128.0, drop_overflow_update: bool = True
) -> LossScale:
    """The rule of MindSpore's `FixedLossScaleManager`.

        s = loss_scale

    **With `drop_overflow_update=False` nothing is checked.** The parameters are updated
    on overflow too, and NaN and infinity reach them, as in MindSpore.

    Departure: `loss_scaled` unscales the gradients with either setting. In MindSpore,
    with `drop_overflow_update=False`, you must pass the same `loss_scale` to the
    optimizer.

    Args:
      loss_scale: The scale of the whole run, from `2**-126` to `2**126`.
      drop_overflow_update: Whether nonfinite steps are checked for and skipped.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If `loss_scale` is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.presets.mindspore_fixed().skips
      True
      >>> ols.presets.mindspore_fixed(1024.0, drop_overflow_update=False).skips
      False

    References:
      MindSpore 2.10, `mindspore/python/mindspore/train/loss_scale_manager.py`.
    """
    return static_loss_scale(
        check_scale("loss_scale", loss_scale),
        skip_nonfinite=check_flag("drop_overflow_update", drop_overflow_update),
    )


@shows_settings
def mindspore_dynamic(
    init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000
) -> LossScale:
    """The rule of MindSpore's `DynamicLossScaleManager` and `amp.DynamicLossScaler`.

    With scale `s` and count `c` of finite steps, each step does

        finite:     c = c + 1;  if c == scale_window: s = s * scale_factor, c = 0
        nonfinite:  s = max(s / scale_factor, 1);  c = 0

    Departures: MindSpore raises an error after 1000 nonfinite steps in a row; here,
    call `raise_if_stalled(opt_state, 1000)`. MindSpore also accepts a `scale_factor` of
    1 or less, which would exchange growth and backoff; here it is refused.

    Args:
      init_loss_scale: First scale, from `2**-126` to `2**126`.
      scale_factor: Growth multiplies by it, and backoff divides by it; above 1.
      scale_window: Finite steps in a row until the scale grows, at least 1.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.mindspore_dynamic(scale_factor=4, scale_window=3000)
      >>> state = rule.adjust(rule.init(), grads_finite=False)
      >>> float(state.loss_scale) == 2.0**22
      True

    References:
      MindSpore 2.10, `mindspore/python/mindspore/train/loss_scale_manager.py` and
      `mindspore/python/mindspore/amp.py`.
    """
    return symmetric(
        check_scale("init_loss_scale", init_loss_scale),
        factor=check_factor("scale_factor", scale_factor, 1.0, np.inf),
        growth_interval=check_count("scale_window", scale_window),
        min_scale=1.0,
    )
