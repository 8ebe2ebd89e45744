"""Compiled programs: their collective operations, and how to run those for a GPU."""

import collections
import re
import warnings

import jax

from _lib.costs import compile_step
from _lib.steps import make_step

COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def collectives_of(compiled):
    """Result types and kind of each collective operation."""
    found = re.findall(
        rf"= (\S+|\(.*?\)) ((?:{COLLECTIVES})(?:-start)?)\(", compiled.as_text()
    )
    return [(re.findall(r"\w+\[.*?\]", result), kind) for result, kind in found]


def arrays_sent(compiled):
    """How often each type of array is the result of a collective."""
    arrays = [array for arrays, _ in collectives_of(compiled) for array in arrays]
    return collections.Counter(array.partition("{")[0] for array in arrays)


def run_on_cpu(compiled, *args):
    """What a program compiled for a GPU computes, run on the CPU; a list of arrays.

    The program must hold no call of a library. Each of its kernels becomes a call of a
    function, and XLA for CPU leaves out no cast.
    """
    from jax._src.lib import _jax, xla_client  # JAX has no public name for them.

    text = re.sub(r", (metadata|backend_config)=\{.*", "", compiled.as_text())
    text = re.sub(r", sharding=\{[^}]*\}", "", text)
    # To another dtype of the same shape.
    text = text.replace(" bitcast(", " bitcast-convert(")
    text = re.sub(r"fusion\((.*?)\), kind=\w+, calls=", r"call(\1), to_apply=", text)
    module = xla_client.hlo.hlo_module_from_text(text)
    program = _jax.mlir.xla_computation_to_mlir_module(
        xla_client.hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    )
    device = jax.devices("cpu")[0]
    devices, options = xla_client.DeviceList((device,)), xla_client.CompileOptions()
    executable = device.client.compile_and_load(program, devices, options)
    arrays = [jax.device_put(arg, device) for arg in jax.tree.leaves(args)]
    results = executable.execute_sharded(arrays)
    return [part for (part,) in results.disassemble_into_single_device_arrays()]


def compiled_step(model, way, scaler, device=None):
    """A whole step of `benchmarks/_lib/steps.py`, and the bytes of its gradients."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(action="ignore"),  # Flax renames its attention.
    ):
        step = make_step(model, way, "adamw", scaler)
        device = device or jax.devices("cpu")[0]
        compiled, _ = compile_step(step.run, step.args, device)
    return compiled, step.grad_bytes
