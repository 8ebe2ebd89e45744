"""Takes one optimization out at a time, and shows what the step then costs.

    python benchmarks/optimizations.py [--platforms cpu tpu cuda] [--record]

A row is an update by AdamW from float16 gradients. On a CPU its time is measured, and
divided by that of the bare optimizer, as in `step_overhead.py`. For a TPU and a GPU it
is compiled only, as in `compiled_cost.py`: their bytes are divided by those of the bare
optimizer plus one more read of the gradients.

The second table is of updates outside `jit`, where each operation is dispatched. The
third counts the collectives of the check alone, compiled for eight devices on an
explicit mesh, over whose two axes the leaves are sharded in four ways.
"""

import argparse
import contextlib
import math
import re
import unittest.mock
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from _lib.costs import Cost, compile_step
from _lib.devices import (
    DEVICE_NAMES,
    add_platforms,
    device_of,
    devices_of,
    use_host_cpu,
)
from _lib.tables import add_outputs, publish, versions
from _lib.update_times import eager_ratio, make_inputs, make_program, median_ratios
from _lib.updates import SHAPES, Way, bare, loss_scaled, shape_of
from optax_lossscale._scaling import finite, masking, rules, scale, transform

ADAMW = optax.adamw(1e-3)
LEAVES = {
    "60 x 100000": [shape_of(100_000)] * 60,
    **SHAPES,
    "200 small that differ": [(100 + 7 * i,) for i in range(200)],
}


def mask_afterwards(is_applied: Any, run: Any, old: Any) -> Any:
    """Masks the results of an update, and nothing in it."""
    return masking.mask_results(is_applied, *run(), old)


def concatenated(leaves: list[jax.Array]) -> Iterator[list[jax.Array]]:
    """Yields groups of 60 leaves of any shapes, each in one array."""
    dtypes = dict.fromkeys(leaf.dtype for leaf in leaves)
    for dtype in dtypes:
        flat = [jnp.ravel(leaf) for leaf in leaves if leaf.dtype == dtype]
        for start in range(0, len(flat), 60):
            yield [jnp.concatenate(flat[start : start + 60])]


# For each optimization the functions that have it, and what stands in their place.
WITHOUT: dict[str, dict[tuple[Any, str], Any]] = {
    "nothing": {},
    "early masks": {(transform, "run_masked"): mask_afterwards},
    "leaves combined": {(finite, "_groups_of"): lambda leaves: ([x] for x in leaves)},
    "leaves cut on a CPU": {(finite, "_cut"): lambda group: group},
    "small leaves concatenated": {(finite, "_is_small"): lambda leaf: False},
    "groups of one shape; all leaves concatenated": {
        (finite, "_groups_of"): concatenated
    },
}
COMPILED_ONCE = [
    (finite, "_reduce_leaves"),
    (masking, "_zeros_unless"),
    (masking, "mask_results"),
    (rules, "_count_step"),
    (scale, "scale_leaves"),
    (scale, "unscale_leaves"),
]


@contextlib.contextmanager
def replaced(functions: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Puts other functions in the place of some of the package's own."""
    with contextlib.ExitStack() as stack:
        for place, function in functions.items():
            stack.enter_context(unittest.mock.patch.object(*place, function))
        jax.clear_caches()
        yield


def compiled(platform: str, way: Way, shapes: list[tuple[int, ...]]) -> Cost:
    """Compiles an update for a platform."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grads = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
    args = (params, jax.eval_shape(way.init, params), grads)
    return compile_step(way.step, args, device_of(platform))[1]


def times_on_cpu(shapes: list[tuple[int, ...]]) -> list[str]:
    """Returns the time without each optimization, over that of the bare optimizer."""
    params, grads = make_inputs(shapes, jnp.float16)
    programs = [make_program(bare(ADAMW), params, grads, 1)]
    for functions in WITHOUT.values():
        with replaced(functions):
            programs.append(make_program(loss_scaled(ADAMW), params, grads, 1))
    return [f"{ratio:.2f}" for ratio in median_ratios(programs, grads)[1:]]


def rows_of(leaves: str, platforms: list[str]) -> list[dict[str, str]]:
    """Returns a row for each optimization that is taken out."""
    shapes = LEAVES[leaves]
    rows = [{"without": name, "leaves": leaves} for name in WITHOUT]
    if "cpu" in platforms:
        for row, time in zip(rows, times_on_cpu(shapes), strict=True):
            row["CPU, time"] = time
    for platform in (each for each in platforms if each != "cpu"):
        alone, name = compiled(platform, bare(ADAMW), shapes), DEVICE_NAMES[platform]
        limit = alone.moved + 2 * sum(map(math.prod, shapes))
        for row, functions in zip(rows, WITHOUT.values(), strict=True):
            with replaced(functions):
                own = compiled(platform, loss_scaled(ADAMW), shapes)
            row[f"{name}, / limit"] = f"{own.moved / limit:.3f}"
            row[f"{name}, kernels more"] = str(own.kernels - alone.kernels)
    return rows


def eager_rows() -> list[dict[str, str]]:
    """Returns the times of updates outside `jit`, with and without compiled parts."""
    inputs = make_inputs(LEAVES["60 x 100000"], jnp.float16)
    plain = {place: getattr(*place).__wrapped__ for place in COMPILED_ONCE}
    rows = []
    for name, functions in {"nothing": {}, "parts compiled once": plain}.items():
        with replaced(functions):
            rows.append({"without": name, "CPU, time": f"{eager_ratio(*inputs):.2f}"})
    return rows


def collective_rows(platforms: list[str]) -> list[dict[str, str]]:
    """Returns how many collectives the check needs, with and without its own."""
    specs = [P("data"), P(None, "model"), P("data", "model"), P()]
    alone = {(finite, "_axes_of"): lambda spec: iter(())}
    rows = []
    for name, functions in {"nothing": {}, "one collective for all": alone}.items():
        rows.append({"without": name})
        for platform in platforms:
            devices = np.array(devices_of(platform, 8)).reshape(4, 2)
            mesh = Mesh(devices, ("data", "model"), axis_types=2 * (AxisType.Explicit,))
            leaves = [
                jax.ShapeDtypeStruct((512, 512), jnp.float16, sharding=sharding)
                for sharding in (NamedSharding(mesh, spec) for spec in specs)
            ]
            with replaced(functions), jax.set_mesh(mesh):
                program = jax.jit(finite.all_finite).lower(leaves).compile().as_text()
            count = len(re.findall(r" all-reduce(?:-start)?\(", program))
            rows[-1][f"{DEVICE_NAMES[platform]}, all-reduces"] = str(count)
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_platforms(parser)
    parser.add_argument("--leaves", choices=LEAVES, nargs="+", default=list(LEAVES))
    add_outputs(parser)
    arguments = parser.parse_args()
    use_host_cpu()
    rows = [x for name in arguments.leaves for x in rows_of(name, arguments.platforms)]
    is_timed = "cpu" in arguments.platforms
    meshes = [each for each in arguments.platforms if each != "cpu"]
    tables = {
        "Inside jit": rows,
        "Outside jit": eager_rows() if is_timed else [],
        "Eight devices": collective_rows(meshes) if meshes else [],
    }
    publish(versions(), tables, arguments)


if __name__ == "__main__":
    main()
