"""Rules of other systems that `dynamic_loss_scale` does not cover."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._checks import LARGEST_SCALE, SMALLEST_SCALE, check_scale
from optax_lossscale._rules import (
    DynamicRuleState,
    LossScale,
    count_step,
    dynamic_loss_scale,
    first_state,
)
from optax_lossscale._state import LossScaleState


class DeepSpeedRuleState(NamedTuple):
    """What DeepSpeed's rule carries beside the scale.

    Attributes:
      growth_count: `i32[]`, steps. Finite steps since the last growth; since the start
        or the last nonfinite step, one less than those.
      hysteresis_count: `i32[]`, steps. As in the classic rule.
    """

    growth_count: jax.Array
    hysteresis_count: jax.Array


LateRuleState = DeepSpeedRuleState  # The name in pickles of version 0.1.0.


class FairseqRuleState(NamedTuple):
    """What fairseq's rule carries beside the scale.

    Attributes:
      growth_count: `i32[]`, steps. Finite steps since the last growth or nonfinite
        step.
      rescale_count: `i32[]`, steps. All steps since the scale last changed.
      overflow_count: `i32[]`, steps. Nonfinite steps since the last backoff.
    """

    growth_count: jax.Array
    rescale_count: jax.Array
    overflow_count: jax.Array


def floor_or_none(name: str, value: float | None) -> float:
    """Returns a floor; None and 0 mean no floor, which is `2**-126` here."""
    if value is None or (not isinstance(value, bool) and value == 0):
        return SMALLEST_SCALE
    return check_scale(name, value)


def uncapped(
    init_scale: float,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int,
    min_scale: float = SMALLEST_SCALE,
    hysteresis: int = 1,
    consecutive: bool = True,
) -> LossScale:
    """The classic rule without a cap: a growth beyond `2**126` changes nothing."""
    classic = dynamic_loss_scale(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=LARGEST_SCALE,
        hysteresis=hysteresis,
        hysteresis_refill="finite" if consecutive else "growth",
    )

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        adjusted = classic.adjust(state, grads_finite, grads_max)
        refuse = state.loss_scale * growth_factor > LARGEST_SCALE
        keep = adjusted.last_finite & refuse
        s = jnp.where(keep, state.loss_scale, adjusted.loss_scale)
        return adjusted._replace(loss_scale=s)

    return LossScale(classic.init, adjust)


def deepspeed_rule(rule: LossScale) -> LossScale:
    """DeepSpeed's rule: the classic one, but its count of finite steps starts at -1.

    So the first growth after the start or after a nonfinite step comes one step late.
    """

    def init() -> LossScaleState:
        return start_late(rule.init(), counting=jnp.asarray(False))

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        rule_state = DynamicRuleState(*state.rule_state)
        state = state._replace(rule_state=rule_state)
        state = rule.adjust(state, grads_finite, grads_max)
        return start_late(state, counting=state.last_finite)

    def start_late(state: LossScaleState, counting: jax.Array) -> LossScaleState:
        growth_count, hysteresis_count = state.rule_state
        count = jnp.where(counting, growth_count, -1)
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
    """Fairseq's rule; `presets.fairseq` gives its formula."""
    # Slightly lower, so that 3 of 10 reaches 0.3 even if the division is inexact.
    tolerated = tolerance * (1.0 - 2.0**-20)

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
        finite = jnp.asarray(grads_finite, bool)
        growth_count, since, overflows = state.rule_state
        finite_count = optax.safe_increment(growth_count)
        since = optax.safe_increment(since)
        overflows = jnp.where(finite, overflows, optax.safe_increment(overflows))
        overflow_rate = overflows.astype(jnp.float32) / since.astype(jnp.float32)
        grow = finite & (finite_count >= scale_window)
        back_off = ~finite & (overflow_rate >= tolerated)

        s = state.loss_scale
        larger, smaller = s * scale_factor, jnp.maximum(s / scale_factor, threshold)
        s = jnp.where(grow & (larger <= LARGEST_SCALE), larger, s)
        s = jnp.where(back_off & (smaller > min_loss_scale), smaller, s)
        rule_state = FairseqRuleState(
            growth_count=jnp.where(finite & ~grow, finite_count, 0),
            rescale_count=jnp.where(grow | back_off, 0, since),
            overflow_count=jnp.where(back_off, 0, overflows),
        )
        return count_step(state, finite, s, rule_state)

    return LossScale(init, adjust)
