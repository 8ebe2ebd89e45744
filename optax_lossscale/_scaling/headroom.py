"""A rule that follows the largest gradient and leaves headroom above it."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._ground.bits import (
    exponent_of_quotient,
    exponents_within,
    power_of_two,
    split,
    split_number,
)
from optax_lossscale._ground.checks import (
    check_bounds,
    check_count,
    check_float_dtype,
    check_number,
    check_scale,
)
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.types import public
from optax_lossscale._scaling.rules import LossScale, make_rule, shows_settings
from optax_lossscale._scaling.state import as_array

# Numbers and not `np.finfo`, which cannot be copied or pickled by value.
_TINY, _MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
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


@shows_settings
def headroom_loss_scale(
    init_scale: float = 2.0**15,
    *,
    history: int = 2400,
    recent: int = 64,
    margin_bits: float = 0.75,
    min_scale: float | optax.Schedule = 2.0**-24,
    max_scale: float | optax.Schedule = 2.0**24,
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

    within the bounds. Two cases differ:

    * In a row of nonfinite steps, each one after the first keeps the peak and divides
      the scale by `2**8`, until a finite step restores the formula. So a sudden rise of
      the gradients costs few skips.
    * After 32 steps in a row (or `recent`, if that is less) whose gradients are all
      zero, `recent` is forgotten. From then on each such step divides the peak by
      `2**4` or, if there is no peak, multiplies the scale by `2**4`.

    Remembered numbers that cannot be right, say from a damaged checkpoint, are ignored.
    `docs/guides/choosing_a_rule.md` compares this rule with the others.

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
      min_scale: Floor of the scale, at least `2**-126`, or an `optax.Schedule` of
        `step_count`. It is rounded up to a power of two.
      max_scale: Cap of the scale, at most `2**126`, or a schedule. It is rounded down
        to a power of two. Where a scheduled floor then exceeds the cap, the cap wins.
      dtype: The floating dtype of the backward pass, in which gradients overflow.

    Returns:
      A `LossScale` that needs `grads_max`; its `rule_state` is a NamedTuple `(recent,
      peaks)` of `f32[recent]` and `f32[history]`. A scale set by `set_loss_scale` lasts
      for one step.

    Raises:
      ValueError: If a setting is outside its range, or no power of two lies between the
        bounds. From `adjust`, if `grads_max` is missing, or the state has other sizes.
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
    first_scale = 2.0 ** (math.frexp(check_scale("init_scale", init_scale))[1] - 1)
    history = check_count("history", history)
    recent_steps = min(check_count("recent", recent), history)
    margin_bits = check_number("margin_bits", margin_bits, 0.0, 126.0)
    bounds = check_bounds(min_scale, max_scale, of_powers_of_two=True)
    largest = float(jnp.finfo(check_float_dtype("dtype", dtype)).max)
    largest = min(largest, _MAX)
    largest_usable = largest * 2.0**-margin_bits
    quiet_steps = min(recent_steps, _QUIET_STEPS)
    fading_per_step = 2.0 ** (-_BITS_FADED / history)

    def first() -> HeadroomRuleState:
        recent = jnp.zeros(recent_steps, jnp.float32)
        peaks = jnp.zeros(history, jnp.float32)
        return HeadroomRuleState(recent, peaks)

    def change(
        state: LossScaleState, finite: jax.Array, grads_max: jax.Array | None
    ) -> tuple[jax.Array, HeadroomRuleState]:
        del finite  # A step may be skipped for reasons other than an overflow.
        grads_max = jnp.asarray(grads_max)
        overflowed = ~jnp.isfinite(grads_max)
        exponent_bounds = exponents_within(bounds(state.step_count))
        low, high = map(power_of_two, exponent_bounds)
        memory = usable_memory(state, low)
        is_repeated = overflowed & (memory.peaks[-1] > 0)
        assumed = assumed_magnitude(memory, is_repeated, state.loss_scale, low, high)

        # The low scale of a search may have flushed the gradients to zero.
        is_zero_after_search = jnp.all(memory.peaks[-2:] > 0)
        is_zero_after_search &= grads_max < _TINY
        is_unknown = overflowed | is_zero_after_search
        recent = _append(memory.recent, grads_max)
        recent = jnp.where(is_unknown, memory.recent, recent)
        # After so many zeros the scale is probably too low.
        is_quiet = jnp.max(recent[-quiet_steps:]) < _TINY
        # At first `recent` is zero. A damaged count may be negative.
        applied = state.step_count - state.total_notfinite
        is_full = (applied >= quiet_steps - 1) | (applied < 0)
        is_quiet &= ~is_unknown & is_full
        recent = jnp.where(is_quiet, 0.0, recent)
        fading = jnp.where(is_quiet, 2.0**-_BITS_PER_QUIET_STEP, fading_per_step)
        peaks = _append(memory.peaks * fading, jnp.where(overflowed, assumed, 0.0))
        peak = jnp.where(overflowed, assumed, jnp.max(memory.peaks) * fading)

        top = jnp.maximum(jnp.max(recent), peak)
        old_exponent = split(state.loss_scale).exponent
        raised = old_exponent + _BITS_PER_QUIET_STEP * is_quiet.astype(jnp.int32)
        lowered = old_exponent - _BITS_PER_REPEAT * is_repeated.astype(jnp.int32)
        exponent = exponent_of_quotient(split_number(largest_usable), split(top))
        exponent = jnp.where(top >= _TINY, exponent, raised)
        exponent = jnp.where(overflowed, jnp.minimum(exponent, lowered), exponent)
        s = power_of_two(jnp.clip(exponent, *exponent_bounds))
        return s, HeadroomRuleState(recent, peaks)

    def assumed_magnitude(
        memory: HeadroomRuleState,
        is_repeated: jax.Array,
        s: jax.Array,
        low: jax.Array,
        high: jax.Array,
    ) -> jax.Array:
        """The peak after an overflow: one bit more, but only once in a row."""
        base = _first_nonzero(jnp.max(memory.recent), largest_usable / s)
        base = _first_nonzero(jnp.max(memory.peaks), base)
        # Where a bound holds the scale, the peak starts and ends at that bound.
        base = jnp.maximum(base, largest_usable / high)
        assumed = base * jnp.where(is_repeated, 1.0, 2.0)
        assumed = jnp.minimum(assumed, largest_usable / low)
        return jnp.clip(assumed, _TINY, _MAX)

    def usable_memory(state: LossScaleState, low: jax.Array) -> HeadroomRuleState:
        """The memory without numbers that cannot be right."""
        recent, peaks = (as_array(each, jnp.float32) for each in state.rule_state)
        if jnp.shape(recent) != (recent_steps,) or jnp.shape(peaks) != (history,):
            raise ValueError(
                f"`state` must come from a rule with `recent` {recent_steps} and "
                f"`history` {history}, got arrays of shapes {jnp.shape(recent)} and "
                f"{jnp.shape(peaks)}. (Give the rule the settings that the state was "
                "saved with, or start it anew: `adopt_inner_state`.)"
            )

        def usable(memory: jax.Array, limit: jax.Array) -> jax.Array:
            is_right = (memory >= 0) & (memory <= jnp.minimum(limit, _MAX))
            return jnp.where(is_right, memory, 0.0)

        s = state.loss_scale
        # At the floor even a magnitude that overflows is right.
        limit = jnp.where(s > low, largest / low, _MAX)
        return HeadroomRuleState(usable(recent, limit), usable(peaks, largest / s))

    return make_rule(first_scale, first, change, needs_grads_max=True)


def _first_nonzero(first: jax.Array, second: jax.Array) -> jax.Array:
    """The first unless it is zero or subnormal, which some platforms flush to zero."""
    return jnp.where(first >= _TINY, first, second)


def _append(history: jax.Array, entry: jax.Array) -> jax.Array:
    """Drops the oldest entry for a new one."""
    return jnp.concatenate([history[1:], entry[None]])
