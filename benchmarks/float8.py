"""Shows what autocast to float8 computes, what it costs, and how far it is off.

    python benchmarks/float8.py [--quick] [--json FILE]

The script needs no GPU, only NVIDIA's compiler: `pip install 'jax[cuda12]'`. The first
two tables are of programs compiled for H200 GPUs with CUDA 12.9. The third is computed
on the CPU, with the numbers that a GPU has in float8. `--quick` makes only the third,
with a smaller model and in fewer precisions.
"""

import argparse
import pydoc_data.topics
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import optax_lossscale as ols
from _lib.compiled_text import sent_arrays
from _lib.costs import Cost, compile_step
from _lib.devices import device_of, devices_of, use_host_cpu
from _lib.large_models import MODELS
from _lib.models import MODELS as SMALL_MODELS
from _lib.models import Decoder, next_token_loss
from _lib.steps import WAYS as STEP_WAYS
from _lib.steps import make_step
from _lib.tables import print_tables, versions
from collectives import compile_gradient, describe, make_case, mesh_of, purpose_of
from optax_lossscale._autocast.float8 import OF_VALUES
from optax_lossscale._checks import check_output_file
from optax_lossscale._jaxprs import equations_of

WAYS = ["autocast, bfloat16", "autocast, float8"]
# How XLA computes products: with Triton's kernels or by calls of cuBLASLt.
BACKENDS = {"Triton": None, "cuBLASLt": {"xla_gpu_enable_triton_gemm": False}}
FLAX = "Flax's Fp8DirectDotGeneralOp"
LOSS_SCALE = 2.0**15
SEEN_BATCHES = 16  # Before Flax's scales, which look back, are compared.


def compiled_rows() -> list[dict[str, str]]:
    """Returns a row for each model and backend: bfloat16, and then float8."""
    rows = []
    for model in [*SMALL_MODELS, *MODELS]:
        traced = traced_products(model)
        for backend, options in BACKENDS.items():
            print(f"{model}, {backend} ...", file=sys.stderr)
            low, narrow = (cost_of(model, way, options) for way in WAYS)
            count = sum(n for dtype, n in narrow.products.items() if "f8" in dtype)
            rows.append(
                {
                    "model": model,
                    "traced in float8": traced,
                    "products by": backend,
                    "products": str(low.products.total()),
                    "in float8": str(count),
                    "others": str(narrow.products.total() - count),
                    "kernels": f"{low.kernels}, {narrow.kernels}",
                    "MB": in_megabytes(low.moved, narrow.moved),
                    "temporary MB": in_megabytes(low.temporaries, narrow.temporaries),
                }
            )
    return rows


def in_megabytes(*sizes: int) -> str:
    """Lists sizes in bytes, such as `7591, 7831`."""
    return ", ".join(f"{size / 1e6:.{0 if size > 1e8 else 2}f}" for size in sizes)


