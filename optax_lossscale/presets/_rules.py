"""How scales change without a cap, and what else several systems' rules need.

Pickles name this module, so the states must stay here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_factor,
    check_scale,
)
from optax_lossscale._rules import Change, LossScale
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


def uncapped(
    growth_factor: float = 2.0,
    backoff_factor: float | None = 0.5,
    floor: float = SMALLEST_SCALE,
) -> Change:
    """How a scale changes that has no cap, for `counting_rule`.

    A growth beyond `2**126` is refused: the scale stays as it is. With None as the
    backoff factor, backoff divides by the growth factor.
    """
    growth_factor = check_factor("growth_factor", growth_factor, 1.0, np.inf)
    if backoff_factor is not None:
        backoff_factor = check_factor("backoff_factor", backoff_factor, 0.0, 1.0)

    def change(
        state: LossScaleState, grow: jax.Array, back_off: jax.Array
    ) -> jax.Array:
        s = state.loss_scale
        larger = s * growth_factor
        if backoff_factor is None:
            # The divisor must not be a constant, because XLA would multiply by its
            # reciprocal, which gives another result for factors such as 3.
            smaller = s / jnp.where(back_off, growth_factor, 1.0)
        else:
            smaller = s * backoff_factor
        s = jnp.where(grow & (larger <= LARGEST_SCALE), larger, s)
        return jnp.where(back_off, jnp.maximum(smaller, floor), s)

    return change


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
