"""Measures what loss scaling adds to an optimizer step on this machine: two tables.

    python benchmarks/step_overhead.py [--json FILE] [--leaves 60] [--size 100000]

All ways run in one process, with parameters and state donated. In each round every way
takes two steps, and the second one is timed and divided by the bare optimizer's time.
The table gives the median of this ratio over all rounds.
"""

import argparse
import json
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from _lib.tables import print_table, versions
from _lib.updates import OPTIMIZERS, SHAPES, WAYS, Way, read_alone, shape_of
from optax_lossscale._checks import check_output_file

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


def main() -> None:
    """Prints the two tables, and writes them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=check_output_file, help="write the tables to a file"
    )
    parser.add_argument("--leaves", type=int, default=60, help="number of arrays")
    parser.add_argument("--size", type=int, default=100_000, help="entries of an array")
    parser.add_argument("--quick", action="store_true", help="print one table only")
    arguments = parser.parse_args()
    leaves = f"{arguments.leaves} x {arguments.size}"

    print(f"{versions()}; times over the bare optimizer's\n")
    rows = compare("adamw", jnp.float16, leaves, list(WAYS), 3)
    print_table(rows)
    shapes = [shape_of(arguments.size)] * arguments.leaves
    eager = eager_ratio(*make_inputs(shapes, jnp.float16))
    print(f"\n`update` outside `jit`, AdamW: {eager:.2f}\n")

    cases = [(name, jnp.float16, leaves) for name in OPTIMIZERS]
    cases += [("adamw", dtype, leaves) for dtype in (jnp.bfloat16, jnp.float32)]
    cases += [
        ("adamw", jnp.float16, other)
        for other in ("1 x 10000", "1 x 6000000", "10 x 100000", "1000 x 100000")
    ]
    cases += [
        ("adamw", dtype, other)
        for other in SHAPES
        for dtype in (jnp.float16, jnp.float32)
    ]
    ours = list(WAYS)[:2]
    cases = [] if arguments.quick else cases
    matrix = [compare(*case, ours, 2)[1] for case in cases]
    if matrix:
        ways = [ours[0], "one read alone"]
        matrix += [compare("adamw", jnp.float32, x, ways, 1)[1] for x in SHAPES]
        print_table(matrix)
    if arguments.json is not None:
        tables = {"versions": versions(), "eager": eager, "rows": rows + matrix}
        arguments.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
