"""What a rule is, and the classic rules: dynamic, static and none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._ground.checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_bool,
    check_count,
    check_factor,
    check_flag,
    check_scale,
)
from optax_lossscale._ground.states import LossScaleState, NoLossScaleRuleState
from optax_lossscale._ground.types import PyTree, public

# From a state, whether the gradients were finite, and their largest magnitude (if the
# rule needs it), to the next scale and the next `rule_state`.
Change: TypeAlias = Callable[
    [LossScaleState, jax.Array, ArrayLike | None], tuple[jax.Array, PyTree]
]


@public
class LossScale(NamedTuple):
    """A rule, which says how the loss scale changes from step to step.

    Pass it to `loss_scaled`. Functions such as `dynamic_loss_scale` make rules. To
    write your own, make one from two pure functions. To change its settings, make a new
    rule, and continue with the old state. Its `repr` shows the call that made it.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/write_your_own_rule.html

    Attributes:
      init: `init() -> LossScaleState`. Every field is a strongly typed array with a
        buffer of its own.
      adjust: `adjust(state, grads_finite, grads_max=None) -> LossScaleState`, with the
        structure and dtypes of `state`. It sets the next scale and its own
        `rule_state`. It also updates the counts, for those who call it by hand; inside
        `loss_scaled` the step does. `grads_finite`, `bool[]`, says whether the unscaled
        gradients were finite. `grads_max`, `f32[]`, is their largest magnitude, or
        infinity if any entry is nonfinite; it is passed only if `needs_grads_max=True`.
      skips: Whether nonfinite steps are skipped. If False, NaN and infinity reach the
        optimizer, and gradients are read only if `needs_grads_max=True`.
      needs_grads_max: Whether `adjust` must be given `grads_max`.

    Example:
      PopART's rule doubles the scale on every step, or halves it if the largest scaled
      gradient is within 3 bits of overflow.

      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def popart_loss_scale(init_scale=2.0**15, edge=65504 / 8):
      ...     static = ols.static_loss_scale(init_scale)  # Updates the counts.
      ...
      ...     def adjust(state, grads_finite, grads_max=None):
      ...         s = state.loss_scale
      ...         s = jnp.where(s * grads_max > edge, s / 2, s * 2)
      ...         state = static.adjust(state, grads_finite)
      ...         return state._replace(loss_scale=jnp.clip(s, 2.0**-24, 2.0**24))
      ...
      ...     return ols.LossScale(static.init, adjust, needs_grads_max=True)
      >>> rule = popart_loss_scale()
      >>> print(rule.adjust(rule.init(), True, grads_max=1e-3).loss_scale)
      65536.0
    """

    init: Callable[[], LossScaleState]
    adjust: Callable[..., LossScaleState]
    skips: bool = True
    needs_grads_max: bool = False

    def __repr__(self) -> str:
        own = f"LossScale(init={self.init}, adjust={self.adjust})"
        return getattr(self.adjust, "made_by", own)


_Settings = ParamSpec("_Settings")


def shows_call(
    factory: Callable[_Settings, LossScale],
) -> Callable[_Settings, LossScale]:
    """Lets the `repr` of a rule show the function that made it, and its settings."""
    is_preset = factory.__module__.startswith("optax_lossscale.presets")
    name = f"presets.{factory.__name__}" if is_preset else factory.__name__
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*args: _Settings.args, **kwargs: _Settings.kwargs) -> LossScale:
        rule = factory(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments.items()
        settings = ", ".join(f"{key}={_shown(value)}" for key, value in given)
        setattr(rule.adjust, "made_by", f"{name}({settings})")  # noqa: B010
        return rule

    return make


def _shown(setting: object) -> str:
    return getattr(setting, "__name__", repr(setting))  # Of a dtype its name.


def make_rule(
    init_scale: float,
    first_rule_state: Callable[[], PyTree],
    change: Change,
    *,
    skips: bool = True,
    needs_grads_max: bool = False,
) -> LossScale:
    """A rule with a first scale, a first `rule_state`, and a change of both.

    Its `adjust` also counts the step, for those who call it by hand.
    """

    def adjust(
        state: LossScaleState,
        grads_finite: ArrayLike,
        grads_max: ArrayLike | None = None,
    ) -> LossScaleState:
        finite = check_bool("grads_finite", grads_finite, "all_finite(grads)")
        return count_step(state, finite, *change(state, finite, grads_max))

    def init() -> LossScaleState:
        return LossScaleState(
            loss_scale=jnp.asarray(init_scale, jnp.float32),
            last_finite=jnp.asarray(True),
            notfinite_count=jnp.zeros((), jnp.int32),
            total_notfinite=jnp.zeros((), jnp.int32),
            step_count=jnp.zeros((), jnp.int32),
            rule_state=first_rule_state(),
        )

    return LossScale(init, adjust, skips, needs_grads_max)


@public
class DynamicRuleState(NamedTuple):
    """What the classic rule carries beside the scale.

    Attributes:
      growth_count: `i32[]`, finite steps since the last growth or nonfinite step.
      hysteresis_count: `i32[]`, nonfinite steps left before the scale backs off; at 0,
        every further nonfinite step backs off.
    """

    growth_count: jax.Array
    hysteresis_count: jax.Array


@shows_call
def dynamic_loss_scale(
    init_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-24,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    hysteresis_refill: Literal["finite", "growth"] = "finite",
) -> LossScale:
    """The default rule: the scale grows on finite steps and backs off after overflows.

    `loss_scaled(optimizer)` uses it. For other settings pass it yourself, such as
    `loss_scaled(optimizer, dynamic_loss_scale(growth_interval=200))`. With scale `s`,
    `n` finite steps since the last growth or nonfinite step, and `h` nonfinite steps
    left before the scale backs off, a step does

        finite:     n = n + 1;  if n >= growth_interval:
                        s = min(s * growth_factor, max_scale);  n = 0
        nonfinite:  n = 0;  h = h - 1;  if h <= 0:
                        s = max(s * backoff_factor, min_scale)

    `h` starts at `hysteresis` and is refilled as `hysteresis_refill` says.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/choosing_a_rule.html

    Args:
      init_scale: First scale, dimensionless. It may lie outside the bounds: the cap
        applies from the first growth on, and the floor from the first backoff on. A
        power of two makes scaling exact.
      growth_factor: Above 1, dimensionless.
      backoff_factor: Strictly between 0 and 1, dimensionless.
      growth_interval: Finite steps in a row after which the scale grows, at least 1.
      min_scale: Floor of the scale, at least `2**-126`. Scales below 1 are legitimate.
        To notice divergence, watch `notfinite_count` and not the floor.
      max_scale: Cap of the scale, at most `2**126`. If the loss itself is float16, its
        cotangent is the scale: use at most `2**15`.
      hysteresis: How many nonfinite steps it takes to back off, at least 1. With 2, one
        bad batch is forgiven.
      hysteresis_refill: When `h` is set back to `hysteresis`. `"finite"`: on every
        finite step, so that only consecutive nonfinite steps count, as in apex's
        kernel. `"growth"`: only when the scale grows, as in Megatron and DeepSpeed.

    Returns:
      A `LossScale`; its `rule_state` is a NamedTuple `(growth_count,
      hysteresis_count)` of `i32[]`.

    Raises:
      ValueError: If a setting is outside its range, or the floor exceeds the cap.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.dynamic_loss_scale(8.0, growth_interval=2)
      >>> state = rule.init()
      >>> for grads_finite in [True, True, False]:
      ...     state = rule.adjust(state, grads_finite)
      ...     print(state.loss_scale)
      8.0
      16.0
      8.0

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740), and `torch.amp.GradScaler`. Departures from
      PyTorch: the scale has a floor and a cap, gradients are checked after unscaling,
      and `>=` lets the scale grow if a restored count already exceeds the interval.
    """
    if hysteresis_refill not in ("finite", "growth"):
        raise ValueError(
            '`hysteresis_refill` must be "finite" or "growth", got '
            f"{hysteresis_refill!r}."
        )
    return classic_rule(
        init_scale,
        growth_interval,
        growth_factor,
        backoff_factor,
        check_scale("min_scale", min_scale),
        max_scale,
        hysteresis=hysteresis,
        refill_on_finite=hysteresis_refill == "finite",
    )


def classic_rule(
    init_scale: float,
    growth_interval: int,
    growth_factor: float = 2.0,
    backoff_factor: float | None = None,
    min_scale: float | None = None,
    max_scale: float = LARGEST_SCALE,
    *,
    hysteresis: int = 1,
    refill_on_finite: bool = True,
    first_count: int = 0,
) -> LossScale:
    """The rule of `dynamic_loss_scale`, with more settings.

    Without `backoff_factor` it is `1 / growth_factor`. The count of finite steps is
    `first_count` at the start and after a nonfinite step, and 0 after a growth. A floor
    of None or 0 is `2**-126`.
    """
    init_scale = check_scale("init_scale", init_scale)
    interval = check_count("growth_interval", growth_interval)
    hysteresis = check_count("hysteresis", hysteresis)
    growth = check_factor("growth_factor", growth_factor, 1.0, np.inf)
    backoff = 1 / growth if backoff_factor is None else backoff_factor
    backoff = check_factor("backoff_factor", backoff, 0.0, 1.0)
    floor = check_scale("min_scale", min_scale or SMALLEST_SCALE)
    cap = check_scale("max_scale", max_scale)
    if floor > cap:
        raise ValueError(
            f"`min_scale` must be at most `max_scale`, got {floor} and {cap}. (Did you "
            "swap them?)"
        )

    def first() -> DynamicRuleState:
        return DynamicRuleState(jnp.int32(first_count), jnp.int32(hysteresis))

    def change(
        state: LossScaleState, finite: jax.Array, grads_max: ArrayLike | None
    ) -> tuple[jax.Array, DynamicRuleState]:
        s, (n, h) = state.loss_scale, state.rule_state
        n = jnp.where(finite, n + 1, first_count)
        h = jnp.where(finite, h, jnp.maximum(h - 1, 0))
        grows = finite & (n >= interval)
        backs_off = ~finite & (h == 0)
        s = jnp.where(grows, jnp.minimum(s * growth, cap), s)
        s = jnp.where(backs_off, jnp.maximum(s * backoff, floor), s)
        n = jnp.where(grows, 0, n)
        h = jnp.where(finite if refill_on_finite else grows, hysteresis, h)
        return s, DynamicRuleState(n, h)

    return make_rule(init_scale, first, change)


@shows_call
def static_loss_scale(scale: float, *, skip_nonfinite: bool = True) -> LossScale:
    """A rule with a constant loss scale.

        s = scale

    Use `loss_scaled(optimizer, static_loss_scale(2.0**10))` if you know a scale that
    fits the whole run. Nonfinite steps are still skipped and counted. With
    `skip_nonfinite=False` nothing is checked: NaN and infinity reach the parameters,
    and only `step_count` changes. A restored state keeps the scale that it was saved
    with.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/choosing_a_rule.html

    Args:
      scale: The loss scale, dimensionless, from `2**-126` to `2**126`.
      skip_nonfinite: Whether to check, skip and count nonfinite steps.

    Returns:
      A `LossScale`; its `rule_state` is `()`.

    Raises:
      ValueError: If `scale` is outside its range.
      TypeError: If `scale` is not a number.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.static_loss_scale(128.0)
      >>> state = rule.adjust(rule.init(), grads_finite=False)
      >>> print(state.loss_scale, state.total_notfinite)
      128.0 1

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, use constant scales
      from 8 to 32768 (https://arxiv.org/abs/1710.03740).
    """
    scale = check_scale("scale", scale)
    skips = check_flag("skip_nonfinite", skip_nonfinite)
    return make_rule(scale, tuple, _hold, skips=skips)


@shows_call
def no_loss_scale() -> LossScale:
    """A rule without a loss scale: `s = 1`, and nothing is checked.

    Use `loss_scaled(optimizer, no_loss_scale())` to run in float32 or bfloat16 the same
    training loop that runs in float16 with a loss scale. The inner optimizer is called
    as if it stood alone: `update` compiles to the bare program, and a count of steps.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/choosing_a_rule.html

    Returns:
      A `LossScale`; its `rule_state` is empty. `set_loss_scale` refuses its state.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.no_loss_scale().init().loss_scale
      Array(1., dtype=float32)

    References:
      `jmp.NoOpLossScale` (https://github.com/google-deepmind/jmp).
    """
    return make_rule(1.0, NoLossScaleRuleState, _hold, skips=False)


def _hold(
    state: LossScaleState, finite: jax.Array, grads_max: ArrayLike | None
) -> tuple[jax.Array, PyTree]:
    return state.loss_scale, state.rule_state


def count_step(
    state: LossScaleState, finite: jax.Array, loss_scale: jax.Array, rule_state: PyTree
) -> LossScaleState:
    """The state after one more step, with a new scale and a new `rule_state`."""
    in_a_row = optax.safe_increment(state.notfinite_count)
    total = optax.safe_increment(state.total_notfinite)
    return LossScaleState(
        loss_scale=loss_scale,
        last_finite=finite,
        notfinite_count=jnp.where(finite, 0, in_a_row),
        total_notfinite=jnp.where(finite, state.total_notfinite, total),
        step_count=optax.safe_increment(state.step_count),
        rule_state=rule_state,
    )
