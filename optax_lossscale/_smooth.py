"""A rule whose scale grows by a fraction of a bit on every finite step."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._bits import exponents_within, power_of_two
from optax_lossscale._checks import check_bounds, check_number, check_scale
from optax_lossscale._rules import LossScale, shows_settings, verdict_rule
from optax_lossscale._state import LossScaleState
from optax_lossscale._types import PyTree


class SmoothRuleState(NamedTuple):
    """What the smooth rule carries beside the scale.

    Attributes:
      fraction: `f32[]`, bits, at least 0 and below 1. How far the real exponent lies
        above the exponent of the scale.
    """

    fraction: jax.Array


@shows_settings
def smooth_loss_scale(
    init_scale: float = 2.0**15,
    *,
    growth_bits: float = 1e-3,
    backoff_bits: float = 1.0,
    min_scale: float | optax.Schedule = 2.0**-24,
    max_scale: float | optax.Schedule = 2.0**24,
) -> LossScale:
    """A loss scale that grows a little on every finite step.

    With a real exponent `e`, each step does

        e = e + growth_bits       if finite
        e = e - backoff_bits      if not
        s = 2**floor(e)

    within the bounds. While the gradients keep their size, growth and backoff balance,
    and about `growth_bits / backoff_bits` of the steps are skipped; fewer while
    gradients shrink, more while they grow. The rule regains each bit in
    `1 / growth_bits` finite steps, and one bad batch costs it only `backoff_bits`; in
    the classic rule a bad batch also restarts the count to the next growth.

    Args:
      init_scale: First scale, dimensionless, rounded down to a power of two; `e` starts
        at the logarithm of the value before rounding. It may lie outside the bounds,
        which apply from the first step on.
      growth_bits: Bits gained on a finite step, from `2**-20` to 126. With `1e-3` the
        scale doubles every 1000 finite steps.
      backoff_bits: Bits lost on a nonfinite step, in the same range.
      min_scale: Floor of the scale, at least `2**-126`, or an `optax.Schedule` of
        `step_count`. It is rounded up to a power of two.
      max_scale: Cap of the scale, at most `2**126`, or a schedule. It is rounded down
        to a power of two. Where a scheduled floor then exceeds the cap, the cap wins.

    Returns:
      A `LossScale`; its `rule_state` is a NamedTuple `(fraction,)` of `f32[]`, and `e`
      is `log2(s) + fraction`. After `set_loss_scale` the rule therefore continues from
      the new scale, even if that is not a power of two.

    Raises:
      ValueError: If a setting is outside its range, the bounds are inverted, or no
        power of two lies between them.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.smooth_loss_scale(8.0, growth_bits=0.5)
      >>> state = rule.init()
      >>> for grads_finite in [True, True, True, False]:
      ...     state = rule.adjust(state, grads_finite)
      ...     print(state.loss_scale, state.rule_state.fraction)
      8.0 0.5
      16.0 0.0
      16.0 0.5
      8.0 0.5

    References:
      OpenAI's `guided-diffusion`, `fp16_util.py`. Departures: the scale has bounds,
      and it is `2**floor(e)` instead of `2**e`, so that scaling stays exact. The idea
      of a cap is from Dhariwal et al., Jukebox, 2020.
    """
    mantissa, exponent = math.frexp(check_scale("init_scale", init_scale))
    # Much smaller steps would be rounded away when added to a fraction in float32.
    growth_bits = check_number("growth_bits", growth_bits, 2.0**-20, 126.0)
    backoff_bits = check_number("backoff_bits", backoff_bits, 2.0**-20, 126.0)
    bounds = check_bounds(min_scale, max_scale, of_powers_of_two=True)

    def first() -> PyTree:
        fraction = min(math.log2(mantissa) + 1, 1 - 2.0**-24)  # Below 1 in float32.
        return SmoothRuleState(jnp.asarray(fraction, jnp.float32))

    def advance(state: LossScaleState, finite: jax.Array) -> tuple[jax.Array, PyTree]:
        low, high = map(power_of_two, exponents_within(bounds(state.step_count)))
        fraction = state.rule_state.fraction
        # A damaged checkpoint may hold NaN or any other number.
        fraction = jnp.where((fraction >= 0) & (fraction < 1), fraction, 0.0)
        fraction += jnp.where(finite, growth_bits, -backoff_bits)
        whole = jnp.floor(fraction)
        s = jnp.ldexp(state.loss_scale, whole.astype(jnp.int32))
        fraction = jnp.where((s < low) | (s >= high), 0.0, fraction - whole)
        return jnp.clip(s, low, high), SmoothRuleState(fraction)

    return verdict_rule(2.0 ** (exponent - 1), first, advance)
