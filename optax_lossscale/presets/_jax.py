"""The rules of the scalers that JAX users had: Flax's and jmp's."""

from __future__ import annotations

import numpy as np

from optax_lossscale._checks import check_count, check_factor, check_scale
from optax_lossscale._rules import LossScale
from optax_lossscale.presets._rules import floor_or_none, uncapped


def flax(
    scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    minimum_scale: float | None = float(np.finfo(np.float32).tiny),
) -> LossScale:
    """Flax's `DynamicScale`.

        finite step:     if c == growth_interval: s = s growth_factor, c = 0
                         else: c = c + 1
        nonfinite step:  s = max(s backoff_factor, minimum_scale);  c = 0

    The count is compared before it is increased, so growth comes on finite step
    `growth_interval + 1`, one later than everywhere else.

    Departures: gradients are never averaged over an axis for you (`axis_name` of
    `loss_scaled` shares the verdict alone), and a count restored under a shorter
    interval still grows.

    Args:
      scale: First scale, from `2**-126` to `2**126`.
      growth_factor: Above 1.
      backoff_factor: Strictly between 0 and 1.
      growth_interval: Finite steps before the one that grows, at least 1.
      minimum_scale: Floor of the scale; None is `2**-126`, the same as the default.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.flax(8.0, growth_interval=1)
      >>> state = rule.init()
      >>> for _ in range(2):
      ...     state = rule.adjust(state, True)
      ...     print(state.loss_scale)
      8.0
      16.0

    References:
      flax 0.12.8, `flax/training/dynamic_scale.py`.
    """
    return uncapped(
        check_scale("scale", scale),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=check_count("growth_interval", growth_interval) + 1,
        min_scale=floor_or_none("minimum_scale", minimum_scale),
    )


def jmp(
    loss_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> LossScale:
    """Jmp's `DynamicLossScale`.

        finite step:     c = c + 1;  if c == period: s = s factor, c = 0
        nonfinite step:  s = max(s / factor, min_loss_scale);  c = 0

    The first scale may lie below the floor; the first nonfinite step then raises it.

    Departure: jmp forgets `min_loss_scale` in every `jit` and `tree_map` (its pull
    request 44); this is the rule that it means.

    Args:
      loss_scale: First scale, from `2**-126` to `2**126`.
      period: Finite steps to the next growth, at least 1.
      factor: Factor of growth, and divisor of backoff; above 1.
      min_loss_scale: Floor of the scale; 0 is `2**-126`.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.jmp(8.0, period=1, factor=4)
      >>> rule.adjust(rule.init(), True).loss_scale
      Array(32., dtype=float32)

    References:
      jmp 0.0.4, `jmp/_src/loss_scale.py`. `jmp.StaticLossScale` is
      `static_loss_scale`, `jmp.NoOpLossScale` is `no_loss_scale`.
    """
    factor = check_factor("factor", factor, 1.0, np.inf)
    return uncapped(
        check_scale("loss_scale", loss_scale),
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=check_count("period", period),
        min_scale=floor_or_none("min_loss_scale", min_loss_scale),
    )
