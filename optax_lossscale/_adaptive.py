"""Rules that no peer has: smooth growth, and headroom above the gradients' maximum.

Their scales are powers of two, which scale exactly.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._bits import (
    Split,
    exponent_of_quotient,
    power_of_two,
    split,
    split_number,
)
from optax_lossscale._checks import (
    ScaleBound,
    static_bounds,
    static_count,
    static_float_dtype,
    static_number,
    static_scale,
)
from optax_lossscale._rules import LossScale, count_step, first_state
from optax_lossscale._state import LossScaleState

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_BITS_IN_A_ROW = 8


class SmoothRuleState(NamedTuple):
    """What the smooth rule carries beside the scale.

    Attributes:
      fraction: `f32[]`, bits, from 0 to 1. How far the exponent is above that of the
        scale.
    """

    fraction: jax.Array


class HeadroomRuleState(NamedTuple):
    """What the headroom rule carries beside the scale.

    Attributes:
      recent: `f32[recent]`, in the unit of the gradients. The largest magnitudes of
        the last steps, oldest first; 0 where there was none.
      peaks: `f32[history]`. The same, of peaks alone.
    """

    recent: jax.Array
    peaks: jax.Array


def smooth_loss_scale(
    init_scale: float = 2.0**15,
    *,
    growth_bits: float = 1e-3,
    backoff_bits: float = 1.0,
    min_scale: ScaleBound = 2.0**-24,
    max_scale: ScaleBound = 2.0**24,
) -> LossScale:
    """A loss scale that grows a little on every finite step.

    With a real exponent `e`, a step does

        e = e + growth_bits       if finite
        e = e - backoff_bits      if not
        s = 2**floor(e)

    within the bounds. While the gradients stay as they are, growth and backoff balance,
    so that about `growth_bits / backoff_bits` of the steps are skipped; fewer while
    they shrink, more while they grow. The classic rule needs `growth_interval` steps to
    regain each bit, this one `1 / growth_bits`, without a count that one bad
    batch sets back.

    Args:
      init_scale: First scale, dimensionless; `e` starts at its logarithm. It may lie
        outside the bounds, which hold from the first step on.
      growth_bits: Bits a finite step, from `2**-20` to 126. With `1e-3` the scale
        doubles in 1000.
      backoff_bits: Bits a nonfinite step, in the same range.
      min_scale: Floor of the scale, at least `2**-126`, or an `optax.Schedule` of
        `step_count`. It is rounded up to a power of two.
      max_scale: Cap of the scale, at most `2**126`, or a schedule. It is rounded down
        to a power of two, and wins where the two cross.

    Returns:
      A `LossScale`; its `rule_state` is a NamedTuple `(fraction,)` of `f32[]`: `e` is
      `log2(s) + fraction`. So after `set_loss_scale` it goes on from the new scale,
      also from one that is no power of two.

    Raises:
      ValueError: If a setting is outside its range, or the bounds are inverted.
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
      OpenAI's `guided-diffusion`, `fp16_util.py`, which applies `2**e` itself, not a
      power of two, without bounds; the cap is that of Dhariwal et al., Jukebox, 2020.
    """
    mantissa, exponent = math.frexp(static_scale("init_scale", init_scale))
    # Less is lost when it is added to a fraction in float32.
    growth_bits = static_number("growth_bits", growth_bits, 2.0**-20, 126.0)
    backoff_bits = static_number("backoff_bits", backoff_bits, 2.0**-20, 126.0)
    bounds = static_bounds(min_scale, max_scale)

    def init() -> LossScaleState:
        fraction = jnp.asarray(math.log2(mantissa) + 1, jnp.float32)
        return first_state(2.0 ** (exponent - 1), SmoothRuleState(fraction))

    def adjust(
        state: LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        grads_max: jax.typing.ArrayLike | None = None,
    ) -> LossScaleState:
        del grads_max
        finite = jnp.asarray(grads_finite, bool)
        low, high = map(power_of_two, _inward(bounds(state.step_count)))
        e = state.rule_state.fraction
        e = jnp.where(jnp.isnan(e), 0.0, e)  # Of a damaged checkpoint.
        e += jnp.where(finite, growth_bits, -backoff_bits)
        whole = jnp.floor(e)
        s = jnp.ldexp(state.loss_scale, whole.astype(jnp.int32))
        fraction = jnp.where((s < low) | (s >= high), 0.0, e - whole)
        s = jnp.clip(s, low, high)
        return count_step(state, finite, s, SmoothRuleState(fraction))

    return LossScale(init, adjust)


def headroom_loss_scale(
    init_scale: float = 2.0**15,
    *,
    history: int = 2400,
    recent: int = 64,
    margin_bits: float = 0.75,
    min_scale: ScaleBound = 2.0**-24,
    max_scale: ScaleBound = 2.0**24,
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> LossScale:
    """The largest loss scale that leaves a margin above the latest gradients.

    From the largest magnitudes of the unscaled gradients, those of the last `recent`
    steps and the peaks among the last `history`, each step does

        s = 2**floor(log2(finfo(dtype).max / max(recent + peaks)) - margin_bits)

    within the bounds, so the scale is right after the first step, and rises `recent`
    steps after the gradients fell. A peak is a magnitude that overflows, or would have
    with the scale that the recent ones before it alone allow. One that overflows is not
    known; what it proves is that with `s` it did not fit, and it enters as `2 *
    finfo(dtype).max / s`.

    Where nonfinite steps come in a row, only the first enters, and each further one
    does `s = s / 2**8`, which the first finite step takes back, though it runs with
    that scale itself. So a large rise of the gradients costs few skips, and a row of
    bad batches, whose NaN no scale would have prevented, one each, and afterwards no
    more bits than one of them.

    Gradients that are all zero enter 0. While nothing else is remembered the scale
    stays, and from step `recent` on doubles: they may be zero because it is too low. A
    step that is skipped though `grads_max` is finite enters that, and is no overflow
    (`update(..., grads_finite=False)` gives infinity, and is one).

    Args:
      init_scale: First scale, dimensionless, rounded down to a power of two. It may
        lie outside the bounds, which hold from the first step on.
      history: Steps that a peak is remembered, at least 1. The longer, the fewer of
        them overflow, and the later the scale rises again after one.
      recent: Steps that any magnitude is remembered, at least 1; at most `history`
        are used. The longer, the later the scale follows as gradients shrink.
      margin_bits: Bits left free above the largest magnitude remembered, from 0 to 126.
        What is seen is the gradients of parameters that `update` is given. Those of
        activations may be larger, and so may be those of each device before they are
        averaged: where steps are skipped again and again, raise it.
      min_scale: Floor of the scale, at least `2**-126`, or an `optax.Schedule` of
        `step_count`. It is rounded up to a power of two.
      max_scale: Cap of the scale, at most `2**126`, or a schedule. It is rounded down
        to a power of two, and wins where the two cross.
      dtype: The floating dtype of the backward pass, in which gradients overflow.

    Returns:
      A `LossScale` that needs `grads_max`; its `rule_state` is a NamedTuple
      `(recent, peaks)` of `f32[recent]` and `f32[history]`. What `set_loss_scale`
      sets lasts one step.

    Raises:
      ValueError: If a setting is outside its range, or the bounds are inverted. From
        `adjust`, if `grads_max` is missing.
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
      for all gradients, which overflow enters too, and a longer one for peaks. The
      settings were chosen on the traces in `benchmarks/README.md`.
    """
    first_scale = 2.0 ** (math.frexp(static_scale("init_scale", init_scale))[1] - 1)
    history = static_count("history", history)
    recent_steps = min(static_count("recent", recent), history)
    margin_bits = static_number("margin_bits", margin_bits, 0.0, 126.0)
    bounds = static_bounds(min_scale, max_scale)
    largest = float(jnp.finfo(static_float_dtype("dtype", dtype)).max)
    largest = min(largest, _FLOAT32_MAX)

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
        overflow = ~jnp.isfinite(grads_max)
        finite = jnp.asarray(grads_finite, bool) & ~overflow
        usable = split_number(largest * 2.0**-margin_bits)
        s = state.loss_scale
        recent, peaks = state.rule_state
        # A step that was skipped for another reason has entered its magnitude.
        in_a_row = overflow & ~state.last_finite & (recent[-1] == 0)

        calm = split(jnp.max(recent))
        fits = exponent_of_quotient(split_number(largest), split(grads_max))
        is_peak = _is_known(calm) & (fits < exponent_of_quotient(usable, calm))
        peak = jnp.where(is_peak, grads_max, 0)
        proven = jnp.minimum(2 * (largest / s), _FLOAT32_MAX)
        peak = jnp.where(overflow, jnp.where(in_a_row, 0, proven), peak)
        recent = _append(recent, jnp.where(overflow, 0, grads_max))
        peaks = _append(peaks, peak)

        held = split(s).exponent
        top = split(jnp.maximum(jnp.max(recent), jnp.max(peaks)))
        unknown = held + jnp.where(state.step_count >= recent_steps, 1, 0)
        e = jnp.where(_is_known(top), exponent_of_quotient(usable, top), unknown)
        e = jnp.where(in_a_row, jnp.minimum(e, held - _BITS_IN_A_ROW), e)
        low, high = _inward(bounds(state.step_count))
        s = power_of_two(jnp.clip(e, low, high))
        return count_step(state, finite, s, HeadroomRuleState(recent, peaks))

    return LossScale(init, adjust, needs_grads_max=True)


def _is_known(magnitude: Split) -> jax.Array:
    """False for zero, and for what some platforms take for it, subnormal numbers."""
    return magnitude.exponent >= -126


def _append(history: jax.Array, entry: jax.Array) -> jax.Array:
    """Drops the oldest entry for a new one."""
    return jnp.concatenate([history[1:], entry[None]])


def _inward(
    bounds: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
) -> tuple[jax.Array, jax.Array]:
    """Exponents of the powers of two within the bounds; the cap wins."""
    low, high = (split(jnp.asarray(bound, jnp.float32)) for bound in bounds)
    return low.exponent + jnp.where(low.mantissa > 1, 1, 0), high.exponent
