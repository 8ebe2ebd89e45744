"""What a rule is, and the classic rules: dynamic, static and none."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._ground.checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_bounds,
    check_count,
    check_factor,
    check_flag,
    check_scale,
)
from optax_lossscale._ground.states import LossScaleState, Unscaled
from optax_lossscale._ground.tree import dtype_of
from optax_lossscale._ground.types import PyTree, public
from optax_lossscale._scaling.state import with_arrays

_Settings = ParamSpec("_Settings")
# From a state, whether the gradients were finite, and their largest magnitude (if the
# rule needs it), to the next scale and the next `rule_state`.
Change: TypeAlias = Callable[
    [LossScaleState, jax.Array, jax.Array | None], tuple[jax.Array, PyTree]
]
# From the count of steps to the floor and, if there is one, the cap.
_Bounds: TypeAlias = Callable[[jax.Array], tuple[ArrayLike, ArrayLike | None]]


@public
class LossScale(NamedTuple):
    """A rule, which says how the loss scale changes from step to step.

    Pass it to `loss_scaled`. Functions such as `dynamic_loss_scale` make rules. To
    write your own, make one from two pure functions, as
    `docs/guides/write_your_own_rule.md` shows. To see the settings of a rule, print it
    or read `settings`. They cannot be changed; make a new rule instead, and continue
    with the old state.

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
        optimizer; only an unusable scale still skips the step.
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

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the rule was made with; empty for a rule of your own."""
        return {}


class _MadeRule(LossScale):
    """A rule of this package.

    Copies that `_replace` or JAX make lose its attributes.

    Attributes:
      name: The function that made the rule.
      made_with: The settings that it was made with.
    """

    name = "LossScale"
    made_with: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.made_with or {})

    def __repr__(self) -> str:
        shown = self._asdict() if self.made_with is None else self.made_with
        listed = ", ".join(
            f"{key}={value.__name__ if isinstance(value, type) else repr(value)}"
            for key, value in shown.items()
        )
        return f"{self.name}({listed})"


def make_rule(
    init_scale: float,
    first_rule_state: Callable[[], PyTree],
    change: Change,
    *,
    needs_grads_max: bool = False,
) -> LossScale:
    """A rule with a first scale, a first `rule_state`, and a change of both.

    Its `adjust` also counts the step, for those who call it by hand.
    """

    def init() -> LossScaleState:
        with _sending_constants():
            return first_state(init_scale, first_rule_state())

    def adjust(
        state: LossScaleState,
        grads_finite: ArrayLike,
        grads_max: ArrayLike | None = None,
    ) -> LossScaleState:
        finite = _as_bool(grads_finite, state)
        state = with_arrays(state)
        largest = None
        if needs_grads_max:
            if grads_max is None:
                raise ValueError(
                    "`grads_max` must be given to a rule that needs it, got None. "
                    "(Pass `max_magnitude(grads)` of the unscaled gradients.)"
                )
            largest = jnp.asarray(grads_max, jnp.float32)
            finite &= jnp.isfinite(largest)
        return count_step(state, finite, *change(state, finite, largest))

    return _MadeRule(init, adjust, needs_grads_max=needs_grads_max)


def with_settings(rule: LossScale, name: str, settings: dict[str, Any]) -> LossScale:
    """The same rule, which shows a name and settings."""
    made = _MadeRule(*rule)
    made.name, made.made_with = name, settings
    return made


def shows_settings(
    function: Callable[_Settings, LossScale],
) -> Callable[_Settings, LossScale]:
    """Lets the rules that a function makes show its name and their settings."""
    signature = inspect.signature(function)
    place = "presets." if ".presets." in function.__module__ else ""
    name = place + function.__name__

    @functools.wraps(function)
    def make(*args: _Settings.args, **kwargs: _Settings.kwargs) -> LossScale:
        rule = function(*args, **kwargs)
        if is_no_loss_scale(rule) or getattr(rule, "name", "") == name:
            return rule  # Made by `no_loss_scale`, or by this function itself.
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return with_settings(rule, name, given.arguments)

    return make


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


@shows_settings
def dynamic_loss_scale(
    init_scale: float = 2.0**15,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float | optax.Schedule = 2.0**-24,
    max_scale: float | optax.Schedule = 2.0**24,
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

    Args:
      init_scale: First scale, dimensionless. It may lie outside the bounds: the cap
        applies from the first growth on, and the floor from the first backoff on. A
        power of two makes scaling exact.
      growth_factor: Above 1, dimensionless.
      backoff_factor: Strictly between 0 and 1, dimensionless.
      growth_interval: Finite steps in a row after which the scale grows, at least 1.
      min_scale: Floor of the scale, at least `2**-126`. Scales below 1 are legitimate.
        To notice divergence, watch `notfinite_count` and not the floor. A scale that
        `set_loss_scale` puts below it and `init_scale` stays there until it grows. An
        `optax.Schedule` of `step_count` is applied at every step, not only at changes.
      max_scale: Cap of the scale, at most `2**126`, or a schedule. Where a scheduled
        floor exceeds the cap, the cap wins. If the loss itself is float16, its
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
    init_scale = check_scale("init_scale", init_scale)
    growth_factor = check_factor("growth_factor", growth_factor, 1.0, np.inf)
    backoff_factor = check_factor("backoff_factor", backoff_factor, 0.0, 1.0)
    growth_interval = check_count("growth_interval", growth_interval)
    hysteresis = check_count("hysteresis", hysteresis)
    bounds = check_bounds(min_scale, max_scale)
    if hysteresis_refill not in ("finite", "growth"):
        raise ValueError(
            '`hysteresis_refill` must be "finite" or "growth", got '
            f"{hysteresis_refill!r}."
        )

    return classic_rule(
        init_scale,
        Counting(growth_interval, hysteresis, hysteresis_refill == "finite"),
        Factors(growth_factor, backoff_factor),
        bounds,
        moving=(callable(min_scale), callable(max_scale)),
        lifts_to_floor=False,
    )


class Counting(NamedTuple):
    """When a classic rule grows and backs off: the settings of its two counts.

    The count of finite steps is `first_count` at the start and after a nonfinite step,
    and 0 after a growth.
    """

    growth_interval: int
    hysteresis: int = 1
    refill_on_finite: bool = True
    first_count: int = 0
    state_type: Callable[[jax.Array, jax.Array], PyTree] = DynamicRuleState

    def first(self) -> PyTree:
        """The counts before the first step."""
        n, h = self.first_count, self.hysteresis
        return self.state_type(jnp.asarray(n, jnp.int32), jnp.asarray(h, jnp.int32))

    def advance(
        self, counts: PyTree, finite: jax.Array
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """Whether to grow, whether to back off, and the counts after a step."""
        n, h = (jnp.asarray(count, jnp.int32) for count in counts)
        # A damaged count, far below zero, would keep the scale from growing. Clipped,
        # it delays the next growth by one interval at most.
        n = optax.safe_increment(jnp.maximum(n, -self.growth_interval))
        h = jnp.clip(h, 0, self.hysteresis)
        grow = finite & (n >= self.growth_interval)
        n = jnp.where(finite, jnp.where(grow, 0, n), self.first_count)
        h = jnp.where(finite, h, jnp.maximum(h - 1, 0))
        h = jnp.where(finite if self.refill_on_finite else grow, self.hysteresis, h)
        return grow, ~finite & (h == 0), self.state_type(n, h)


class Factors(NamedTuple):
    """How a scale grows and backs off; without `backoff` it is divided by `growth`."""

    growth: float
    backoff: float | None

    def resize(
        self,
        s: jax.Array,
        grows: jax.Array,
        backs_off: jax.Array,
        low: ArrayLike,
        high: ArrayLike | None,
    ) -> jax.Array:
        """The next scale, with a floor for backoff and a cap for growth.

        Without a cap, a growth beyond `2**126` is refused, as in PyTorch.
        """
        larger = s * self.growth
        if high is None:
            larger = jnp.where(larger <= LARGEST_SCALE, larger, s)
        else:
            larger = jnp.minimum(larger, high)
        if self.backoff is None:
            # The divisor must not be a constant, because XLA would multiply by its
            # reciprocal, which gives another result for factors such as 3.
            smaller = s / jnp.where(backs_off, self.growth, 1.0)
        else:
            smaller = s * self.backoff
        s = jnp.where(grows, larger, s)
        return jnp.where(backs_off, jnp.maximum(smaller, low), s)


DOUBLE_OR_HALVE = Factors(2.0, 0.5)


def fixed_bounds(floor: float = SMALLEST_SCALE, cap: float | None = None) -> _Bounds:
    """Bounds that are the same at each step."""
    return lambda step_count: (floor, cap)


_UNBOUNDED = fixed_bounds()


def classic_rule(
    init_scale: float,
    counting: Counting,
    factors: Factors = DOUBLE_OR_HALVE,
    bounds: _Bounds = _UNBOUNDED,
    *,
    moving: tuple[bool, bool] = (False, False),
    lifts_to_floor: bool = True,
) -> LossScale:
    """The rule of `dynamic_loss_scale`, from settings that are checked.

    A floor or cap that is `moving` applies to every step. In other systems a backoff
    lifts any scale below the floor to it. Otherwise it lifts only the first one, and
    keeps one that `set_loss_scale` has put lower.
    """

    def change(
        state: LossScaleState, finite: jax.Array, grads_max: jax.Array | None
    ) -> tuple[jax.Array, PyTree]:
        del grads_max
        grows, backs_off, counts = counting.advance(state.rule_state, finite)
        low, high = bounds(state.step_count)
        s = state.loss_scale
        floor = low
        if not lifts_to_floor:
            floor = jnp.where(s < jnp.minimum(low, init_scale), s, low)
        s = factors.resize(s, grows, backs_off, floor, high)
        s = jnp.maximum(s, low) if moving[0] else s
        return jnp.clip(s, max=high) if moving[1] else s, counts

    return make_rule(init_scale, counting.first, change)


@shows_settings
def static_loss_scale(scale: float, *, skip_nonfinite: bool = True) -> LossScale:
    """A rule with a constant loss scale.

        s = scale

    Use `loss_scaled(optimizer, static_loss_scale(2.0**10))` if you know a scale that
    fits the whole run. Nonfinite steps are still skipped and counted. With
    `skip_nonfinite=False` nothing is checked: NaN and infinity reach the parameters,
    and only `step_count` changes. A restored state keeps the scale that it was saved
    with.

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

    def init() -> LossScaleState:
        return first_state(scale, ())

    return LossScale(init, hold if skips else _hold_unchecked, skips=skips)


