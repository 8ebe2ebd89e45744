"""The rules of apex, Megatron-LM, DeepSpeed and fairseq."""

from __future__ import annotations

import numpy as np

from optax_lossscale._checks import (
    check_count,
    check_factor,
    check_flag,
    check_number,
    check_scale,
)
from optax_lossscale._rules import LossScale, dynamic_loss_scale, shows_settings
from optax_lossscale.presets._rules import (
    check_floor,
    deepspeed_rule,
    fairseq_rule,
    uncapped,
)


@shows_settings
def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> LossScale:
    """The rule of NVIDIA apex's `amp.scaler.LossScaler`.

    With scale `s` and count `u` of finite steps, the rule is

        start:      s = min(init_scale, max_loss_scale)
        finite:     u = u + 1
                    if u == scale_window: s = min(2 * s, max_loss_scale), u = 0
        nonfinite:  s = max(s / 2, min_loss_scale);  u = 0

    Departure: apex adjusts its scale once for each loss, while this rule adjusts it
    once in each step. If you have several losses, keep one state for each loss, as in
    `docs/migration/apex.md`.

    Args:
      init_scale: First scale, from `2**-126` to `2**126`.
      scale_window: Finite steps in a row until the scale doubles, at least 1.
      min_loss_scale: Floor of the scale, at least `2**-126`. None means `2**-126`.
      max_loss_scale: Cap of the scale, at most `2**126`.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range, or the floor exceeds the cap.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.presets.apex(2.0**20, max_loss_scale=8.0).init().loss_scale
      Array(8., dtype=float32)

    References:
      apex before its pull request 1896, `apex/amp/scaler.py`.
    """
    cap = check_scale("max_loss_scale", max_loss_scale)
    floor = check_floor("min_loss_scale", min_loss_scale)
    if floor > cap:
        raise ValueError(
            f"`min_loss_scale` must be at most `max_loss_scale`, got {floor} and {cap}."
        )
    return dynamic_loss_scale(
        min(check_scale("init_scale", init_scale), cap),
        growth_interval=check_count("scale_window", scale_window),
        min_scale=floor,
        max_scale=cap,
    )


@shows_settings
def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> LossScale:
    """The rule of Megatron-LM's `DynamicGradScaler`.

    With scale `s`, count `t` of finite steps, and `h` nonfinite steps left before the
    scale backs off, each step does

        finite:     t = t + 1
                    if t == growth_interval:
                        s = s * growth_factor, t = 0, h = hysteresis
        nonfinite:  t = 0;  h = h - 1
                    if h <= 0: s = max(s * backoff_factor, min_scale)

    Only growth refills `h`. Once `h` is used up, every nonfinite step backs off until
    `growth_interval` finite steps in a row have passed. (Megatron's docstring says that
    only consecutive nonfinite steps count, but its code counts as above.)

    Departure: Megatron's scale can grow to infinity.

    Args:
      initial_scale: First scale, from `2**-126` to `2**126`.
      min_scale: Floor of the scale, at least `2**-126`. 0 means `2**-126`.
      growth_factor: Above 1.
      backoff_factor: Strictly between 0 and 1.
      growth_interval: Finite steps in a row until the scale grows, at least 1.
      hysteresis: How many nonfinite steps it takes to back off, at least 1.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.megatron(initial_scale=8.0)
      >>> state = rule.init()
      >>> for _ in range(3):
      ...     state = rule.adjust(state, grads_finite=False)
      ...     print(state.loss_scale)
      8.0
      4.0
      2.0

    References:
      Megatron-LM core 0.16.1, `megatron/core/optimizer/grad_scaler.py`.
    """
    return uncapped(
        check_scale("initial_scale", initial_scale),
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=check_floor("min_scale", min_scale),
        hysteresis=hysteresis,
        refill_on_finite=False,
    )


