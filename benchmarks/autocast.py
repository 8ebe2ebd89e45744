"""Shows what autocast does to operations, models and GPU programs, in three tables.

    python benchmarks/autocast.py [--quick] [--json FILE]

The table of GPU programs needs NVIDIA's compiler (`pip install 'jax[cuda12]'`) but no
GPU. `--quick` leaves this table out.
"""

import argparse
import contextlib
import io
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import SingleDeviceSharding

import optax_lossscale as ols
from _lib.compiled_text import bytes_and_kernels, products_of
from _lib.devices import DEVICE_NAMES, device_of, use_host_cpu
from _lib.models import MODELS, Case, Encoder
from _lib.tables import print_tables, versions
from _lib.torch_operations import OPERATIONS
from optax_lossscale._checks import check_output_file
from optax_lossscale._jaxprs import equations_of

LOSS_SCALE = 2.0**10
PRODUCTS = ("dot_general", "conv_general_dilated")
SIZE = (8, 128, 256)  # Batch, length and width of the transformer that is compiled.


def activation_bytes(loss_fn: Any, params: Any, batch: tuple[Any, ...]) -> int:
    """Returns how many more bytes the forward pass saves if the batch is doubled.

    Parameters and their copies do not grow with the batch, so they do not count.
    """
    twice = [jnp.concatenate([x, x]) if isinstance(x, jax.Array) else x for x in batch]
    return saved_bytes(loss_fn, params, *twice) - saved_bytes(loss_fn, params, *batch)


def saved_bytes(loss_fn: Any, *args: Any) -> int:
    """Returns the bytes that the forward pass saves, apart from its arguments."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_saved_residuals(loss_fn, *args)
    total = 0
    for line in printed.getvalue().splitlines():
        if "from the argument" not in line:
            bits, dims = re.match(r"[a-z]*(\d*)\[([\d,]*)", line).groups()
            size = math.prod(int(size) for size in dims.split(",") if size)
            total += size * int(bits or 8) // 8
    return total


def dtype_under_autocast(function: Callable[[Any, Any], Any]) -> str:
    """Returns the dtype of a function's result, before autocast restores float32.

    The function takes a float16 product and a float32 array.
    """
    half, wide = jnp.full((4, 4), 0.5), jnp.full((4, 4), 0.25)

    def fun(half: Any, wide: Any) -> Any:
        return function(half @ half, wide)

    program = jax.make_jaxpr(ols.autocast(fun))(half, wide).jaxpr
    equations = {v: equation for equation in program.eqns for v in equation.outvars}
    last = equations[program.outvars[0]]
    is_cast = last.primitive.name == "convert_element_type"
    return (last.invars if is_cast else last.outvars)[0].aval.dtype.name


def operation_rows() -> list[dict[str, str]]:
    """Returns a row for each operation of PyTorch's lists."""
    rows = []
    for name, (torch_dtype, function, why) in OPERATIONS.items():
        dtype = dtype_under_autocast(function)
        remark = "" if dtype == torch_dtype else why
        row = {"operation": name, "torch": torch_dtype, "here": dtype, "why": remark}
        rows.append(row)
    return rows


def product_dtypes(function: Any, *args: Any) -> list[set[str]]:
    """Returns the dtypes of the operands of each product that a function computes."""
    return [
        {atom.aval.dtype.name for atom in equation.invars}
        for equation in equations_of(jax.make_jaxpr(function)(*args))
        if equation.primitive.name in PRODUCTS
    ]


def model_row(name: str, case: Case) -> dict[str, str]:
    """Returns the row of a model: its products, gradient error and activations."""
    loss_fn, params, batch = case
    cast = ols.autocast(loss_fn)

    def scaled(*args: Any) -> jax.Array:
        return cast(*args) * LOSS_SCALE

    found = product_dtypes(jax.grad(scaled), params, *batch)
    exact = jax.jit(jax.grad(loss_fn))(params, *batch)
    grads = jax.jit(jax.grad(scaled))(params, *batch)
    error = optax.tree.norm(
        optax.tree.sub(optax.tree.scale(1 / LOSS_SCALE, grads), exact)
    )
    exact_bytes = activation_bytes(loss_fn, params, batch)
    saved = activation_bytes(cast, params, batch) / exact_bytes
    return {
        "model": name,
        "products": str(len(found)),
        "in float16": str(found.count({"float16"})),
        "gradient error": f"{float(error / optax.tree.norm(exact)):.2%}",
        "activations": f"{saved:.2f}",
    }


def transformer(dtype: Any, x: jax.ShapeDtypeStruct) -> tuple[Any, Any]:
    """Returns the loss function and the parameter shapes of a transformer."""
    model = Encoder(width=SIZE[-1], depth=4, dtype=dtype)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss_fn(params: Any, x: Any) -> jax.Array:
        return jnp.mean((model.apply(params, x).astype(jnp.float32) - 1) ** 2)

    return loss_fn, params


def ways_to_train(x: jax.ShapeDtypeStruct) -> dict[str, tuple[Any, Any]]:
    """Returns loss function and parameter shapes for each way to train."""
    (loss_fn, params), (by_hand, _) = transformer(None, x), transformer(jnp.float16, x)
    half = jax.eval_shape(ols.cast_params, params)
    return {
        "float32": (loss_fn, params),
        "float16 by hand": (by_hand, params),
        "autocast": (ols.autocast(loss_fn), params),
        "autocast, O2": (ols.autocast(loss_fn, level="O2"), params),
        "autocast, O2, cast_params": (ols.autocast(loss_fn, level="O2"), half),
    }


def compile_for(gpu: str, function: Any, args: Any) -> Any:
    """Compiles a function of arguments of these shapes and dtypes for a GPU."""
    sharding = SingleDeviceSharding(device_of(gpu))
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    return jax.jit(function).lower(*args).compile()


def gpu_rows(gpu: str) -> list[dict[str, str]]:
    """Returns a row for each way to train a transformer, compiled for a GPU."""
    x = jax.ShapeDtypeStruct(SIZE, jnp.float32)
    temporaries: dict[str, int] = {}
    rows = []
    for way, (loss_fn, params) in ways_to_train(x).items():
        compiled = compile_for(gpu, jax.value_and_grad(loss_fn), (params, x))
        program = compiled.as_text()
        temporaries[way] = compiled.memory_analysis().temp_size_in_bytes
        products = products_of(program)
        entry = program[program.index("\nENTRY") :]
        rows.append(
            {
                "way": way,
                "compiled for": DEVICE_NAMES[gpu],
                "products": str(sum(products.values())),
                "of float16": str(products["f16"]),
                "kernels": str(bytes_and_kernels(program)[1]),
                "casts alone": str(entry.count("calls=%wrapped_convert")),
                "temporary MB": f"{temporaries[way] / 1e6:.1f}",
                "/ float32": f"{temporaries[way] / temporaries['float32']:.2f}",
            }
        )
    return rows


def main() -> None:
    """Prints the tables, and writes them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=check_output_file, help="write the tables to a file"
    )
    parser.add_argument("--quick", action="store_true", help="compile for no GPU")
    arguments = parser.parse_args()
    use_host_cpu()
    gpus = [] if arguments.quick else ["v100", "cuda"]
    tables = {
        "Models": [model_row(name, make()) for name, make in MODELS.items()],
        "Compiled": [row for gpu in gpus for row in gpu_rows(gpu)],
        "Operations": operation_rows(),
    }
    print_tables(f"{versions()}; loss scale {LOSS_SCALE:g}", tables, arguments.json)


if __name__ == "__main__":
    main()