def step_of(model: str, way: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a step and its arguments: with AdamW, of small models the gradient."""
    if model in MODELS:
        run, args, _ = make_step(model, way, "adamw", "none")
        return run, args
    loss_fn, params, batch = SMALL_MODELS[model]()
    loss_fn = ols.autocast(loss_fn, STEP_WAYS[way].low_dtype)

    def gradient(params: Any, _: Any, *batch: Any) -> Any:
        return jax.value_and_grad(loss_fn)(params, *batch)

    return gradient, (params, (), *batch)


def traced_products(model: str) -> str:
    """Counts products in float8 in the forward and in the backward pass, as traced."""
    step, args = step_of(model, WAYS[1])
    forward = backward = 0
    for equation in equations_of(jax.make_jaxpr(step)(*args)):
        product = equation.params.get("product")
        factors = None if product is None else product.float8
        forward += factors == OF_VALUES
        backward += factors not in (None, OF_VALUES)
    return f"{forward} + {backward}"


def cost_of(model: str, way: str, options: dict[str, Any] | None) -> Cost:
    """Returns the cost of a step, compiled for an H200."""
    step, args = step_of(model, way)
    return compile_step(step, args, device_of("cuda"), options)[1]


def sent_rows() -> list[dict[str, str]]:
    """Returns what crosses eight devices that split the parameters of a GPT."""
    mesh = mesh_of("fully sharded", devices_of("cuda", 8), AxisType.Auto)
    rows = []
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        case = make_case("fully sharded", mesh, autocast_to(dtype))
        arrays = list(sent_arrays(compile_gradient(case, mesh)))
        row = {"autocast to": jnp.dtype(dtype).name}
        for purpose in ("gradients", "parameters", "activations"):
            sent = [array for array in arrays if purpose_of(array) == purpose]
            row[f"{purpose}, MB"] = describe(sent)
        numbers = [array.elements for array in arrays if purpose_of(array) == "numbers"]
        row["single numbers"] = str(sum(numbers))
        rows.append(row)
    return rows


def autocast_to(dtype: Any) -> Callable[..., Any]:
    """Returns a function that makes the loss of a model under autocast."""
    return lambda loss_of: ols.autocast(loss_of(None), dtype)


def error_rows(*, is_quick: bool) -> list[dict[str, str]]:
    """Returns the errors of the gradients of each layer of a GPT, in each precision.

    The model has been trained a little in float32, on the texts of Python's `help()`.
    An error is the norm of the difference from the gradient in float32, divided by the
    norm of the latter.
    """
    steps, depth = (2, 1) if is_quick else (200, 3)
    model = Decoder(vocabulary=256, length=64, width=128, depth=depth)
    batches = batches_of_text(steps + SEEN_BATCHES, model.length)
    params = trained(model, batches[:steps])
    loss_fn, batch = next_token_loss(model), batches[-1]
    exact = by_layer(jax.jit(jax.grad(loss_fn))(params, batch))
    errors = {
        name: errors_of(by_layer(grads), exact)
        for name, grads in gradients(
            model, params, batches[-SEEN_BATCHES:], is_quick=is_quick
        ).items()
    }
    return [
        {"layer": layer} | {name: f"{own[layer]:.2%}" for name, own in errors.items()}
        for layer in exact
    ]


def gradients(
    model: Decoder, params: Any, batches: Any, *, is_quick: bool
) -> dict[str, Any]:
    """Returns the gradients of the last batch, in each precision."""
    loss_fn, batch = next_token_loss(model), batches[-1]

    first, last = "Decoder/Encoder_0/Dense_0/", "Decoder/Embed_0.attend/"

    def to_float8(*high: str) -> Callable[..., jax.Array]:
        inner = ols.autocast(loss_fn, jnp.float8_e4m3fn, high=high)
        return ols.autocast(inner, jnp.bfloat16)  # What the inner one left in float32.

    ways = {
        "bfloat16": ols.autocast(loss_fn, jnp.bfloat16),
        "float16": ols.autocast(loss_fn),
        "float8": to_float8(),
        "last layer in bfloat16": to_float8(last),
        "first and last in bfloat16": to_float8(first, last),
    }
    if is_quick:
        del ways["float16"], ways["first and last in bfloat16"]

    def gradient(loss_fn: Callable[..., jax.Array]) -> Any:
        scaled = jax.jit(jax.grad(lambda *args: loss_fn(*args) * LOSS_SCALE))
        return jax.tree.map(lambda g: g / LOSS_SCALE, scaled(params, batch))

    found = {name: gradient(function) for name, function in ways.items()}
    return found | {FLAX: gradients_of_flax(model, params, batches)}


@jax.numpy_dtype_promotion("standard")
def gradients_of_flax(model: Decoder, params: Any, batches: Any) -> Any:
    """Returns the gradients with Flax's float8 operation in all layers but the last.

    Its scales come from earlier batches, so it sees all batches, with the same
    parameters.
    """
    model = model.clone(dtype=jnp.bfloat16, float8=nn.Fp8DirectDotGeneralOp)
    variables = model.init(jax.random.key(0), batches[0])
    scales = variables["_overwrite_with_gradient"]

    def loss_fn(params: Any, scales: Any, batch: jax.Array) -> jax.Array:
        variables = params | {"_overwrite_with_gradient": scales}
        return next_token_loss(model)(variables, batch)

    grad = jax.jit(jax.grad(loss_fn, argnums=(0, 1)))
    for batch in batches:
        grads, scales = grad(params, scales, batch)
    return grads


@jax.numpy_dtype_promotion("standard")
def trained(model: Decoder, batches: Any) -> Any:
    """Returns the parameters after a step in float32 for each batch."""
    params = model.init(jax.random.key(0), batches[0])
    tx = optax.adamw(1e-3)
    loss_fn = next_token_loss(model)

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return params


def batches_of_text(count: int, length: int) -> np.ndarray:
    """Returns random pieces of text as bytes, `i32[count, 16, length]`."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(data) - length, (count, 16, 1))
    return data[starts + np.arange(length)]


def by_layer(grads: Any) -> dict[str, np.ndarray]:
    """Returns the gradients of the weights of each layer in one vector, and of all."""
    layers: dict[str, list[np.ndarray]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        names = [entry.key for entry in path]
        if names[-1] in ("kernel", "embedding"):  # Not those of normalization layers.
            layer = next(name for name in names if name[-1].isdigit() and "_" in name)
            layer = names[2] if layer == "Encoder_0" else layer
            layers.setdefault(layer, []).append(np.ravel(leaf))
    layers["all"] = [part for parts in layers.values() for part in parts]
    return {layer: np.concatenate(parts) for layer, parts in layers.items()}


def errors_of(
    grads: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> dict[str, float]:
    """Returns the relative error of each layer, and of all together."""
    return {
        layer: float(np.linalg.norm(grads[layer] - g) / np.linalg.norm(g))
        for layer, g in exact.items()
    }


def main() -> None:
    """Prints the tables, and writes them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=check_output_file, help="write the tables to a file"
    )
    parser.add_argument(
        "--quick", action="store_true", help="make only the errors, of a small model"
    )
    arguments = parser.parse_args()
    use_host_cpu()
    quick = arguments.quick
    tables = {
        "Compiled for an H200": [] if quick else compiled_rows(),
        "Sent between eight H200": [] if quick else sent_rows(),
        "Error of the gradients": error_rows(is_quick=quick),
    }
    print_tables(versions(), tables, arguments.json)


if __name__ == "__main__":
    main()
