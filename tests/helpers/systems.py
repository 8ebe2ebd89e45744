"""How each system changes its loss scale, in plain Python, with its own names.

Each function is a generator. It yields the scale and, where the system keeps one, its
count of finite steps, and is sent whether the next step was finite. Written from the
sources of the systems; the functions say which file. Scales are in the precision that
the system keeps them in. What a system raises is left out.
"""

import math
from collections.abc import Callable, Generator
from typing import TypeAlias

import numpy as np

F32 = np.float32
LARGEST = float(np.finfo(F32).max)
# Yields the scale and a count, and is sent a verdict.
System: TypeAlias = Generator[tuple[float, int | None], bool, None]


def torch(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int
) -> System:
    """`aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp`: products are in double."""
    scale, tracker = float(F32(init_scale)), 0
    while True:
        if not (yield scale, tracker):
            scale, tracker = _narrow(scale * backoff_factor), 0
            continue
        tracker += 1
        if tracker == growth_interval:
            grown = _narrow(scale * growth_factor)
            scale, tracker = grown if math.isfinite(grown) else scale, 0


def keras(initial_scale: float, dynamic_growth_steps: int) -> System:
    """`keras/src/optimizers/loss_scale_optimizer.py`."""
    scale, counter = float(initial_scale), 0
    while True:
        if not (yield scale, counter):
            scale, counter = scale * 0.5, 0
        elif counter == dynamic_growth_steps - 1:
            scale, counter = scale * 2, 0
        else:
            counter += 1


def tf_keras(initial_scale: float, dynamic_growth_steps: int) -> System:
    """`tf_keras/mixed_precision/loss_scale_optimizer.py`."""
    scale, counter = float(initial_scale), 0
    while True:
        if not (yield scale, counter):
            scale, counter = max(scale / 2, 1.0), 0
        elif counter + 1 >= dynamic_growth_steps:
            scale, counter = scale * 2 if scale * 2 <= LARGEST else scale, 0
        else:
            counter += 1


def mindspore_scaler(
    init_loss_scale: float, scale_factor: float, scale_window: int
) -> System:
    """`DynamicLossScaler` of `mindspore/python/mindspore/amp.py`."""
    scale, counter, factor = F32(init_loss_scale), 0, F32(scale_factor)
    while True:
        finite = yield float(scale), counter
        if not finite:
            scale = max(F32(1), scale / factor)
        elif counter == scale_window - 1 and float(scale) * scale_factor <= LARGEST:
            scale = scale * factor
        counter = (counter + 1) % scale_window * finite


def mindspore_manager(
    init_loss_scale: float, scale_factor: float, scale_window: int
) -> System:
    """`DynamicLossScaleManager` of `mindspore/train/loss_scale_manager.py`."""
    scale, current, last = float(init_loss_scale), 1, 0
    while True:
        if not (yield scale, None):
            scale, last = max(scale / scale_factor, 1.0), current
        elif (current - last) % scale_window == 0:
            scale *= scale_factor
        current += 1


def mindspore_cell(
    init_loss_scale: float, scale_factor: float, scale_window: int
) -> System:
    """`DynamicLossScaleUpdateCell` of `mindspore/nn/wrap/loss_scale.py`."""
    scale, current, last = F32(init_loss_scale), 1, 0
    factor = F32(scale_factor)
    while True:
        finite = yield float(scale), None
        grows = scale_window <= current - last
        if not finite:
            scale = max(scale / factor, F32(1))
        elif grows:
            scale = scale * factor
        if grows or not finite:
            last = current
        current += 1


def apex(
    init_scale: float,
    scale_window: int,
    min_loss_scale: float | None,
    max_loss_scale: float,
) -> System:
    """`apex/amp/scaler.py`."""
    scale, unskipped = min(max_loss_scale, init_scale), 0
    while True:
        if not (yield scale, unskipped):
            scale, unskipped = scale / 2, 0
            if min_loss_scale:
                scale = max(min_loss_scale, scale)
        else:
            unskipped += 1
        if unskipped == scale_window:
            scale, unskipped = min(max_loss_scale, scale * 2), 0


