"""Times updates by an optimizer, in each way that is compared, beside the first way."""

import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from _lib.updates import OPTIMIZERS, SHAPES, WAYS, Way, read_alone, shape_of

ROUNDS = 60


class Program(NamedTuple):
    """A compiled step, its own parameters and state, and the time that it took to make.

    Attributes:
      step: The compiled step.
      carry: Parameters and state; each step replaces them.
      trace_s: Seconds to trace.
      compile_s: Seconds to compile.
    """

    step: Any
    carry: list[Any]
    trace_s: float
    compile_s: float


def make_program(way: Way, params: Any, grads: Any, repeats: int) -> Program:
    """Traces and compiles a step `repeats` times, and keeps the shortest times."""
    carry = [params, way.init(params)]
    traces, compiles = [], []
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        traced = jax.jit(way.step, donate_argnums=(0, 1)).trace(*carry, grads)
        traces.append(time.perf_counter() - start)
        lowered = traced.lower()
        start = time.perf_counter()
        step = lowered.compile()
        compiles.append(time.perf_counter() - start)
    # Each program needs its own buffers, because its steps donate them.
    return Program(step, jax.tree.map(jnp.array, carry), min(traces), min(compiles))


def time_of(program: Program, grads: Any) -> float:
    """Takes two steps, and returns the seconds of the second one."""
    for _ in range(2):
        start = time.perf_counter()
        program.carry[:] = jax.block_until_ready(program.step(*program.carry, grads))
    return time.perf_counter() - start


def median_ratios(programs: list[Program], grads: Any) -> list[float]:
    """Returns each program's time over the first one's, as the median of all rounds."""
    for _ in range(5):
        for program in programs:
            time_of(program, grads)
    rounds = []
    for _ in range(ROUNDS):
        times = [time_of(program, grads) for program in programs]
        rounds.append([each / times[0] for each in times])
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def make_inputs(shapes: list[tuple[int, ...]], dtype: Any) -> tuple[Any, Any]:
    """Makes parameters, and scaled gradients that are finite in `dtype`."""
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    grads = [jnp.asarray(rng.normal(size=shape) * 100, dtype) for shape in shapes]
    return params, grads


def compare(
    optimizer: str, dtype: Any, leaves: str, names: list[str], repeats: int
) -> list[dict[str, Any]]:
    """Returns a row for each way: its times divided by those of the first way.

    `leaves` is a key of `SHAPES`, or number and size, such as `"60 x 100000"`.
    """
    number, _, size = leaves.partition(" x ")
    shapes = SHAPES.get(leaves) or [shape_of(int(size))] * int(number)
    params, grads = make_inputs(shapes, dtype)
    makers = WAYS | {"one read alone": read_alone}
    ways = [makers[name](OPTIMIZERS[optimizer]) for name in names]
    programs = [make_program(way, params, grads, repeats) for way in ways]
    first = programs[0]
    return [
        {
            "way": name,
            "optimizer": optimizer,
            "gradients": jnp.dtype(dtype).name,
            "leaves": leaves,
            "time": f"{ratio:.2f}",
            "compile time": f"{program.compile_s / first.compile_s:.2f}",
            "trace time": f"{program.trace_s / first.trace_s:.2f}",
        }
        for name, program, ratio in zip(
            names, programs, median_ratios(programs, grads), strict=True
        )
    ]


def eager_ratio(params: Any, grads: Any) -> float:
    """Returns the time of `update` outside `jit`, divided by the bare optimizer's."""
    bare, scaled = optax.adamw(1e-3), ols.loss_scaled(optax.adamw(1e-3))
    states = bare.init(params), scaled.init(params)
    ratios = []
    for _ in range(15):
        start = time.perf_counter()
        wide = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        jax.block_until_ready(bare.update(wide, states[0], params))
        middle = time.perf_counter()
        jax.block_until_ready(scaled.update(grads, states[1], params))
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return statistics.median(ratios[5:])
