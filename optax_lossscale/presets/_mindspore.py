"""The rules of MindSpore's two loss scale managers."""

from __future__ import annotations

import numpy as np

from optax_lossscale._checks import (
    check_count,
    check_factor,
    check_flag,
    check_scale,
)
from optax_lossscale._rules import LossScale, static_loss_scale
from optax_lossscale.presets._rules import uncapped


def mindspore_fixed(
    loss_scale: float = 128.0, drop_overflow_update: bool = True
) -> LossScale:
    """MindSpore's `FixedLossScaleManager`.

        s = loss_scale

    With `drop_overflow_update=False` NOTHING IS CHECKED: as in MindSpore, parameters
    are updated on overflow too, and NaN and infinity reach them.

    Departure: `loss_scaled` unscales the gradients in either case. In MindSpore, with
    `drop_overflow_update=False`, the optimizer must be given the same `loss_scale`.

    Args:
      loss_scale: The scale, from `2**-126` to `2**126`.
      drop_overflow_update: Whether a nonfinite step is skipped.

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


def mindspore_dynamic(
    init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000
) -> LossScale:
    """MindSpore's `DynamicLossScaleManager`, and its `amp.DynamicLossScaler`.

        finite step:     c = c + 1;  if c == scale_window: s = s scale_factor, c = 0
        nonfinite step:  s = max(s / scale_factor, 1);  c = 0

    Departures: MindSpore raises after 1000 nonfinite steps in a row, here
    `raise_if_stalled(opt_state, 1000)` does; and it accepts a `scale_factor` of 1 or
    less, which would turn the rule around.

    Args:
      init_loss_scale: First scale, from `2**-126` to `2**126`.
      scale_factor: Factor of growth, and divisor of backoff; above 1.
      scale_window: Finite steps to the next growth, at least 1.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.mindspore_dynamic(scale_factor=4, scale_window=3000)
      >>> state = rule.adjust(rule.init(), False)
      >>> float(state.loss_scale) == 2.0**22
      True

    References:
      MindSpore 2.10, `mindspore/python/mindspore/train/loss_scale_manager.py`,
      `mindspore/python/mindspore/amp.py`.
    """
    factor = check_factor("scale_factor", scale_factor, 1.0, np.inf)
    return uncapped(
        check_scale("init_loss_scale", init_loss_scale),
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=check_count("scale_window", scale_window),
        min_scale=1.0,
    )