def no_loss_scale() -> LossScale:
    """A rule without a loss scale: `s = 1`, and nothing is checked.

    Use `loss_scaled(optimizer, no_loss_scale())` to run in float32 or bfloat16 the same
    training loop that runs in float16 with a loss scale. The inner optimizer is called
    as if it stood alone, so that `update` compiles to the bare program. If you pass
    `accept` to `update`, pass it in every step: a step without it leaves the counts and
    `last_finite` as they were.

    Returns:
      A `LossScale`; its `rule_state` is empty. `set_loss_scale` refuses its state.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.no_loss_scale().init().loss_scale
      Array(1., dtype=float32)

    References:
      `jmp.NoOpLossScale` (https://github.com/google-deepmind/jmp).
    """
    return _NO_LOSS_SCALE


def is_no_loss_scale(rule: LossScale) -> bool:
    """Whether a rule is `no_loss_scale()`, which always has the same two functions."""
    return rule == _NO_LOSS_SCALE


def hold(
    state: LossScaleState,
    grads_finite: ArrayLike,
    grads_max: ArrayLike | None = None,
) -> LossScaleState:
    """An `adjust` that counts the step and leaves the scale as it is."""
    del grads_max
    finite = _as_bool(grads_finite, state)
    state = with_arrays(state)
    return count_step(state, finite, state.loss_scale, state.rule_state)


