"""Measures what loss scaling adds to an optimizer step on this machine: three tables.

    python benchmarks/step_overhead.py [--record] [--leaves 60] [--size 100000]

All ways run in one process, with parameters and state donated. In each round every way
takes two steps, and the second one is timed and divided by the bare optimizer's time.
The tables give the median of this ratio over all rounds.
"""

import argparse

import jax.numpy as jnp

from _lib.tables import add_outputs, publish, versions
from _lib.update_times import compare, eager_ratio, make_inputs
from _lib.updates import OPTIMIZERS, SHAPES, WAYS, shape_of


def main() -> None:
    """Prints the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument("--leaves", type=int, default=60, help="number of arrays")
    parser.add_argument("--size", type=int, default=100_000, help="entries of an array")
    parser.add_argument("--quick", action="store_true", help="leave out the last table")
    arguments = parser.parse_args()
    leaves = f"{arguments.leaves} x {arguments.size}"

    rows = compare("adamw", jnp.float16, leaves, [*WAYS], 3)
    shapes = [shape_of(arguments.size)] * arguments.leaves
    eager = eager_ratio(*make_inputs(shapes, jnp.float16))

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
    ours = ["bare optimizer", "optax_lossscale"]
    cases = [] if arguments.quick else cases
    matrix = [compare(*case, ours, 2)[1] for case in cases]
    if matrix:
        ways = [ours[0], "one read alone"]
        matrix += [compare("adamw", jnp.float32, x, ways, 1)[1] for x in SHAPES]
    tables = {
        "Ways to scale the loss": rows,
        "Outside jit": [{"way": ours[1], "optimizer": "adamw", "time": f"{eager:.2f}"}],
        "Other optimizers, dtypes and leaves": matrix,
    }
    publish(f"{versions()}; times over the bare optimizer's", tables, arguments)


if __name__ == "__main__":
    main()
