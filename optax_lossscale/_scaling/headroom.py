"""A rule that follows the largest gradient and leaves headroom above it."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_lossscale._ground.checks import (
    check_count,
    check_float_dtype,
    check_number,
    check_scale,
)
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.types import public
from optax_lossscale._scaling.rules import LossScale, make_rule, shows_call

# Numbers and not `finfo`, which cannot be copied or pickled by value.
_TINY, _MAX = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)
_BITS_FADED = 4
_BITS_PER_REPEAT = 8
_BITS_PER_QUIET_STEP = 4
_QUIET_STEPS = 32


@public
class HeadroomRuleState(NamedTuple):
    """What the headroom rule carries beside the scale.

    Attributes:
      recent: `f32[recent]`, in the unit of the gradients. The largest magnitude of each
        of the last finite steps, oldest first; 0 if no step was taken yet.
      peaks: `f32[history]`, in the same unit. For each of the last steps that
        overflowed, the magnitude that is assumed; 0 for all other steps.
    """

    recent: jax.Array
    peaks: jax.Array


@shows_call
def headroom_loss_scale(
    init_scale: float = 2.0**15,
    *,
    history: int = 2400,
    recent: int = 64,
    margin_bits: float = 0.75,
    min_scale: float = 2.0**-24,
    max_scale: float = 2.0**24,
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> LossScale:
    """A rule that sets the loss scale from the largest recent gradients.

    Use `loss_scaled(optimizer, headroom_loss_scale())` if gradients change their size
    by many bits: it needs one step to find a suitable scale. With `recent`, the largest
    magnitudes of the unscaled gradients in the last finite steps, and `peak`, a
    magnitude that stands for the overflows of the last `history` steps, a step sets

        finite:     peak = peak * 2**(-4 / history)
        nonfinite:  peak = 2 * peak, or 2 * max(recent) if there is no peak
        s = 2**floor(log2(finfo(dtype).max / max(recent, peak)) - margin_bits)

    within the bounds. Three cases differ:

    * An overflow at the upper bound, or before a magnitude is known, takes the peak
      from the scale, and so halves it.
    * In a row of nonfinite steps, each one after the first keeps the peak and divides
      the scale by `2**8`, until a finite step restores the formula. So a sudden rise of
      the gradients costs few skips.
    * After 32 steps in a row (or `recent`, if that is less) whose gradients are all
      zero, `recent` is forgotten. From then on each such step divides the peak by
      `2**4` or, if there is no peak, multiplies the scale by `2**4`.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/choosing_a_rule.html

    Args:
      init_scale: First scale, dimensionless, rounded down to a power of two. It may lie
        outside the bounds, which apply from the first step on.
      history: For how many steps an overflow is remembered, at least 1. With a longer
        history fewer steps overflow, but the scale rises later after each.
      recent: For how many finite steps each magnitude is remembered, at least 1 (and at
        most `history`). With more the scale rises later when the gradients shrink.
      margin_bits: Bits left free above the largest magnitude, from 0 to 126. The rule
        sees only gradients of parameters. Those of activations may be larger, as may
        those of each device before they are averaged: raise it if steps are skipped
        again and again.
      min_scale: Floor of the scale, at least `2**-126`, rounded up to a power of two.
      max_scale: Cap of the scale, at most `2**126`, rounded down to a power of two.
      dtype: The floating dtype of the backward pass, in which gradients overflow.

    Returns:
      A `LossScale` that needs `grads_max`; its `rule_state` is a NamedTuple `(recent,
      peaks)` of `f32[recent]` and `f32[history]`. A scale set by `set_loss_scale` lasts
      until the next finite step.

    Raises:
      ValueError: If a setting is outside its range, or no power of two lies between the
        bounds. From `adjust`, if `grads_max` is missing.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.headroom_loss_scale(8.0)
      >>> state = rule.adjust(rule.init(), grads_finite=True, grads_max=1.0)
      >>> print(state.loss_scale)
      32768.0

    References:
      NVIDIA's Transformer Engine, `DelayedScaling`, keeps such a history for each
      float8 tensor (https://github.com/NVIDIA/TransformerEngine).
    """
    first_scale = _power_below(check_scale("init_scale", init_scale))
    history = check_count("history", history)
    recent_steps = min(check_count("recent", recent), history)
    margin_bits = check_number("margin_bits", margin_bits, 0.0, 126.0)
    low = 1 / _power_below(1 / check_scale("min_scale", min_scale))
    high = _power_below(check_scale("max_scale", max_scale))
    if low > high:
        raise ValueError(
            "`min_scale` and `max_scale` must have a power of two between them, got "
            f"{min_scale} and {max_scale}. (Did you swap them?)"
        )
    largest = float(jnp.finfo(check_float_dtype("dtype", dtype)).max)
    usable = min(largest, _MAX) * 2.0**-margin_bits
    quiet_steps = min(recent_steps, _QUIET_STEPS)
    fading_per_step = 2.0 ** (-_BITS_FADED / history)

    def first() -> HeadroomRuleState:
        recent = jnp.zeros(recent_steps, jnp.float32)
        peaks = jnp.zeros(history, jnp.float32)
        return HeadroomRuleState(recent, peaks)

    def change(
        state: LossScaleState, finite: jax.Array, grads_max: ArrayLike | None
    ) -> tuple[jax.Array, HeadroomRuleState]:
        if grads_max is None:
            raise ValueError(
                "`grads_max` must be given to `adjust` of this rule, got None. (Pass "
                "`max_magnitude(unscaled_grads)`.)"
            )
        grads_max = jnp.asarray(grads_max, jnp.float32)
        s, (recent, peaks) = state.loss_scale, state.rule_state
        overflowed = ~finite | ~jnp.isfinite(grads_max)
        is_repeated = overflowed & (peaks[-1] > 0)
        # The low scale of a search may have flushed the gradients to zero.
        was_search = jnp.all(peaks[-2:] > 0)
        is_known = ~overflowed & ~((grads_max < _TINY) & was_search)

        # After an overflow the gradients are assumed to be one bit above what is
        # known, but only once in a row. A bound that holds the scale is known.
        assumed = jnp.where(jnp.max(recent) >= _TINY, jnp.max(recent), usable / s)
        assumed = jnp.where(jnp.max(peaks) >= _TINY, jnp.max(peaks), assumed)
        assumed = jnp.maximum(assumed, usable / high) * jnp.where(is_repeated, 1.0, 2.0)
        assumed = jnp.clip(assumed, _TINY, min(usable / low, _MAX))

        # After many zeros the scale is probably too low, and `recent` is forgotten. (At
        # first it is zero.)
        recent = jnp.where(is_known, _append(recent, grads_max), recent)
        is_full = state.step_count - state.total_notfinite >= quiet_steps - 1
        is_quiet = is_known & is_full & (jnp.max(recent[-quiet_steps:]) < _TINY)
        recent = jnp.where(is_quiet, 0.0, recent)
        fading = jnp.where(is_quiet, 2.0**-_BITS_PER_QUIET_STEP, fading_per_step)
        peak = jnp.where(overflowed, assumed, jnp.max(peaks) * fading)
        peaks = _append(peaks * fading, jnp.where(overflowed, assumed, 0.0))

        # The scale leaves headroom above the largest magnitude. If there is none, it
        # rises from where it is; in a row of overflows it falls from there.
        top = jnp.maximum(jnp.max(recent), peak)
        s = jnp.ldexp(jnp.float32(1), jnp.frexp(s)[1] - 1)  # It may have been set.
        raised = s * jnp.where(is_quiet, 2.0**_BITS_PER_QUIET_STEP, 1.0)
        lowered = s * jnp.where(is_repeated, 2.0**-_BITS_PER_REPEAT, 1.0)
        s = jnp.where(top >= _TINY, power_of_quotient(usable, top), raised)
        s = jnp.where(overflowed, jnp.minimum(s, lowered), s)
        return jnp.clip(s, low, high), HeadroomRuleState(recent, peaks)

    return make_rule(first_scale, first, change, needs_grads_max=True)


def _power_below(number: float) -> float:
    """The largest power of two that does not exceed a positive number."""
    return math.ldexp(1.0, math.frexp(number)[1] - 1)


def power_of_quotient(dividend: float, divisor: jax.Array) -> jax.Array:
    """`2**floor(log2(dividend / divisor))`, without rounding the quotient."""
    top, top_exponent = math.frexp(dividend)
    mantissa, exponent = jnp.frexp(divisor)
    exponent = top_exponent - exponent - (top < mantissa).astype(jnp.int32)
    return jnp.ldexp(jnp.float32(1), exponent)


def _append(history: jax.Array, entry: jax.Array) -> jax.Array:
    """Drops the oldest entry for a new one."""
    return jnp.concatenate([history[1:], entry[None]])
