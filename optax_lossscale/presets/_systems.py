"""The rule of each system, under the names and defaults that it has there."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._ground.checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_count,
    check_factor,
    check_flag,
    check_number,
    check_scale,
)
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.types import public
from optax_lossscale._scaling.rules import (
    LossScale,
    classic_rule,
    make_rule,
    no_loss_scale,
    shows_call,
    static_loss_scale,
)


@public
class FairseqRuleState(NamedTuple):
    """The counts that fairseq's rule carries beside the scale, in steps.

    Attributes:
      growth_count: `i32[]`. Finite steps since the last growth or nonfinite step.
      rescale_count: `i32[]`. All steps since the scale last changed.
      overflow_count: `i32[]`. Nonfinite steps since the last backoff.
    """

    growth_count: jax.Array
    rescale_count: jax.Array
    overflow_count: jax.Array


@shows_call
def torch(
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScale:
    """The rule of PyTorch's `torch.amp.GradScaler`; see `presets` for its settings.

    With `enabled=False` it is `no_loss_scale()`, and the other settings are ignored.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/pytorch.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.torch(8.0, growth_interval=1)
      >>> rule.adjust(rule.init(), grads_finite=True).loss_scale
      Array(16., dtype=float32)

    References:
      torch 2.13, `torch/amp/grad_scaler.py`,
      `aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp`.
    """
    if not check_flag("enabled", enabled):
        return no_loss_scale()
    return classic_rule(init_scale, growth_interval, growth_factor, backoff_factor)


@shows_call
def apex(
    init_scale: float = 2.0**16,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> LossScale:
    """The rule of apex's `amp.scaler.LossScaler`; see `presets` for its settings.

    The first scale is `min(init_scale, max_loss_scale)`. A `min_loss_scale` above the
    cap raises `ValueError`.

    Departure: apex adjusts its scale once for each loss, this rule once in each step.
    With several losses, keep one state for each.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/other_systems.html

    Example:
      >>> import optax_lossscale as ols
      >>> ols.presets.apex(2.0**20, max_loss_scale=8.0).init().loss_scale
      Array(8., dtype=float32)

    References:
      apex before its pull request 1896, `apex/amp/scaler.py`.
    """
    cap = check_scale("max_loss_scale", max_loss_scale)
    floor = _check_floor("min_loss_scale", min_loss_scale, cap)
    scale = min(check_scale("init_scale", init_scale), cap)
    return classic_rule(
        scale, check_count("scale_window", scale_window), min_scale=floor, max_scale=cap
    )


@shows_call
def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> LossScale:
    """The rule of Megatron-LM's `DynamicGradScaler`; see `presets` for its settings.

    It takes `hysteresis` nonfinite steps to back off. Once they are used up, every
    nonfinite step backs off until the scale has grown, that is, until `growth_interval`
    finite steps in a row have passed. (Megatron's docstring says that only consecutive
    nonfinite steps count, but its code counts as here.)

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/other_systems.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.megatron(8.0)
      >>> once = rule.adjust(rule.init(), grads_finite=False)
      >>> print(once.loss_scale, rule.adjust(once, grads_finite=False).loss_scale)
      8.0 4.0

    References:
      Megatron-LM core 0.16.1, `megatron/core/optimizer/grad_scaler.py`.
    """
    return classic_rule(
        check_scale("initial_scale", initial_scale),
        growth_interval,
        growth_factor,
        backoff_factor,
        min_scale,
        hysteresis=hysteresis,
        refill_on_finite=False,
    )


@shows_call
def deepspeed(
    init_scale: float = 2.0**32,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 1,
    consecutive_hysteresis: bool = False,
) -> LossScale:
    """The rule of DeepSpeed's `DynamicLossScaler`; see `presets` for its settings.

    With count `n` of finite steps, and `h` nonfinite steps left before the scale `s`
    backs off, the rule is

        start:      n = -1;  h = delayed_shift
        finite:     n = n + 1;  if consecutive_hysteresis: h = delayed_shift
                    if n == scale_window: s = 2 * s, n = 0, h = delayed_shift
        nonfinite:  n = -1
                    if h == 1: s = max(s / 2, min_scale)  else: h = h - 1

    So the scale grows on finite step `scale_window + 1` after the start or a nonfinite
    step, and then every `scale_window` finite steps. (Before its pull request 6976 of
    June 2025, DeepSpeed's first growth was not late. `presets.megatron` is that rule.)

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/other_systems.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.deepspeed(8.0, scale_window=1)
      >>> once = rule.adjust(rule.init(), grads_finite=True)
      >>> print(once.loss_scale, rule.adjust(once, grads_finite=True).loss_scale)
      8.0 16.0

    References:
      DeepSpeed 0.19.8, `deepspeed/runtime/fp16/loss_scaler.py`.
    """
    return classic_rule(
        init_scale,
        check_count("scale_window", scale_window),
        min_scale=min_scale,
        hysteresis=check_count("delayed_shift", delayed_shift),
        refill_on_finite=check_flag("consecutive_hysteresis", consecutive_hysteresis),
        first_count=-1,
    )


@shows_call
def keras(
    initial_scale: float = 32768.0, dynamic_growth_steps: int = 2000
) -> LossScale:
    """The rule of Keras 3's `LossScaleOptimizer`; see `presets` for its settings.

    R's `optimizer_loss_scale` has the same rule. The whole signature, over any Optax
    optimizer, is that of `optax_lossscale.loss_scale_optimizer`.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/keras.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.keras(initial_scale=8.0, dynamic_growth_steps=1)
      >>> rule.adjust(rule.init(), grads_finite=True).loss_scale
      Array(16., dtype=float32)

    References:
      keras 3.15.1, `keras/src/optimizers/loss_scale_optimizer.py`.
    """
    return classic_rule(
        check_scale("initial_scale", initial_scale),
        check_count("dynamic_growth_steps", dynamic_growth_steps),
    )


@shows_call
def tf_keras(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> LossScale:
    """The rule of tf.keras's `LossScaleOptimizer`; see `presets` for its settings.

    None means a first scale of `2**15`, and 2000 steps.

    **With `dynamic=False` nothing is checked.** The scale is `initial_scale`, which
    must be given, while `dynamic_growth_steps` must not. NaN and infinity reach the
    parameters, as in tf.keras.

    Departure: on a skipped step tf.keras counts an iteration, so schedules and Adam's
    bias correction advance. Here nothing in the inner optimizer does.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/other_systems.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.tf_keras(initial_scale=1.0)
      >>> rule.adjust(rule.init(), grads_finite=False).loss_scale
      Array(1., dtype=float32)

    References:
      tf_keras 2.21, `tf_keras/mixed_precision/loss_scale_optimizer.py`.
    """
    is_dynamic = check_flag("dynamic", dynamic)
    if not is_dynamic and (initial_scale is None or dynamic_growth_steps is not None):
        raise ValueError(
            "with `dynamic=False`, `initial_scale` must be given and "
            f"`dynamic_growth_steps` must not, got {initial_scale} and "
            f"{dynamic_growth_steps}."
        )
    scale = 2.0**15 if initial_scale is None else initial_scale
    scale = check_scale("initial_scale", scale)
    if not is_dynamic:
        return static_loss_scale(scale, skip_nonfinite=False)
    steps = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
    return classic_rule(
        scale, check_count("dynamic_growth_steps", steps), min_scale=1.0
    )


@shows_call
def mindspore_fixed(
    loss_scale: float = 128.0, drop_overflow_update: bool = True
) -> LossScale:
    """The rule of MindSpore's `FixedLossScaleManager`: `s = loss_scale`.

    **With `drop_overflow_update=False` nothing is checked.** NaN and infinity reach the
    parameters, as in MindSpore.

    Departure: `loss_scaled` unscales the gradients with either setting. In MindSpore,
    with `drop_overflow_update=False`, the optimizer does, by a `loss_scale` of its own.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/other_systems.html

    Example:
      >>> import optax_lossscale as ols
      >>> ols.presets.mindspore_fixed(1024.0, drop_overflow_update=False).skips
      False

    References:
      MindSpore 2.10, `mindspore/python/mindspore/train/loss_scale_manager.py`.
    """
    skips = check_flag("drop_overflow_update", drop_overflow_update)
    return static_loss_scale(
        check_scale("loss_scale", loss_scale), skip_nonfinite=skips
    )


@shows_call
def mindspore_dynamic(
    init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000
) -> LossScale:
    """The rule of MindSpore's `amp.DynamicLossScaler`; see `presets` for its settings.

    `DynamicLossScaleManager` has the same rule.

    Departure: MindSpore accepts a `scale_factor` of 1 or less, which would exchange
    growth and backoff; here it is refused.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/other_systems.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.mindspore_dynamic(scale_factor=4, scale_window=3000)
      >>> state = rule.adjust(rule.init(), grads_finite=False)
      >>> float(state.loss_scale) == 2.0**22
      True

    References:
      MindSpore 2.10, `mindspore/python/mindspore/train/loss_scale_manager.py`.
    """
    return classic_rule(
        check_scale("init_loss_scale", init_loss_scale),
        check_count("scale_window", scale_window),
        check_factor("scale_factor", scale_factor, 1.0, np.inf),
        min_scale=1.0,
    )


@shows_call
def flax(
    scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    minimum_scale: float | None = SMALLEST_SCALE,
) -> LossScale:
    """The rule of Flax's `DynamicScale`; see `presets` for its settings.

        finite:     if n == growth_interval: s = s * growth_factor, n = 0
                    else: n = n + 1

    Flax compares its count before it increases it. So the scale grows on finite step
    `growth_interval + 1`, one step later than in PyTorch and most other systems.

    Departures: Flax averages the gradients over the axis of its `axis_name`; with the
    `axis_name` of `loss_scaled`, devices share only whether the step is finite. If a
    restored count already exceeds `growth_interval`, the scale still grows here.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/flax_and_jmp.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.flax(8.0, growth_interval=1)
      >>> once = rule.adjust(rule.init(), grads_finite=True)
      >>> print(once.loss_scale, rule.adjust(once, grads_finite=True).loss_scale)
      8.0 16.0

    References:
      flax 0.12.8, `flax/training/dynamic_scale.py`.
    """
    # No count of 32 bits goes beyond the longest interval.
    steps = min(check_count("growth_interval", growth_interval) + 1, 2**31 - 1)
    return classic_rule(
        check_scale("scale", scale),
        steps,
        growth_factor,
        backoff_factor,
        _check_floor("minimum_scale", minimum_scale),
    )


@shows_call
def jmp(
    loss_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> LossScale:
    """The rule of jmp's `DynamicLossScale`; see `presets` for its settings.

    In this package jmp's `StaticLossScale` is `static_loss_scale`, and its
    `NoOpLossScale` is `no_loss_scale`.

    Departure: jmp loses its `min_loss_scale` in every `jit` and `tree_map` (see jmp's
    pull request 44). This is the rule that jmp intends.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/flax_and_jmp.html

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.jmp(8.0, period=1, factor=4)
      >>> rule.adjust(rule.init(), grads_finite=True).loss_scale
      Array(32., dtype=float32)

    References:
      jmp 0.0.4, `jmp/_src/loss_scale.py`.
    """
    return classic_rule(
        check_scale("loss_scale", loss_scale),
        check_count("period", period),
        check_factor("factor", factor, 1.0, np.inf),
        min_scale=_check_floor("min_loss_scale", min_loss_scale),
    )


@shows_call
def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> LossScale:
    """The rule of fairseq's `DynamicLossScaler`; see `presets` for its settings.

    With count `n` of finite steps, `r` steps since the scale last changed, and `o`
    nonfinite steps since the last backoff, each step does

        finite:     r = r + 1;  n = n + 1
                    if n == scale_window: s = s * scale_factor, n = r = 0
        nonfinite:  r = r + 1;  o = o + 1;  n = 0
                    if o / r >= tolerance:
                        s = max(s / scale_factor, threshold), r = o = 0

    `tolerance` is from 0 to 1, and `min_loss_scale` at least 0. The command line has
    other defaults.

    Departure: if backoff would take `s` to `min_loss_scale` or below, fairseq puts back
    the previous scale and raises an error. This rule keeps the previous scale and
    continues to skip nonfinite steps, which `notfinite_count` counts.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/other_systems.html

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
    factor = check_factor("scale_factor", scale_factor, 1.0, np.inf)
    window = check_count("scale_window", scale_window)
    floor = _check_floor("threshold", threshold)
    lowest = check_number("min_loss_scale", min_loss_scale, 0.0)
    # Slightly lower, because a quotient may be rounded down: 3 overflows in 10 steps
    # must reach a tolerance of 0.3.
    tolerated = check_number("tolerance", tolerance, 0.0, 1.0) * (1 - 2.0**-20)

    def first() -> FairseqRuleState:
        return FairseqRuleState(*(jnp.zeros((), jnp.int32) for _ in range(3)))

    def change(
        state: LossScaleState, finite: jax.Array, grads_max: ArrayLike | None
    ) -> tuple[jax.Array, FairseqRuleState]:
        s, (n, r, o) = state.loss_scale, state.rule_state
        n, r = optax.safe_increment(n), optax.safe_increment(r)
        o = jnp.where(finite, o, optax.safe_increment(o))
        grows = finite & (n >= window)
        backs_off = ~finite & (o / r >= tolerated)
        larger = jnp.minimum(s * factor, LARGEST_SCALE)
        smaller = jnp.maximum(s / factor, floor)
        smaller = jnp.where(smaller > lowest, smaller, s)
        s = jnp.where(grows, larger, jnp.where(backs_off, smaller, s))
        rule_state = FairseqRuleState(
            growth_count=jnp.where(finite & ~grows, n, 0),
            rescale_count=jnp.where(grows | backs_off, 0, r),
            overflow_count=jnp.where(backs_off, 0, o),
        )
        return s, rule_state

    return make_rule(check_scale("init_scale", init_scale), first, change)


def _check_floor(name: str, floor: float | None, cap: float = LARGEST_SCALE) -> float:
    """Returns the floor of a scale; `2**-126` for None or 0."""
    return check_number(name, floor, SMALLEST_SCALE, cap) if floor else SMALLEST_SCALE
