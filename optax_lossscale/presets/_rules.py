"""Rules of other systems that `dynamic_loss_scale` does not cover."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._checks import LARGEST_SCALE, SMALLEST_SCALE, check_scale
from optax_lossscale._rules import (
    DynamicRuleState,
    LossScale,
    as_verdict,
    count_step,
    dynamic_loss_scale,
    first_state,
)
from optax_lossscale._state import LossScaleState


class DeepSpeedRuleState(NamedTuple):
    """The counts that DeepSpeed's rule carries beside the scale.

    Attributes:
      growth_count: `i32[]`, steps. Finite steps since the last growth. After the start
        or a nonfinite step it counts from -1.
      hysteresis_count: `i32[]`, steps. As in `DynamicRuleState`.
    """

    growth_count: jax.Array
    hysteresis_count: jax.Array


class FairseqRuleState(NamedTuple):
    """The counts that fairseq's rule carries beside the scale.

    Attributes:
      growth_count: `i32[]`, steps. Finite steps since the last growth or nonfinite
        step.
      rescale_count: `i32[]`, steps. All steps, finite or not, since the scale last
        changed.
      overflow_count: `i32[]`, steps. Nonfinite steps since the last backoff.
    """

    growth_count: jax.Array
    rescale_count: jax.Array
    overflow_count: jax.Array


def check_floor(name: str, value: float | None) -> float:
    """Returns a floor. None and 0 mean no floor, for which it returns `2**-126`."""
    is_known = not isinstance(value, bool | jax.core.Tracer)
    # NumPy compares; a comparison by JAX would be traced inside `jit`.
    if value is None or (is_known and np.array_equal(value, 0)):
        return SMALLEST_SCALE
    return check_scale(name, value)


def state_at(
    rule: LossScale,
    loss_scale: jax.typing.ArrayLike,
    growth_count: jax.typing.ArrayLike,
) -> LossScaleState:
    """The first state of a classic rule, with another scale and count of finite steps.

    If the scale has an entry for each device, so has every array. All are copies, so
    that the state can be donated.
    """
    s = jnp.array(loss_scale, jnp.float32)
    first: LossScaleState = jax.tree.map(
        lambda array: jnp.broadcast_to(array, s.shape), rule.init()
    )
    n = jnp.broadcast_to(jnp.array(growth_count, jnp.int32), s.shape)
    rule_state = first.rule_state._replace(growth_count=n)
    return first._replace(loss_scale=s, rule_state=rule_state)


def uncapped(
    init_scale: float,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int,
    min_scale: float = SMALLEST_SCALE,
    hysteresis: int = 1,
    refill_on_finite: bool = True,
) -> LossScale:
    """The classic rule, `dynamic_loss_scale`, without a cap.

    A growth beyond `2**126` is refused: the scale stays as it is, and the count of
    finite steps restarts. With `refill_on_finite=True` every finite step refills the
    hysteresis; otherwise only growth does.
    """
    classic = dynamic_loss_scale(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=LARGEST_SCALE,
        hysteresis=hysteresis,
        hysteresis_refill="finite" if refill_on_finite else "growth",
    )

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        adjusted = classic.adjust(state, grads_finite, grads_max)
        is_too_large = state.loss_scale * growth_factor > LARGEST_SCALE
        is_refused = adjusted.last_finite & is_too_large
        s = jnp.where(is_refused, state.loss_scale, adjusted.loss_scale)
        return adjusted._replace(loss_scale=s)

    return LossScale(classic.init, adjust)


def symmetric(
    init_scale: float, *, factor: float, growth_interval: int, min_scale: float
) -> LossScale:
    """The rule without a cap that multiplies by a factor, and divides by it."""
    rule = uncapped(init_scale, growth_factor=factor, growth_interval=growth_interval)

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        adjusted = rule.adjust(state, grads_finite, grads_max)
        finite = adjusted.last_finite
        s = jnp.maximum(divide_unless(finite, state.loss_scale, factor), min_scale)
        s = jnp.where(finite, adjusted.loss_scale, s)
        return adjusted._replace(loss_scale=s)

    return LossScale(rule.init, adjust)


def divide_unless(finite: jax.Array, s: jax.Array, factor: float) -> jax.Array:
    """`s / factor`, or `s` on a finite step.

    The divisor must not be a constant, because XLA would multiply by its reciprocal,
    which gives another result for factors such as 3.
    """
    return s / jnp.where(finite, 1.0, factor)


def deepspeed_rule(classic: LossScale) -> LossScale:
    """Makes DeepSpeed's rule from the classic one.

    The count of finite steps starts at -1, so the first growth after the start or after
    a nonfinite step comes one step later than in the classic rule.
    """

    def init() -> LossScaleState:
        return delay_growth(classic.init(), unless=jnp.asarray(False))

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        rule_state = DynamicRuleState(*state.rule_state)
        state = state._replace(rule_state=rule_state)
        state = classic.adjust(state, grads_finite, grads_max)
        return delay_growth(state, unless=state.last_finite)

    def delay_growth(state: LossScaleState, *, unless: jax.Array) -> LossScaleState:
        """Sets the count of finite steps to -1, except where `unless` is True."""
        growth_count, hysteresis_count = state.rule_state
        count = jnp.where(unless, growth_count, -1)
        return state._replace(rule_state=DeepSpeedRuleState(count, hysteresis_count))

    return LossScale(init, adjust)


def fairseq_rule(
    init_scale: float,
    *,
    scale_factor: float,
    scale_window: int,
    tolerance: float,
    threshold: float,
    min_loss_scale: float,
) -> LossScale:
    """Fairseq's rule. The docstring of `presets.fairseq` gives the formula."""
    # Slightly lower, because a quotient may be rounded down: 3 overflows in 10 steps
    # must reach a tolerance of 0.3.
    lowered_tolerance = tolerance * (1.0 - 2.0**-20)

    def init() -> LossScaleState:
        rule_state = FairseqRuleState(
            growth_count=jnp.zeros((), jnp.int32),
            rescale_count=jnp.zeros((), jnp.int32),
            overflow_count=jnp.zeros((), jnp.int32),
        )
        return first_state(init_scale, rule_state)

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        del grads_max
        finite = as_verdict(grads_finite, state)
        growth_count, rescale_count, overflow_count = state.rule_state
        c = optax.safe_increment(growth_count)
        r = optax.safe_increment(rescale_count)
        o = jnp.where(finite, overflow_count, optax.safe_increment(overflow_count))
        overflow_rate = o.astype(jnp.float32) / r.astype(jnp.float32)
        grow = finite & (c >= scale_window)
        back_off = ~finite & (overflow_rate >= lowered_tolerance)

        s = state.loss_scale
        larger = s * scale_factor
        smaller = jnp.maximum(divide_unless(finite, s, scale_factor), threshold)
        s = jnp.where(grow & (larger <= LARGEST_SCALE), larger, s)
        s = jnp.where(back_off & (smaller > min_loss_scale), smaller, s)
        rule_state = FairseqRuleState(
            growth_count=jnp.where(finite & ~grow, c, 0),
            rescale_count=jnp.where(grow | back_off, 0, r),
            overflow_count=jnp.where(back_off, 0, o),
        )
        return count_step(state, finite, s, rule_state)

    return LossScale(init, adjust)
