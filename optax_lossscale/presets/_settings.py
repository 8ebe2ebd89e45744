"""Checks of settings that several systems share, and the states of their rules."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._ground.checks import SMALLEST_SCALE, check_factor, check_scale
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.types import public
from optax_lossscale._scaling.rules import Factors, LossScale


@public
class DeepSpeedRuleState(NamedTuple):
    """The counts that DeepSpeed's rule carries beside the scale, in steps.

    Attributes:
      growth_count: `i32[]`. Finite steps since the last growth. After the start or a
        nonfinite step it counts from -1.
      hysteresis_count: `i32[]`. As in `DynamicRuleState`.
    """

    growth_count: jax.Array
    hysteresis_count: jax.Array


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


def two_factors(growth_factor: float, backoff_factor: float) -> Factors:
    """Two factors with these names, by which growth and backoff multiply."""
    return Factors(
        check_factor("growth_factor", growth_factor, 1.0, np.inf),
        check_factor("backoff_factor", backoff_factor, 0.0, 1.0),
    )


def one_factor(name: str, value: float) -> Factors:
    """One factor, by which growth multiplies and backoff divides."""
    return Factors(check_factor(name, value, 1.0, np.inf), backoff=None)


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
