"""Devices that JAX can compile for on a machine that has no TPU and no GPU."""

import argparse
import os
from typing import Any

import jax
from jax.experimental import topologies

DEVICE_NAMES = {"cpu": "CPU", "tpu": "TPU v5e", "cuda": "H200", "v100": "V100"}

# A GPU is described to XLA as a `GpuTargetConfigProto` in text form. It names the
# version of CUDA; without one, XLA does not use what depends on the version.
GPU_TARGET = """
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
runtime_version {{ major: 12 minor: 9 patch: 0 }}
"""
GPU_TARGETS = {
    "cuda": GPU_TARGET.format(
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
    ),
    "v100": GPU_TARGET.format(
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
    ),
}


TPU_SLICES = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 64: "8x8"}


def add_platforms(parser: argparse.ArgumentParser) -> None:
    """Adds an option that says for which platforms a script compiles."""
    platforms = ["cpu", "tpu", "cuda"]
    parser.add_argument(
        "--platforms",
        nargs="+",
        choices=platforms,
        default=platforms,
        help="compile for these platforms (default: all)",
    )


def use_host_cpu() -> None:
    """Runs JAX on this machine's CPU.

    Call it at the start of `main`. JAX reads this setting once, when it uses its first
    device, so a later call has no effect.
    """
    jax.config.update("jax_platforms", "cpu")


def devices_of(platform: str, count: int) -> list[Any]:
    """Returns devices to compile for; `platform` is a key of `DEVICE_NAMES`.

    Of TPUs it returns 1, 4, 8, 16 or 64 chips of one slice, of GPUs any number in one
    machine. Of CPU devices JAX has one, unless `jax_num_cpu_devices` says otherwise.
    """
    if platform == "cpu":
        devices = jax.devices("cpu")
    elif platform == "tpu":
        # libtpu looks for a TPU unless these settings say what it compiles for.
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1",
            TPU_ACCELERATOR_TYPE="v5litepod-4",
            TPU_WORKER_HOSTNAMES="localhost",
        )
        name = f"v5e:{TPU_SLICES[count]}"
        devices = topologies.get_topology_desc(name, "tpu").devices
    else:
        name = f"1x1x{count}"  # Slices, machines of a slice, GPUs of a machine.
        devices = topologies.get_topology_desc(
            name, "cuda", topology=name, target_config=GPU_TARGETS[platform]
        ).devices
    if len(devices) < count:
        raise ValueError(f"JAX has {len(devices)} {platform} devices, not {count}.")
    return list(devices[:count])


def device_of(platform: str) -> Any:
    """Returns a device to compile for; `platform` is a key of `DEVICE_NAMES`."""
    return devices_of(platform, 1)[0]
