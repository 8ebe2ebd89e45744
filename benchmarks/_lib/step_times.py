"""Compiles whole training steps, and times them on the device that JAX uses."""

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from _lib.costs import Cost, compile_step
from _lib.devices import device_of
from _lib.steps import make_step


class Measured(NamedTuple):
    """What is measured of a step.

    Attributes:
      cost: The cost of the compiled step.
      grad_bytes: Bytes of all gradients.
      time_s: Seconds of a step, where there is a device.
    """

    cost: Cost
    grad_bytes: int
    time_s: float | None = None


def measure(
    platform: str,
    model: str,
    way: str,
    optimizer: str,
    scalers: list[str],
    small: bool,
    rounds: int = 30,
    steps: int = 10,
) -> list[Measured]:
    """Compiles a step with each scaler, and times them if the platform is `here`.

    In each round every program takes some steps in a row.
    """
    is_here = platform == "here"
    device = jax.devices()[0] if is_here else device_of(platform)
    measured, programs = [], []
    for scaler in scalers:
        run, args, grad_bytes = make_step(model, way, optimizer, scaler, small)
        compiled, cost = compile_step(run, args, device)
        measured.append(Measured(cost, grad_bytes))
        if is_here:
            programs.append((compiled, random_like(args)))
    times = seconds(programs, rounds, steps) if is_here else [None] * len(measured)
    return [
        each._replace(time_s=time_s)
        for each, time_s in zip(measured, times, strict=True)
    ]


def random_like(shapes: Any) -> Any:
    """Makes random arrays.

    Floats are above zero, as second moments are. Integers differ too: a GPU adds the
    gradients of equal tokens one after the other.
    """
    key = jax.random.key(0)

    def fill(x):
        high = 0.1 if jnp.issubdtype(x.dtype, jnp.floating) else 64
        return jax.random.uniform(key, x.shape, maxval=high).astype(x.dtype)

    return jax.tree.map(fill, shapes)


def seconds(programs: list[tuple[Any, Any]], rounds: int, steps: int) -> list[float]:
    """Returns the median time of a step of each program, which take turns.

    The first three rounds are for warming up.
    """
    times: list[list[float]] = [[] for _ in programs]
    carries = [list(args[:2]) for _, args in programs]
    for _ in range(rounds):
        for i, (step, args) in enumerate(programs):
            start = time.perf_counter()
            for _ in range(steps):
                carries[i][:] = step(*carries[i], *args[2:])[:2]
            jax.block_until_ready(carries[i])
            times[i].append((time.perf_counter() - start) / steps)
    return [statistics.median(each[3:]) for each in times]