def megatron(
    initial_scale: float,
    min_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> System:
    """`megatron/core/optimizer/grad_scaler.py`."""
    scale, tracker, left = F32(initial_scale), 0, hysteresis
    while True:
        if not (yield float(scale), tracker):
            tracker, left = 0, left - 1
            if left <= 0:
                scale = max(scale * F32(backoff_factor), F32(min_scale))
            continue
        tracker += 1
        if tracker == growth_interval:
            scale, tracker, left = scale * F32(growth_factor), 0, hysteresis


def deepspeed(
    init_scale: float,
    scale_window: int,
    min_scale: float,
    delayed_shift: int,
    consecutive_hysteresis: bool,
) -> System:
    """`deepspeed/runtime/fp16/loss_scaler.py`, as of pull request 6976."""
    scale, current, last, left = init_scale, 0, -1, delayed_shift
    while True:
        if not (yield scale, None):
            if delayed_shift == 1 or left == 1:
                scale = max(scale / 2, min_scale)
            else:
                left -= 1
            last = current
        else:
            if consecutive_hysteresis:
                left = delayed_shift
            stable = current - last - 1
            if stable > 0 and stable % scale_window == 0:
                if not consecutive_hysteresis:
                    left = delayed_shift
                scale *= 2
        current += 1


def fairseq(
    init_scale: float,
    scale_factor: float,
    scale_window: int,
    tolerance: float,
    threshold: float | None,
    min_loss_scale: float,
) -> System:
    """`fairseq/optim/dynamic_loss_scaler.py`, above `min_loss_scale`."""
    scale, current, last_overflow, last_rescale, overflows = init_scale, 0, -1, -1, 0
    while True:
        if not (yield scale, None):
            last_overflow, overflows = current, overflows + 1
            if overflows / (current - last_rescale) >= tolerance:
                scale /= scale_factor
                if threshold is not None:
                    scale = max(scale, threshold)
                last_rescale, overflows = current, 0
            if scale <= min_loss_scale:
                return
        elif (current - last_overflow) % scale_window == 0:
            scale, last_rescale = scale * scale_factor, current
        current += 1


def flax(
    scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    minimum_scale: float | None = float(np.finfo(F32).tiny),
) -> System:
    """`flax/training/dynamic_scale.py`."""
    scale, fin_steps = F32(scale), 0
    while True:
        finite = yield float(scale), fin_steps
        grow = fin_steps == growth_interval
        if finite and grow:
            scale = F32(min(float(scale) * growth_factor, LARGEST))
        elif not finite:
            scale = scale * F32(backoff_factor)
            if minimum_scale is not None:
                scale = max(scale, F32(minimum_scale))
        fin_steps = 0 if grow or not finite else fin_steps + 1


def jmp(loss_scale: float, period: int, factor: float, min_loss_scale: float) -> System:
    """`jmp/_src/loss_scale.py`."""
    scale, counter = F32(loss_scale), 0
    while True:
        finite = yield float(scale), counter
        if not finite:
            scale = max(F32(min_loss_scale), scale / F32(factor))
        elif counter == period - 1 and float(scale) * factor <= LARGEST:
            scale = scale * F32(factor)
        counter = (counter + 1) % period * finite


def follow(
    system: System, count: int, next_verdict: Callable[[int, float], bool]
) -> tuple[list[bool], list[float], list[int | None]]:
    """Verdicts, and scales and counts after each; a verdict may depend on the scale."""
    verdicts, scales, counts = [], [], []
    scale, _ = next(system)
    for i in range(count):
        verdict = next_verdict(i, scale)
        try:
            scale, counted = system.send(verdict)
        except StopIteration:
            break
        verdicts.append(verdict)
        scales.append(scale)
        counts.append(counted)
    return verdicts, scales, counts


def _narrow(scale: float) -> float:
    with np.errstate(over="ignore"):
        return float(F32(scale))
