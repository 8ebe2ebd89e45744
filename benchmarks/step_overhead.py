"""What loss scaling adds to an optimizer step on this machine: two tables.

    python benchmarks/step_overhead.py [--json FILE] [--leaves 60] [--size 100000]

Every way runs in one process, with parameters and state donated: in each round two
steps of each in turn, of which the second is timed; its ratio to the bare optimizer's
is one of those that the median is taken of.
"""

import argparse
import json
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tables import print_table, versions
from updates import OPTIMIZERS, WAYS, Way, shape_of

import optax_lossscale as ols

ROUNDS = 60


class Program(NamedTuple):
    """A compiled step, what it is run on, and what it took to get it."""

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
    # Buffers of its own, as they will be donated.
    return Program(step, jax.tree.map(jnp.array, carry), min(traces), min(compiles))


def time_of(program: Program, grads: Any) -> float:
    """Seconds of one step, right after another of the same program."""
    for _ in range(2):
        start = time.perf_counter()
        program.carry[:] = jax.block_until_ready(program.step(*program.carry, grads))
    return time.perf_counter() - start


def median_ratios(programs: list[Program], grads: Any) -> list[float]:
    """Median over rounds of each program's time over the first one's."""
    for _ in range(5):
        for program in programs:
            time_of(program, grads)
    rounds = []
    for _ in range(ROUNDS):
        times = [time_of(program, grads) for program in programs]
        rounds.append([each / times[0] for each in times])
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def eager_ratio(params: Any, grads: Any) -> float:
    """Time of `update` outside `jit` over that of the bare optimizer, median."""
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


def make_inputs(leaves: int, size: int, dtype: Any) -> tuple[Any, Any]:
    """Parameters, and gradients scaled by `2**15` that are finite in `dtype`."""
    rng = np.random.default_rng(0)
    shape = shape_of(size)
    params = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(leaves)]
    grads = [jnp.asarray(rng.normal(size=shape) * 100, dtype) for _ in range(leaves)]
    return params, grads


def compare(
    optimizer: str, dtype: Any, leaves: int, size: int, names: list[str], repeats: int
) -> list[dict[str, Any]]:
    """A row for every way: time, compile time and tracing time over the first's."""
    params, grads = make_inputs(leaves, size, dtype)
    ways = [WAYS[name](OPTIMIZERS[optimizer]) for name in names]
    programs = [make_program(way, params, grads, repeats) for way in ways]
    first = programs[0]
    return [
        {
            "way": name,
            "optimizer": optimizer,
            "gradients": jnp.dtype(dtype).name,
            "leaves": f"{leaves} x {size}",
            "time": f"{ratio:.2f}",
            "compile time": f"{program.compile_s / first.compile_s:.2f}",
            "trace time": f"{program.trace_s / first.trace_s:.2f}",
        }
        for name, program, ratio in zip(
            names, programs, median_ratios(programs, grads), strict=True
        )
    ]


def main() -> None:
    """Prints the two tables, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--leaves", type=int, default=60)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="the first table alone")
    args = parser.parse_args()
    shape = args.leaves, args.size

    print(f"{versions()}; times over the bare optimizer's\n")
    rows = compare("adamw", jnp.float16, *shape, list(WAYS), 3)
    print_table(rows)
    eager = eager_ratio(*make_inputs(*shape, jnp.float16))
    print(f"\n`update` outside `jit`, AdamW: {eager:.2f}\n")

    cases = [(name, jnp.float16, *shape) for name in OPTIMIZERS]
    cases += [("adamw", dtype, *shape) for dtype in (jnp.bfloat16, jnp.float32)]
    cases += [
        ("adamw", jnp.float16, leaves, size)
        for leaves, size in [
            (1, 10_000),
            (1, 6_000_000),
            (10, 100_000),
            (1000, 100_000),
        ]
    ]
    ours = list(WAYS)[:2]
    cases = [] if args.quick else cases
    matrix = [compare(*case, ours, 2)[1] for case in cases]
    if matrix:
        print_table(matrix)
    if args.json:
        tables = {"versions": versions(), "eager": eager, "rows": rows + matrix}
        args.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
