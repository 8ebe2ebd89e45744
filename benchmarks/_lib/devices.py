"""Devices that JAX can compile for on a machine that has no TPU and no GPU."""

import os
from typing import Any

import jax
from jax.experimental import topologies

DEVICE_NAMES = {"cpu": "CPU", "tpu": "TPU v5e", "cuda": "H200", "v100": "V100"}

# A GPU is described to XLA as a `GpuTargetConfigProto` in text form.
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


def use_host_cpu() -> None:
    """Runs JAX on this machine's CPU, and lets libtpu compile for a TPU v5e.

    Call it at the start of `main`. JAX and libtpu read these settings once, when JAX
    uses its first device, so a later call has no effect.
    """
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
    )


def device_of(platform: str) -> Any:
    """Returns a device to compile for; `platform` is a key of `DEVICE_NAMES`."""
    if platform == "cpu":
        return jax.devices()[0]
    if platform == "tpu":
        topology = topologies.get_topology_desc("v5e:2x2", "tpu")
    else:
        topology = topologies.get_topology_desc(
            "1x1x1", "cuda", topology="1x1x1", target_config=GPU_TARGETS[platform]
        )
    return topology.devices[0]
