"""A rule that follows the largest gradient and leaves headroom above it."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._bits import (
    Split,
    exponent_of_quotient,
    exponents_within,
    power_of_two,
    split,
    split_number,
)
from optax_lossscale._checks import (
    check_bounds,
    check_count,
    check_float_dtype,
    check_number,
    check_scale,
)
from optax_lossscale._rules import LossScale, count_step, first_state
from optax_lossscale._state import LossScaleState

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_BITS_PER_REPEATED_OVERFLOW = 8


class HeadroomRuleState(NamedTuple):
    """What the headroom rule carries beside the scale.

    Attributes:
      recent: `f32[recent]`, in the unit of the gradients. The largest magnitude of each
        of the last steps, oldest first; 0 for an overflow, or if no step was taken yet.
      peaks: `f32[history]`. The peaks of the last steps; 0 for all other steps.
    """

    recent: jax.Array
    peaks: jax.Array


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
    """The largest loss scale that leaves a margin above the latest gradients.

    The rule remembers the largest magnitude of the unscaled gradients for each of the
    last `recent` steps, and the peaks among the last `history` steps. Each step sets

        top = max(max(recent), max(peaks))
        s = 2**floor(log2(finfo(dtype).max / top) - margin_bits)

    within the bounds. So one step is enough to find a suitable scale. If the gradients
    shrink, the scale rises `recent` steps later.

    A peak is a magnitude that overflowed, or that would have overflowed with the scale
    that the formula gives for the recent steps alone. The size of an overflow is
    unknown, except that it is above `finfo(dtype).max / s`; the rule remembers twice
    that.

    In a row of overflows only the first is remembered. Each further one divides the
    scale by `2**8`; the first finite step still runs with that low scale, and then the
    scale is set by the formula again. So a large rise of the gradients costs few skips.
    A row of bad batches, whose NaN no scale would have prevented, costs one skip each;
    afterwards the scale is as low as after a single bad batch.

    A step whose gradients are all zero is remembered as 0. While nothing else is
    remembered, the scale stays as it is during the first `recent` steps of the run.
    After those it doubles on every step, because a scale that is too low may be the
    reason why the gradients are zero.

    `update(..., grads_finite=False)` counts as an overflow. In `adjust`,
    `grads_finite=False` with a finite `grads_max` does not: the magnitude is
    remembered. A step that only `check_updates` skips is not remembered at all.

    Args:
      init_scale: First scale, dimensionless, rounded down to a power of two. It may
        lie outside the bounds, which apply from the first step on.
      history: For how many steps a peak is remembered, at least 1. With a longer
        history fewer peaks overflow, but the scale rises later after each.
      recent: For how many steps every magnitude is remembered, at least 1; values above
        `history` mean `history`. With a larger value the scale follows shrinking
        gradients later.
      margin_bits: Bits left free above the largest magnitude remembered, from 0 to 126.
        The rule sees only the gradients of parameters. Gradients of activations may be
        larger, and so may those of each device before they are averaged: raise the
        margin if steps are skipped again and again.
      min_scale: Floor of the scale, at least `2**-126`, or an `optax.Schedule` of
        `step_count`. It is rounded up to a power of two.
      max_scale: Cap of the scale, at most `2**126`, or a schedule. It is rounded down
        to a power of two. Where a scheduled floor exceeds the cap, the cap wins.
      dtype: The floating dtype of the backward pass, in which gradients overflow.

    Returns:
      A `LossScale` that needs `grads_max`; its `rule_state` is a NamedTuple
      `(recent, peaks)` of `f32[recent]` and `f32[history]`. A scale that
      `set_loss_scale` sets lasts for one step.

    Raises:
      ValueError: If a setting is outside its range, or the floor exceeds the cap.
        `adjust` raises it if `grads_max` is missing.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.headroom_loss_scale(8.0)
      >>> state = rule.adjust(rule.init(), grads_finite=True, grads_max=1.0)
      >>> print(state.loss_scale)
      32768.0
      >>> state = rule.adjust(state, grads_finite=False, grads_max=float("inf"))
      >>> print(state.loss_scale)
      8192.0

    References:
      NVIDIA's Transformer Engine, `DelayedScaling`, keeps such a history for each
      float8 tensor (https://github.com/NVIDIA/TransformerEngine). Departures: one
      history serves all gradients, overflows enter it too, and peaks are remembered
      longer. The defaults were chosen on the traces in `benchmarks/README.md`.
    """
    first_scale = 2.0 ** (math.frexp(check_scale("init_scale", init_scale))[1] - 1)
    history = check_count("history", history)
    recent_steps = min(check_count("recent", recent), history)
    margin_bits = check_number("margin_bits", margin_bits, 0.0, 126.0)
    bounds = check_bounds(min_scale, max_scale)
    largest = float(jnp.finfo(check_float_dtype("dtype", dtype)).max)
    largest = min(largest, _FLOAT32_MAX)
    largest_usable = largest * 2.0**-margin_bits

    def init() -> LossScaleState:
        rule_state = HeadroomRuleState(
            recent=jnp.zeros(recent_steps, jnp.float32),
            peaks=jnp.zeros(history, jnp.float32),
        )
        return first_state(first_scale, rule_state)

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        if grads_max is None:
            raise ValueError(
                "`grads_max` must be given to `headroom_loss_scale`, got None. (Pass "
                "`max_magnitude(grads)` of the unscaled gradients.)"
            )
        grads_max = jnp.asarray(grads_max, jnp.float32)
        overflowed = ~jnp.isfinite(grads_max)
        # A step that was skipped for another reason has its magnitude remembered.
        last_overflowed = ~state.last_finite & (state.rule_state.recent[-1] == 0)
        is_repeated = overflowed & last_overflowed

        memory = remember(state, grads_max, overflowed, is_repeated)
        exponent = exponent_for(memory, state)
        lowered = split(state.loss_scale).exponent - _BITS_PER_REPEATED_OVERFLOW
        exponent = jnp.where(is_repeated, jnp.minimum(exponent, lowered), exponent)

        min_exponent, max_exponent = exponents_within(bounds(state.step_count))
        s = power_of_two(jnp.clip(exponent, min_exponent, max_exponent))
        finite = jnp.asarray(grads_finite, bool) & ~overflowed
        return count_step(state, finite, s, memory)

    def remember(
        state: LossScaleState,
        grads_max: jax.Array,
        overflowed: jax.Array,
        is_repeated: jax.Array,
    ) -> HeadroomRuleState:
        """Enters one step into the history."""
        recent, peaks = state.rule_state
        recent_max = split(jnp.max(recent))
        allowed_exponent = exponent_of_quotient(
            split_number(largest_usable), recent_max
        )
        fitting_exponent = exponent_of_quotient(split_number(largest), split(grads_max))
        is_peak = _is_normal(recent_max) & (allowed_exponent > fitting_exponent)
        assumed = jnp.minimum(2 * (largest / state.loss_scale), _FLOAT32_MAX)

        peak = jnp.where(is_peak, grads_max, 0)
        peak = jnp.where(overflowed, jnp.where(is_repeated, 0, assumed), peak)
        recent = _append(recent, jnp.where(overflowed, 0, grads_max))
        return HeadroomRuleState(recent, _append(peaks, peak))

    def exponent_for(memory: HeadroomRuleState, state: LossScaleState) -> jax.Array:
        """The exponent of the largest scale that leaves the margin."""
        top = split(jnp.maximum(jnp.max(memory.recent), jnp.max(memory.peaks)))
        is_full = state.step_count >= recent_steps
        exponent_if_empty = split(state.loss_scale).exponent + jnp.where(is_full, 1, 0)
        exponent = exponent_of_quotient(split_number(largest_usable), top)
        return jnp.where(_is_normal(top), exponent, exponent_if_empty)

    return LossScale(init, adjust, needs_grads_max=True)


def _is_normal(magnitude: Split) -> jax.Array:
    """False for zero and for subnormal numbers, which some platforms flush to zero."""
    return magnitude.exponent >= -126


def _append(history: jax.Array, entry: jax.Array) -> jax.Array:
    """Drops the oldest entry for a new one."""
    return jnp.concatenate([history[1:], entry[None]])
