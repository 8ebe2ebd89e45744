"""Takes one optimization out at a time, and shows what the update then costs.

    python benchmarks/optimizations.py [--platforms cpu tpu cuda] [--record]

A row is an update by AdamW from float16 gradients. On a CPU its time is measured, and
divided by that of the bare optimizer, as in `step_overhead.py`. For a TPU and a GPU it
is compiled only, as in `compiled_cost.py`: its bytes are divided by those of the bare
optimizer plus one more read of the gradients.
"""

import argparse
import contextlib
import math
import unittest.mock
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from _lib.costs import Cost, compile_step
from _lib.devices import DEVICE_NAMES, add_platforms, device_of, use_host_cpu
from _lib.tables import add_outputs, publish, versions
from _lib.update_times import make_inputs, make_program, median_ratios
from _lib.updates import SHAPES, Way, bare, loss_scaled, shape_of
from optax_lossscale._scaling import finite, masking, wrapper

ADAMW = optax.adamw(1e-3)
LEAVES = {"60 x 100000": [shape_of(100_000)] * 60, **SHAPES}


def masked_afterwards(
    applied: jax.Array, run: Any, grads: Any, old: Any, params: Any
) -> Any:
    """Masks the results of an update, and nothing in it."""
    return masking.mask_results(applied, *run(grads, old, params), old)


def each_alone(arrays: list[jax.Array]) -> list[list[jax.Array]]:
    """Checks each array by itself."""
    return [[array] for array in arrays]


# Each optimization: the module and name of its function, and its plain form.
WITHOUT: dict[str, tuple[Any, ...]] = {
    "early masks": (wrapper, "run_masked", masked_afterwards),
    "leaves of one shape together": (finite, "_of_one_shape", each_alone),
}
ROWS = ["nothing", *WITHOUT]


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Puts the plain form in the place of an optimization."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        if name in WITHOUT:
            stack.enter_context(unittest.mock.patch.object(*WITHOUT[name]))
        yield


def compiled(platform: str, way: Way, shapes: list[tuple[int, ...]]) -> Cost:
    """Compiles an update for a platform."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
    args = (params, jax.eval_shape(way.init, params), grads)
    return compile_step(way.step, args, device_of(platform))[1]


def time_rows(leaves: str) -> list[dict[str, str]]:
    """Returns the times of each row on a CPU, over that of the bare optimizer."""
    params, grads = make_inputs(LEAVES[leaves], jnp.float16)
    programs = [make_program(bare(ADAMW), params, grads, 1)]
    for name in ROWS:
        with without(name):
            programs.append(make_program(loss_scaled(ADAMW), params, grads, 1))
    ratios = median_ratios(programs, grads)[1:]
    return [
        {"without": name, "leaves": leaves, "CPU, time": f"{ratio:.2f}"}
        for name, ratio in zip(ROWS, ratios, strict=True)
    ]


def compiled_rows(leaves: str, platforms: list[str]) -> list[dict[str, str]]:
    """Returns the bytes and kernels of each row, compiled for each platform."""
    shapes = LEAVES[leaves]
    rows = [{"without": name, "leaves": leaves} for name in ROWS]
    for platform in platforms:
        alone, device = compiled(platform, bare(ADAMW), shapes), DEVICE_NAMES[platform]
        limit = alone.moved + 2 * sum(map(math.prod, shapes))
        for row in rows:
            with without(row["without"]):
                own = compiled(platform, loss_scaled(ADAMW), shapes)
            row[f"{device}, / limit"] = f"{own.moved / limit:.3f}"
            row[f"{device}, kernels more"] = str(own.kernels - alone.kernels)
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_platforms(parser)
    parser.add_argument("--leaves", choices=LEAVES, nargs="+", default=list(LEAVES))
    add_outputs(parser)
    arguments = parser.parse_args()
    use_host_cpu()
    others = [each for each in arguments.platforms if each != "cpu"]
    tables: dict[str, list[dict[str, str]]] = {"Times": [], "Bytes and kernels": []}
    for leaves in arguments.leaves:
        if "cpu" in arguments.platforms:
            tables["Times"] += time_rows(leaves)
        if others:
            tables["Bytes and kernels"] += compiled_rows(leaves, others)
    publish(versions(), tables, arguments)


if __name__ == "__main__":
    main()