@shows_settings
def deepspeed(
    init_scale: float = 2.0**32,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 1,
    consecutive_hysteresis: bool = False,
) -> LossScale:
    """The rule of DeepSpeed's `DynamicLossScaler`.

    With scale `s`, count `c` of finite steps, and `h` nonfinite steps left before the
    scale backs off, the rule is

        start:      c = -1;  h = delayed_shift
        finite:     c = c + 1;  if consecutive_hysteresis: h = delayed_shift
                    if c == scale_window: s = 2 * s, c = 0, h = delayed_shift
        nonfinite:  c = -1
                    if h == 1: s = max(s / 2, min_scale)  else: h = h - 1

    So the scale grows on finite step `scale_window + 1` after the start or a nonfinite
    step, and then every `scale_window` finite steps. (Before its pull request 6976 of
    June 2025, DeepSpeed's first growth was not late. For that rule, use
    `presets.megatron` with these settings.)

    In the `fp16` section of DeepSpeed's JSON file the settings have other names:
    `init_scale` is `2**initial_scale_power`, `scale_window` is `loss_scale_window`,
    `min_scale` is `min_loss_scale`, and `delayed_shift` is `hysteresis`. A `loss_scale`
    other than 0 in that section corresponds to `static_loss_scale`.

    Departure: DeepSpeed raises an error at `min_scale`, unless its option
    `raise_error_at_min_scale` is off. This rule goes on at `min_scale`.

    Args:
      init_scale: First scale, from `2**-126` to `2**126`.
      scale_window: Finite steps from one growth to the next, at least 1.
      min_scale: Floor of the scale, at least `2**-126`. 0 means `2**-126`.
      delayed_shift: How many nonfinite steps it takes to back off, at least 1.
      consecutive_hysteresis: Whether every finite step refills `h`. If False, only
        growth does.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.deepspeed(8.0, scale_window=1)
      >>> state = rule.init()
      >>> for _ in range(3):
      ...     state = rule.adjust(state, grads_finite=True)
      ...     print(state.loss_scale)
      8.0
      16.0
      32.0

    References:
      DeepSpeed 0.19.8, `deepspeed/runtime/fp16/loss_scaler.py`.
    """
    rule = uncapped(
        check_scale("init_scale", init_scale),
        growth_interval=check_count("scale_window", scale_window),
        min_scale=check_floor("min_scale", min_scale),
        hysteresis=check_count("delayed_shift", delayed_shift),
        refill_on_finite=check_flag("consecutive_hysteresis", consecutive_hysteresis),
    )
    return deepspeed_rule(rule)


@shows_settings
def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> LossScale:
    """The rule of fairseq's `DynamicLossScaler`.

    With scale `s`, count `c` of finite steps, `r` steps since the scale last changed,
    and `o` nonfinite steps since the last backoff, each step does

        finite:     r = r + 1;  c = c + 1
                    if c == scale_window: s = s * scale_factor, c = r = 0
        nonfinite:  r = r + 1;  o = o + 1;  c = 0
                    if o / r >= tolerance:
                        s = max(s / scale_factor, threshold), r = o = 0

    On fairseq's command line, `init_scale`, `scale_window`, `tolerance`, `threshold`
    and `min_loss_scale` are called `--fp16-init-scale`, `--fp16-scale-window`,
    `--fp16-scale-tolerance`, `--threshold-loss-scale` and `--min-loss-scale`, and they
    have other defaults.

    Departure: if backoff would take `s` to `min_loss_scale` or below, fairseq puts back
    the previous scale and raises an error. This rule keeps the previous scale and
    continues to skip nonfinite steps, which `notfinite_count` counts.

    Args:
      init_scale: First scale, from `2**-126` to `2**126`.
      scale_factor: Growth multiplies by it, and backoff divides by it; above 1.
      scale_window: Finite steps in a row until the scale grows, at least 1.
      tolerance: The share `o / r` of nonfinite steps at which the scale backs off, from
        0 to 1.
      threshold: Floor of the scale, at least `2**-126`. None means `2**-126`.
      min_loss_scale: Backoff never takes the scale to this number or below. At least 0.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.fairseq(8.0, tolerance=0.5)
      >>> state = rule.init()
      >>> for grads_finite in [True, True, False, False]:
      ...     state = rule.adjust(state, grads_finite)
      ...     print(state.loss_scale)
      8.0
      8.0
      8.0
      4.0

    References:
      fairseq 0.12.2, `fairseq/optim/dynamic_loss_scaler.py`.
    """
    return fairseq_rule(
        check_scale("init_scale", init_scale),
        scale_factor=check_factor("scale_factor", scale_factor, 1.0, np.inf),
        scale_window=check_count("scale_window", scale_window),
        tolerance=check_number("tolerance", tolerance, 0.0, 1.0),
        threshold=check_floor("threshold", threshold),
        min_loss_scale=check_number("min_loss_scale", min_loss_scale, 0.0),
    )
