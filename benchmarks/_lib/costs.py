"""The cost of one compiled step."""

import collections
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from _lib.compiled_text import bytes_and_kernels, products_of


class Cost(NamedTuple):
    """The cost of a compiled step.

    Attributes:
      moved: Bytes that the step reads from memory and writes to it.
      kernels: Number of kernels, counted as often as they run.
      temporaries: Bytes of temporary arrays.
      memory: Bytes of arguments, results and temporary arrays together. A result that
        takes the place of a donated argument is not counted again.
      trace_s: Seconds to trace.
      compile_s: Seconds to compile.
      products: Number of products by the dtypes of their operands.
    """

    moved: int
    kernels: int
    temporaries: int
    memory: int
    trace_s: float
    compile_s: float
    products: collections.Counter[str]


def compile_step(
    step: Callable[..., Any], args: tuple[Any, ...], device: Any
) -> tuple[Any, Cost]:
    """Compiles a step with parameters and state, its first two arguments, donated."""
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    start = time.perf_counter()
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*args)
    trace_s = time.perf_counter() - start
    lowered = traced.lower()
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - start
    program = compiled.as_text()
    moved, kernels = bytes_and_kernels(program)
    if device.platform == "cpu":
        moved = int(compiled.cost_analysis()["bytes accessed"])
    sizes = compiled.memory_analysis()
    temporaries = sizes.temp_size_in_bytes
    memory = temporaries + sizes.argument_size_in_bytes
    memory += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    products = products_of(program)
    return compiled, Cost(
        moved, kernels, temporaries, memory, trace_s, compile_s, products
    )
