"""The classic rule in plain Python, written from its definition, not from ours."""

from collections.abc import Iterable

import numpy as np


def run(
    history: Iterable[bool],
    *,
    init_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    hysteresis_refill: str,
) -> list[tuple[float, bool, int, int, int]]:
    """After each step: scale, last finite, skips in a row, skips, steps."""
    f32 = np.float32
    s, n, h = f32(init_scale), 0, hysteresis
    row = total = 0
    trace = []
    for steps, finite in enumerate(history, start=1):
        if finite:
            n, row = n + 1, 0
            if hysteresis_refill == "finite":
                h = hysteresis
            if n >= growth_interval:
                s, n, h = min(s * f32(growth_factor), f32(max_scale)), 0, hysteresis
        else:
            n, h, row, total = 0, h - 1, row + 1, total + 1
            if h <= 0:
                s = max(s * f32(backoff_factor), f32(min_scale))
        trace.append((float(s), finite, row, total, steps))
    return trace
