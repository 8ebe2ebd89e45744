"""The rules of Flax and of jmp."""

from __future__ import annotations

import numpy as np

from optax_lossscale._checks import check_count, check_factor, check_scale
from optax_lossscale._rules import LossScale, shows_settings
from optax_lossscale.presets._rules import check_floor, symmetric, uncapped


@shows_settings
def flax(
    scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    minimum_scale: float | None = float(np.finfo(np.float32).tiny),
) -> LossScale:
    """The rule of Flax's `DynamicScale`.

    With scale `s` and count `c` of finite steps, each step does

        finite:     if c == growth_interval: s = s * growth_factor, c = 0
                    else: c = c + 1
        nonfinite:  s = max(s * backoff_factor, minimum_scale);  c = 0

    The count is compared before it is increased. So the scale grows on finite step
    `growth_interval + 1`, one step later than in PyTorch and most other systems.

    Departures: Flax averages the gradients over the axis of its `axis_name`; with the
    `axis_name` of `loss_scaled`, devices share only whether the step is finite. If a
    restored count already exceeds `growth_interval`, the scale still grows here.

    Args:
      scale: First scale, from `2**-126` to `2**126`.
      growth_factor: Above 1.
      backoff_factor: Strictly between 0 and 1.
      growth_interval: Finite steps in a row before the step that grows, at least 1.
      minimum_scale: Floor of the scale, at least `2**-126`. None and 0 mean `2**-126`,
        which is also the default.

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
      ...     state = rule.adjust(state, grads_finite=True)
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
        min_scale=check_floor("minimum_scale", minimum_scale),
    )


@shows_settings
def jmp(
    loss_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> LossScale:
    """The rule of jmp's `DynamicLossScale`.

    With scale `s` and count `c` of finite steps, each step does

        finite:     c = c + 1;  if c == period: s = s * factor, c = 0
        nonfinite:  s = max(s / factor, min_loss_scale);  c = 0

    The first scale may lie below the floor. Then the first nonfinite step raises it to
    the floor.

    Departure: jmp loses its `min_loss_scale` in every `jit` and `tree_map` (see jmp's
    pull request 44). This is the rule that jmp intends.

    Args:
      loss_scale: First scale, from `2**-126` to `2**126`.
      period: Finite steps in a row until the scale grows, at least 1.
      factor: Growth multiplies the scale by it, and backoff divides by it; above 1.
      min_loss_scale: Floor of the scale, at least `2**-126`. 0 means `2**-126`.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.jmp(8.0, period=1, factor=4)
      >>> rule.adjust(rule.init(), grads_finite=True).loss_scale
      Array(32., dtype=float32)

    References:
      jmp 0.0.4, `jmp/_src/loss_scale.py`. In this package `jmp.StaticLossScale` is
      `static_loss_scale`, and `jmp.NoOpLossScale` is `no_loss_scale`.
    """
    return symmetric(
        check_scale("loss_scale", loss_scale),
        factor=check_factor("factor", factor, 1.0, np.inf),
        growth_interval=check_count("period", period),
        min_scale=check_floor("min_loss_scale", min_loss_scale),
    )
