"""The rules in plain Python, written from their definitions."""

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers import stepwise


def run_dynamic(
    history: Iterable[bool], **settings: Any
) -> list[tuple[float, bool, int, int, int]]:
    """The dynamic rule after each step.

    A row holds scale, last finite, consecutive skips, all skips, steps.
    """
    state = stepwise.first_dynamic(settings)
    row = total = 0
    trace = []
    for steps, finite in enumerate(history, start=1):
        state = stepwise.dynamic(state, finite, settings)
        row, total = (0, total) if finite else (row + 1, total + 1)
        trace.append((float(np.float32(state.s)), finite, row, total, steps))
    return trace


def run_loss_scaled(
    inner: optax.GradientTransformation,
    params: Any,
    history: Iterable[Any],
    **settings: Any,
) -> list[tuple[Any, Any, tuple[float, bool, int, int, int]]]:
    """The core of `docs/for_maintainers.md`, under the dynamic rule: it skips by `if`.

    A row holds updates, inner state, and a row of `run_dynamic`.
    """

    def wide(array: jax.Array) -> jax.Array:
        return array.astype(jnp.promote_types(array.dtype, jnp.float32))

    def unscaled(grad: jax.Array) -> jax.Array:
        return wide(grad) * (1 / jnp.asarray(scale, wide(grad).real.dtype))

    params = jax.tree.map(wide, params)
    state, scale = inner.init(params), settings["init_scale"]
    verdicts: list[bool] = []
    trace = []
    for scaled in history:
        grads = jax.tree.map(unscaled, scaled)
        verdicts.append(all(np.isfinite(g).all() for g in jax.tree.leaves(grads)))
        if verdicts[-1]:
            updates, state = inner.update(grads, state, params)
        else:  # Added to any number, -0.0 changes no bit.
            updates = jax.tree.map(lambda g: -jnp.zeros_like(g), grads)
        row = run_dynamic(verdicts, **settings)[-1]
        trace.append((updates, state, row))
        scale = row[0]
    return trace


def run_headroom(
    maxima: Iterable[float],
    init_scale: float,
    min_scale: float,
    max_scale: float,
    *,
    history: int,
    recent: int,
    margin_bits: float,
) -> list[float]:
    """The scale after each step, in exact fractions; only the margin is rounded."""
    recent = min(recent, history)
    quiet = min(recent, 32)
    fading = np.float32(2 ** (-4 / history))
    usable = Fraction(float(np.float32(65504 * 2.0**-margin_bits)))
    magnitudes, peak, age = [Fraction(0)] * recent, np.float32(0), 0
    s, row, applied, trace = init_scale, 0, 0, []

    def below(limit: Fraction) -> float:
        """The largest power of two that is at most the limit."""
        power = 2.0**200
        while Fraction(power) > limit:
            power /= 2
        return power

    for maximum in maxima:
        age += 1
        if age > history:
            peak = np.float32(0)
        new = s
        if math.isfinite(maximum):
            is_known = maximum or row < min(2, history)
            if is_known:
                magnitudes = [*magnitudes[1:], Fraction(maximum)]
            before, peak = peak, peak * fading
            if is_known and applied + 1 >= quiet and not any(magnitudes[-quiet:]):
                magnitudes = [Fraction(0)] * recent
                peak = before * np.float32(2.0**-4)
                new = s * 2**4
        else:
            base = Fraction(float(peak)) or max(magnitudes) or usable / Fraction(s)
            lowest, highest = (usable / Fraction(b) for b in (max_scale, min_scale))
            assumed = max(base, lowest) * (1 if row else 2)
            peak, age = np.float32(float(min(assumed, highest))), 0
        top = max(*magnitudes, Fraction(float(peak)))
        new = below(usable / top) if top else new
        if not math.isfinite(maximum):
            new = min(new, s / 2**8 if row else s)
        row = 0 if math.isfinite(maximum) else row + 1
        applied += math.isfinite(maximum)
        s = min(max(new, min_scale), max_scale)
        trace.append(s)
    return trace