def _hold_unchecked(
    state: LossScaleState,
    grads_finite: ArrayLike,
    grads_max: ArrayLike | None = None,
) -> LossScaleState:
    """An `adjust` that counts every step as finite."""
    del grads_finite, grads_max
    return hold(state, True)


def _init_one() -> LossScaleState:
    return first_state(1.0, Unscaled())


def _as_bool(grads_finite: ArrayLike, state: LossScaleState) -> jax.Array:
    """What `adjust` was given, `bool[]`; NaN is False.

    Gradients are refused, which would count as finite whatever they are.
    """
    if not isinstance(state, LossScaleState):
        raise TypeError(
            f"`state` must be a LossScaleState, got {type(state).__name__}. (Did you "
            "mean `find_loss_scale_state(opt_state)`?)"
        )
    is_one = dtype_of(grads_finite) is not None or isinstance(grads_finite, float | int)
    if not is_one or jnp.ndim(grads_finite) > jnp.ndim(state.loss_scale):
        raise TypeError(
            f"`grads_finite` must be one bool, got {grads_finite!r:.60}. (Did you mean "
            "`all_finite(grads)`?)"
        )
    given = jnp.asarray(grads_finite)
    return given if given.dtype == bool else given.astype(bool) & ~jnp.isnan(given)


