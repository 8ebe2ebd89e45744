"""Compares what loss scaling adds to a step compiled for CPU, TPU and GPU: one table.

    python benchmarks/compiled_cost.py [--platforms cpu tpu cuda] [--record]

The script needs no TPU and no GPU, only their compilers: `pip install libtpu
'jax[cuda12]'`. It runs nothing: bytes, kernels and temporary memory are those of the
compiled program. The limit is the bytes that the bare optimizer moves, plus one more
read of the gradients.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from _lib.costs import Cost, compile_step
from _lib.devices import DEVICE_NAMES, add_platforms, device_of, use_host_cpu
from _lib.tables import add_outputs, publish, versions
from _lib.updates import OPTIMIZERS, WAYS, shape_of


def cost(
    platform: str, way: str, optimizer: str, dtype: Any, leaves: int, size: int
) -> Cost:
    """Compiles one step with parameters and state donated, and returns its cost."""
    init, step = WAYS[way](OPTIMIZERS[optimizer])
    params = [jax.ShapeDtypeStruct(shape_of(size), jnp.float32)] * leaves
    grads = [jax.ShapeDtypeStruct(shape_of(size), dtype)] * leaves
    args = (params, jax.eval_shape(init, params), grads)
    return compile_step(step, args, device_of(platform))[1]


def rows_of(
    platform: str, optimizer: str, dtype: Any, leaves: int, size: int, ways: list[str]
) -> list[dict[str, str]]:
    """Returns a row for each way, compared with the bare optimizer."""
    case = (optimizer, dtype, leaves, size)
    # The first compilation also starts the compiler, so its time is not used.
    cost(platform, "bare optimizer", "adamw", jnp.float32, 1, 100)
    bare = cost(platform, "bare optimizer", *case)
    limit = bare.moved + leaves * size * jnp.dtype(dtype).itemsize
    rows = []
    for way in ways:
        own = bare if way == "bare optimizer" else cost(platform, way, *case)
        temporaries = own.temporaries - bare.temporaries
        rows.append(
            {
                "way": way,
                "compiled for": DEVICE_NAMES[platform],
                "optimizer": optimizer,
                "gradients": jnp.dtype(dtype).name,
                "leaves": f"{leaves} x {size}",
                "MB": f"{own.moved / 1e6:.1f}",
                "/ limit": f"{own.moved / limit:.3f}",
                "kernels more": str(own.kernels - bare.kernels),
                "temporary MB more": f"{temporaries / 1e6:.1f}",
            }
        )
    return rows


def platform_rows(platform: str, quick: bool) -> list[dict[str, str]]:
    """Returns all rows of a platform, or only AdamW's with 60 leaves if `quick`."""
    rows = rows_of(platform, "adamw", jnp.float16, 60, 100_000, list(WAYS))
    if quick:
        return rows
    ours = ["optax_lossscale"]
    for name in list(OPTIMIZERS)[1:]:
        rows += rows_of(platform, name, jnp.float16, 60, 100_000, ours)
    for dtype in (jnp.bfloat16, jnp.float32):
        rows += rows_of(platform, "adamw", dtype, 60, 100_000, ours)
    for leaves, size in [(1, 10_000), (1, 6_000_000), (1000, 100_000)]:
        rows += rows_of(platform, "adamw", jnp.float16, leaves, size, ours)
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_platforms(parser)
    add_outputs(parser)
    parser.add_argument(
        "--quick", action="store_true", help="compile only AdamW with 60 leaves"
    )
    arguments = parser.parse_args()
    use_host_cpu()
    rows = []
    for platform in arguments.platforms:
        rows += platform_rows(platform, arguments.quick)
    title = (
        f"{versions()}; limit: the bare optimizer and one more read of the gradients"
    )
    publish(title, {"The update": rows}, arguments)


if __name__ == "__main__":
    main()
