"""One step of each rule in plain Python.

It is written from the docstrings of `dynamic_loss_scale`, `headroom_loss_scale` and
their states.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

F32 = np.float32
LARGEST = 65504.0  # Of float16.
_QUIET_STEPS = 32


class Dynamic(NamedTuple):
    """Scale, finite steps since its last change, and overflows still tolerated."""

    s: float
    n: int
    h: int

    def numbers(self) -> tuple[float, ...]:
        return tuple(self)


def first_dynamic(settings: dict) -> Dynamic:
    return Dynamic(settings["init_scale"], 0, settings["hysteresis"])


def dynamic(state: Dynamic, finite: bool, settings: dict) -> Dynamic:
    s, n, h = state
    if finite:
        n += 1
        if settings["hysteresis_refill"] == "finite":
            h = settings["hysteresis"]
        if n >= settings["growth_interval"]:
            grown = F32(s) * F32(settings["growth_factor"])
            s = float(min(grown, F32(settings["max_scale"])))
            n, h = 0, settings["hysteresis"]
        return Dynamic(s, n, h)
    n, h = 0, max(h - 1, 0)
    if h == 0:
        smaller = F32(s) * F32(settings["backoff_factor"])
        s = float(max(smaller, F32(settings["min_scale"])))
    return Dynamic(s, n, h)


class Headroom(NamedTuple):
    """Scale, largest magnitudes of finite steps, and of each step that overflowed."""

    s: float
    recent: tuple[float, ...]
    peaks: tuple[float, ...]

    def numbers(self) -> tuple[float, ...]:
        return self.s, *self.recent, *self.peaks


def first_headroom(settings: dict) -> Headroom:
    recent = min(settings["recent"], settings["history"])
    return Headroom(
        settings["init_scale"], (0.0,) * recent, (0.0,) * settings["history"]
    )


def headroom(state: Headroom, largest: float, applied: int, settings: dict) -> Headroom:
    """The next state; `largest` is the largest magnitude, infinity for an overflow.

    So many steps were `applied` before.
    """
    s, recent, peaks = state
    low, high = settings["min_scale"], settings["max_scale"]
    usable = float(F32(LARGEST * 2.0 ** -settings["margin_bits"]))
    quiet = min(len(recent), _QUIET_STEPS)
    fading = F32(2.0 ** (-4 / settings["history"]))
    # A magnitude that the present scale would have carried beyond float16 is wrong.
    peaks = tuple(peak if peak <= LARGEST / s else 0.0 for peak in peaks)
    if math.isinf(largest):
        is_repeated = peaks[-1] > 0
        base = max(peaks) or max(recent) or usable / s
        assumed = max(base, usable / high) * (1 if is_repeated else 2)
        assumed = min(assumed, usable / low)
        peaks = (*_faded(peaks[1:], fading), assumed)
        fitting = _power_below(usable, max(*recent, assumed))
        new = min(fitting, s / 2**8 if is_repeated else s)
        return Headroom(min(max(new, low), high), recent, peaks)
    new = s
    is_flushed = largest == 0 and all(peak > 0 for peak in peaks[-2:])
    if not is_flushed:
        recent = (*recent[1:], largest)
        # At first the magnitudes are zero, so the count of steps must tell.
        if applied + 1 >= quiet and not any(recent[-quiet:]):
            recent, fading, new = (0.0,) * len(recent), F32(2.0**-4), s * 2**4
    top = max(*recent, *_faded(peaks, fading))
    if top:
        new = _power_below(usable, top)
    peaks = (*_faded(peaks[1:], fading), 0.0)
    return Headroom(min(max(new, low), high), recent, peaks)


def _faded(peaks: tuple[float, ...], fading: np.float32) -> tuple[float, ...]:
    return tuple(float(F32(peak) * fading) for peak in peaks)


def _power_below(usable: float, top: float) -> float:
    """The largest power of two that is at most the quotient, without rounding."""
    limit = Fraction(usable) / Fraction(top)
    power = 2.0 ** (math.frexp(usable / top)[1] + 1)
    while Fraction(power) > limit:
        power /= 2
    return power
