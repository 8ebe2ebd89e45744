"""The rule of each system, under the names and defaults that it has there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._checks import (
    check_count,
    check_factor,
    check_flag,
    check_number,
    check_scale,
)
from optax_lossscale._rules import (
    LossScale,
    counting_rule,
    dynamic_loss_scale,
    no_loss_scale,
    shows_settings,
    static_loss_scale,
    verdict_rule,
)
from optax_lossscale._state import LossScaleState
from optax_lossscale._types import PyTree
from optax_lossscale.presets._rules import (
    DeepSpeedRuleState,
    FairseqRuleState,
    check_floor,
    uncapped,
)


@shows_settings
def torch(
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScale:
    """The rule of PyTorch's `torch.amp.GradScaler`.

    With scale `s` and count `t` of finite steps, each step does

        finite:     t = t + 1;  if t == growth_interval: s = s * growth_factor, t = 0
        nonfinite:  s = s * backoff_factor;  t = 0

    PyTorch refuses a growth beyond the range of float32, and restarts the count; this
    rule does so beyond `2**126`.

    Departure: PyTorch has no floor, so its scale reaches zero after 166 nonfinite
    steps.

    Args:
      init_scale: First scale, from `2**-126` to `2**126`.
      growth_factor: Above 1.
      backoff_factor: Strictly between 0 and 1.
      growth_interval: Finite steps in a row until the scale grows, at least 1.
      enabled: Whether to scale at all. If False, the other settings are ignored.

    Returns:
      A `LossScale`. With `enabled=False` it is `no_loss_scale()`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.torch(8.0, growth_interval=1)
      >>> rule.adjust(rule.init(), grads_finite=True).loss_scale
      Array(16., dtype=float32)
      >>> ols.presets.torch(enabled=False) == ols.no_loss_scale()
      True

    References:
      torch 2.13, `torch/amp/grad_scaler.py`,
      `aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp`.
    """
    if not check_flag("enabled", enabled):
        return no_loss_scale()
    return counting_rule(
        check_scale("init_scale", init_scale),
        uncapped(growth_factor, backoff_factor),
        growth_interval=check_count("growth_interval", growth_interval),
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
    floor = check_floor("min_scale", min_scale)
    return counting_rule(
        check_scale("initial_scale", initial_scale),
        uncapped(growth_factor, backoff_factor, floor),
        growth_interval=check_count("growth_interval", growth_interval),
        hysteresis=check_count("hysteresis", hysteresis),
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
    return counting_rule(
        check_scale("init_scale", init_scale),
        uncapped(floor=check_floor("min_scale", min_scale)),
        growth_interval=check_count("scale_window", scale_window),
        hysteresis=check_count("delayed_shift", delayed_shift),
        refill_on_finite=check_flag("consecutive_hysteresis", consecutive_hysteresis),
        first_count=-1,
        make_counts=DeepSpeedRuleState,
    )


@shows_settings
def keras(
    initial_scale: float = 32768.0, dynamic_growth_steps: int = 2000
) -> LossScale:
    """The rule of Keras 3's `LossScaleOptimizer`, and of R's `optimizer_loss_scale`.

    With scale `s` and count `c` of finite steps, each step does

        finite:     c = c + 1;  if c == dynamic_growth_steps: s = 2 * s, c = 0
        nonfinite:  s = s / 2;  c = 0

    Departure: Keras has neither a floor nor a cap. After 142 nonfinite steps its scale
    is zero on JAX, which flushes subnormal numbers on CPU, and NaN reaches the
    parameters. If its scale becomes infinite, all updates are zero.

    Args:
      initial_scale: First scale, from `2**-126` to `2**126`.
      dynamic_growth_steps: Finite steps in a row until the scale doubles, at least 1.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.keras(initial_scale=8.0, dynamic_growth_steps=1)
      >>> rule.adjust(rule.init(), grads_finite=True).loss_scale
      Array(16., dtype=float32)

    References:
      keras 3.15.1, `keras/src/optimizers/loss_scale_optimizer.py`. For the whole
      signature, over any Optax optimizer, see `optax_lossscale.loss_scale_optimizer`.
    """
    return counting_rule(
        check_scale("initial_scale", initial_scale),
        uncapped(),
        growth_interval=check_count("dynamic_growth_steps", dynamic_growth_steps),
    )


@shows_settings
def tf_keras(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> LossScale:
    """The rule of `tf.keras.mixed_precision.LossScaleOptimizer`.

    With scale `s` and count `c` of finite steps, each step does

        finite:     c = c + 1;  if c >= dynamic_growth_steps: s = 2 * s, c = 0
        nonfinite:  s = max(s / 2, 1);  c = 0

    **With `dynamic=False` nothing is checked.** The scale is always `initial_scale`,
    and NaN and infinity reach the parameters, as in tf.keras.

    Departure: tf.keras counts an iteration on a skipped step, so schedules and Adam's
    bias correction advance. Here a skipped step advances nothing in the inner
    optimizer.

    Args:
      dynamic: Whether the scale changes.
      initial_scale: First scale, from `2**-126` to `2**126`. None means `2**15`, but a
        number is required with `dynamic=False`.
      dynamic_growth_steps: Finite steps in a row until the scale doubles, at least 1.
        None means 2000, and is the only value allowed with `dynamic=False`.

    Returns:
      A `LossScale`. With `dynamic=False` it does not skip nonfinite steps.

    Raises:
      ValueError: If a setting is outside its range. With `dynamic=False`, also if
        `initial_scale` is missing or `dynamic_growth_steps` is given.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.tf_keras(initial_scale=1.0)
      >>> rule.adjust(rule.init(), grads_finite=False).loss_scale
      Array(1., dtype=float32)

    References:
      tf_keras 2.21, `tf_keras/mixed_precision/loss_scale_optimizer.py`.
    """
    steps = dynamic_growth_steps
    if check_flag("dynamic", dynamic):
        if initial_scale is None or steps is None:
            # The rule shows these numbers in its settings, as tf.keras does.
            initial_scale = 2.0**15 if initial_scale is None else initial_scale
            return tf_keras(True, initial_scale, 2000 if steps is None else steps)
        return counting_rule(
            check_scale("initial_scale", initial_scale),
            uncapped(floor=1.0),
            growth_interval=check_count("dynamic_growth_steps", steps),
        )
    if initial_scale is None:
        raise ValueError(
            "`initial_scale` must be given with `dynamic=False`, got None. (It is the "
            "scale of the whole run.)"
        )
    if steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be None with `dynamic=False`, got "
            f"{steps}. (A fixed scale does not grow.)"
        )
    scale = check_scale("initial_scale", initial_scale)
    return static_loss_scale(scale, skip_nonfinite=False)


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
    factor = check_factor("scale_factor", scale_factor, 1.0, np.inf)
    return counting_rule(
        check_scale("init_loss_scale", init_loss_scale),
        uncapped(factor, backoff_factor=None, floor=1.0),
        growth_interval=check_count("scale_window", scale_window),
    )


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
    floor = check_floor("minimum_scale", minimum_scale)
    return counting_rule(
        check_scale("scale", scale),
        uncapped(growth_factor, backoff_factor, floor),
        growth_interval=check_count("growth_interval", growth_interval) + 1,
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
    factor = check_factor("factor", factor, 1.0, np.inf)
    floor = check_floor("min_loss_scale", min_loss_scale)
    return counting_rule(
        check_scale("loss_scale", loss_scale),
        uncapped(factor, backoff_factor=None, floor=floor),
        growth_interval=check_count("period", period),
    )


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
    init_scale = check_scale("init_scale", init_scale)
    factor = check_factor("scale_factor", scale_factor, 1.0, np.inf)
    window = check_count("scale_window", scale_window)
    # Slightly lower, because a quotient may be rounded down: 3 overflows in 10 steps
    # must reach a tolerance of 0.3.
    lowered_tolerance = check_number("tolerance", tolerance, 0.0, 1.0) * (1 - 2.0**-20)
    floor = check_floor("threshold", threshold)
    lowest = check_number("min_loss_scale", min_loss_scale, 0.0)
    change = uncapped(factor, backoff_factor=None, floor=floor)

    def first() -> PyTree:
        return FairseqRuleState(*(jnp.zeros((), jnp.int32) for _ in range(3)))

    def advance(state: LossScaleState, finite: jax.Array) -> tuple[jax.Array, PyTree]:
        c, r, o = state.rule_state
        c, r = optax.safe_increment(c), optax.safe_increment(r)
        o = jnp.where(finite, o, optax.safe_increment(o))
        overflow_rate = o.astype(jnp.float32) / r.astype(jnp.float32)
        grow = finite & (c >= window)
        back_off = ~finite & (overflow_rate >= lowered_tolerance)
        s = change(state, grow, back_off)
        s = jnp.where(back_off & (s <= lowest), state.loss_scale, s)
        rule_state = FairseqRuleState(
            growth_count=jnp.where(finite & ~grow, c, 0),
            rescale_count=jnp.where(grow | back_off, 0, r),
            overflow_count=jnp.where(back_off, 0, o),
        )
        return s, rule_state

    return verdict_rule(init_scale, first, advance)