def count_step(
    state: LossScaleState, finite: jax.Array, loss_scale: jax.Array, rule_state: PyTree
) -> LossScaleState:
    """The state after one more step, with a new scale and a new `rule_state`."""
    counted: LossScaleState = _count_step(state._replace(rule_state=()), finite)
    return counted._replace(loss_scale=loss_scale, rule_state=rule_state)


@functools.partial(jax.jit, inline=True)  # So that outside `jit` it is one dispatch.
def _count_step(state: LossScaleState, finite: jax.Array) -> LossScaleState:
    in_a_row = optax.safe_increment(state.notfinite_count)
    total = optax.safe_increment(state.total_notfinite)
    # The old verdict is read so that `jit` keeps it as an argument, and the new one is
    # written to its donated buffer. On a GPU a CUDA graph is slower where the address
    # of a result changes from call to call.
    nothing = jnp.logical_and(state.last_finite, False)
    return state._replace(
        last_finite=finite | nothing,
        notfinite_count=jnp.where(finite, 0, in_a_row),
        total_notfinite=jnp.where(finite, state.total_notfinite, total),
        step_count=optax.safe_increment(state.step_count),
    )


def first_state(init_scale: ArrayLike, rule_state: PyTree) -> LossScaleState:
    """The state before the first step."""
    with _sending_constants():
        return LossScaleState(
            loss_scale=jnp.asarray(init_scale, jnp.float32),
            last_finite=jnp.asarray(True),
            notfinite_count=jnp.zeros((), jnp.int32),
            total_notfinite=jnp.zeros((), jnp.int32),
            step_count=jnp.zeros((), jnp.int32),
            rule_state=rule_state,
        )


def _sending_constants() -> contextlib.AbstractContextManager[None]:
    """A first state holds numbers of Python, which a transfer guard would refuse."""
    allowed: contextlib.AbstractContextManager[None]
    allowed = jax.transfer_guard_host_to_device("allow")
    return allowed


_NO_LOSS_SCALE = with_settings(
    LossScale(_init_one, _hold_unchecked, skips=False), "no_loss_scale", {}
)
