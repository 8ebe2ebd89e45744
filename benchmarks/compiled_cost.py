"""What loss scaling adds to the compiled step, for CPU, TPU and GPU: one table.

    python benchmarks/compiled_cost.py [--platforms cpu tpu cuda] [--json FILE]

It needs neither TPU nor GPU, only their compilers: `pip install libtpu 'jax[cuda12]'`.
Nothing is run: bytes, kernels and temporary memory are those of the compiled program.
The limit is the bare optimizer's bytes and one more read of the gradients.
"""

import argparse
import json
import math
import os
import pathlib
import re
import time
from typing import Any, NamedTuple

# Set before JAX is imported: the host's own device is a CPU, and the TPU is a v5e.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
)

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tables import print_table, versions
from updates import OPTIMIZERS, WAYS, shape_of

# GPUs as `GpuTargetConfigProto`.
CUDA = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048  core_count: {cores}  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {cache}  clock_rate_ghz: {clock}
  device_memory_size: {memory}  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
H200 = CUDA.format(
    shared=233472,
    cores=132,
    fpus=128,
    bandwidth=4800000000000,
    cache=52428800,
    clock=1.98,
    memory=151397597184,
    optin=232448,
    major=9,
    name="NVIDIA H200 141GB HBM3e",
)
V100 = CUDA.format(
    shared=98304,
    cores=80,
    fpus=64,
    bandwidth=898048000000,
    cache=6291456,
    clock=1.53,
    memory=16935682048,
    optin=98304,
    major=7,
    name="Tesla V100-SXM2-16GB",
)
PLATFORMS = {"cpu": "CPU", "tpu": "TPU v5e", "cuda": "H200"}
NAMES = {**PLATFORMS, "v100": "V100"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done"}
BITS = {"pred": 8, "bf16": 16}
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")


class Cost(NamedTuple):
    """Bytes to and from memory, kernels, bytes of temporaries, seconds to compile."""

    moved: int
    kernels: int
    temporaries: int
    compile_s: float


def bytes_of(types: str) -> int:
    """Bytes of the arrays in a type, but for those on a TPU's own chip, `S(1)`."""
    total = 0
    for name, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", types):
        bits = BITS.get(name) or int(re.sub(r"\D", "", name) or 0)
        if "S(" not in layout:
            total += (
                math.prod(int(size) for size in dims.split(",") if size) * bits // 8
            )
    return total


def count(program: str) -> tuple[int, int]:
    """Bytes and kernels of the entry computation: what each operation reads and writes.

    An operation reads each of its operands once, and writes its result. Only what is in
    main memory counts; parameters, tuples and the like are free.
    """
    entry = program[program.index("\nENTRY") :]
    types: dict[str, str] = {}
    moved = kernels = 0
    for line in entry[: entry.index("\n}")].splitlines():
        match = INSTRUCTION.match(line)
        if not match:
            continue
        name, result, operation, rest = match.groups()
        types[name] = result
        if operation in FREE:
            continue
        kernels += 1
        operands = set(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
        moved += sum(bytes_of(types[operand]) for operand in operands)
        # The result of `copy-start` holds its operand once more.
        written = result if operation != "copy-start" else result.split("}, ")[0] + "}"
        moved += bytes_of(written)
    return moved, kernels


def device_of(platform: str) -> Any:
    """A device to compile for."""
    if platform == "cpu":
        return jax.devices()[0]
    if platform == "tpu":
        topology = topologies.get_topology_desc("v5e:2x2", "tpu")
    else:
        topology = topologies.get_topology_desc(
            "1x1x1",
            "cuda",
            topology="1x1x1",
            target_config=V100 if platform == "v100" else H200,
        )
    return topology.devices[0]


def cost(
    platform: str, way: str, optimizer: str, dtype: Any, leaves: int, size: int
) -> Cost:
    """Compiles one step, parameters and state donated."""
    sharding = SingleDeviceSharding(device_of(platform))

    def on_device(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    init, step = WAYS[way](OPTIMIZERS[optimizer])
    params = [jax.ShapeDtypeStruct(shape_of(size), jnp.float32)] * leaves
    grads = [jax.ShapeDtypeStruct(shape_of(size), dtype)] * leaves
    args = on_device((params, jax.eval_shape(init, params), grads))
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    moved, kernels = count(compiled.as_text())
    if platform == "cpu":
        moved = int(compiled.cost_analysis()["bytes accessed"])
    return Cost(moved, kernels, compiled.memory_analysis().temp_size_in_bytes, seconds)


def rows_of(
    platform: str, optimizer: str, dtype: Any, leaves: int, size: int, ways: list[str]
) -> list[dict[str, str]]:
    """A row for every way, beside the bare optimizer."""
    case = (optimizer, dtype, leaves, size)
    cost(
        platform, "bare optimizer", "adamw", jnp.float32, 1, 100
    )  # Starts the compiler.
    bare = cost(platform, "bare optimizer", *case)
    limit = bare.moved + leaves * size * jnp.dtype(dtype).itemsize
    rows = []
    for way in ways:
        own = bare if way == "bare optimizer" else cost(platform, way, *case)
        temporaries = own.temporaries - bare.temporaries
        rows.append(
            {
                "way": way,
                "compiled for": NAMES[platform],
                "optimizer": optimizer,
                "gradients": jnp.dtype(dtype).name,
                "leaves": f"{leaves} x {size}",
                "MB": f"{own.moved / 1e6:.1f}",
                "/ limit": f"{own.moved / limit:.3f}",
                "kernels more": str(own.kernels - bare.kernels),
                "temporary MB more": f"{temporaries / 1e6:.1f}",
                "compile time": f"{own.compile_s / bare.compile_s:.2f}",
            }
        )
    return rows


def main() -> None:
    """Prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--platforms", nargs="+", choices=PLATFORMS, default=list(PLATFORMS)
    )
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="AdamW, 60 leaves, alone")
    args = parser.parse_args()
    ours = ["optax_lossscale"]
    rows = []
    for platform in args.platforms:
        rows += rows_of(platform, "adamw", jnp.float16, 60, 100_000, list(WAYS))
        if args.quick:
            continue
        for name in list(OPTIMIZERS)[1:]:
            rows += rows_of(platform, name, jnp.float16, 60, 100_000, ours)
        for dtype in (jnp.bfloat16, jnp.float32):
            rows += rows_of(platform, "adamw", dtype, 60, 100_000, ours)
        for leaves, size in [(1, 10_000), (1, 6_000_000), (1000, 100_000)]:
            rows += rows_of(platform, "adamw", jnp.float16, leaves, size, ours)
    print(
        f"{versions()}; limit: the bare optimizer and one more read of the gradients\n"
    )
    print_table(rows)
    if args.json:
        args.json.write_text(
            json.dumps({"versions": versions(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
