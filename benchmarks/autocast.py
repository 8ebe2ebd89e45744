"""What autocast does: by operation, on models, and compiled for GPUs. Three tables.

    python benchmarks/autocast.py [--quick] [--json FILE]

The second needs NVIDIA's compiler, `pip install 'jax[cuda12]'`, but no GPU; `--quick`
leaves it out.
"""

import argparse
import collections
import contextlib
import io
import json
import math
import pathlib
import re
from typing import Any

import compiled_cost  # First: it says what JAX runs on.
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import SingleDeviceSharding
from tables import print_table, versions
from torch_operations import OPERATIONS
from zoo import MODELS, Encoder

import optax_lossscale as ols
from optax_lossscale._jaxprs import equations_of

LOSS_SCALE = 2.0**10
PRODUCTS = ("dot_general", "conv_general_dilated")
SIZE = (8, 128, 256)  # Of the transformer that is compiled: batch, length, width.


def activation_bytes(loss_fn: Any, params: Any, batch: tuple[Any, ...]) -> int:
    """Bytes that one more batch adds to what is saved: no copies of parameters."""
    twice = [jnp.concatenate([x, x]) if isinstance(x, jax.Array) else x for x in batch]
    return saved_bytes(loss_fn, params, *twice) - saved_bytes(loss_fn, params, *batch)


def saved_bytes(loss_fn: Any, *args: Any) -> int:
    """Bytes that the forward pass saves for the backward one, arguments left out."""
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


def operation_rows() -> list[dict[str, str]]:
    """A row for each operation of PyTorch's lists."""
    half, wide = jnp.full((4, 4), 0.5), jnp.full((4, 4), 0.25)
    rows = []
    for name, (torch_dtype, function, why) in OPERATIONS.items():

        def fun(half: Any, wide: Any, function: Any = function) -> Any:
            return function(half @ half, wide)

        program = jax.make_jaxpr(ols.autocast(fun))(half, wide).jaxpr
        last = {v: e for e in program.eqns for v in e.outvars}[program.outvars[0]]
        is_cast = last.primitive.name == "convert_element_type"
        dtype = (last.invars if is_cast else last.outvars)[0].aval.dtype.name
        remark = "" if dtype == torch_dtype else why
        row = {"operation": name, "torch": torch_dtype, "here": dtype, "why": remark}
        rows.append(row)
    return rows


def model_rows() -> list[dict[str, str]]:
    """A row for each model: its products, its gradients, what it saves."""
    rows = []
    for name, make in MODELS.items():
        loss_fn, params, batch = make()
        cast = ols.autocast(loss_fn)

        def scaled(*args: Any, cast: Any = cast) -> jax.Array:
            return cast(*args) * LOSS_SCALE

        found = [
            {atom.aval.dtype.name for atom in equation.invars}
            for equation in equations_of(
                jax.make_jaxpr(jax.grad(scaled))(params, *batch)
            )
            if equation.primitive.name in PRODUCTS
        ]
        exact = jax.jit(jax.grad(loss_fn))(params, *batch)
        grads = jax.jit(jax.grad(scaled))(params, *batch)
        error = optax.tree.norm(
            optax.tree.sub(optax.tree.scale(1 / LOSS_SCALE, grads), exact)
        )
        exact_bytes = activation_bytes(loss_fn, params, batch)
        saved = activation_bytes(cast, params, batch) / exact_bytes
        rows.append(
            {
                "model": name,
                "products": str(len(found)),
                "in float16": str(found.count({"float16"})),
                "gradient error": f"{float(error / optax.tree.norm(exact)):.2%}",
                "activations": f"{saved:.2f}",
            }
        )
    return rows


def compiled_rows() -> list[dict[str, str]]:
    """A row for each way to train a transformer, compiled for each GPU."""
    x = jax.ShapeDtypeStruct(SIZE, jnp.float32)

    def case(dtype: Any) -> Any:
        model = Encoder(width=SIZE[-1], depth=4, dtype=dtype)
        params = jax.eval_shape(model.init, jax.random.key(0), x)

        def loss_fn(params: Any, x: Any) -> jax.Array:
            return jnp.mean((model.apply(params, x).astype(jnp.float32) - 1) ** 2)

        return loss_fn, params

    (loss_fn, params), (by_hand, _) = case(None), case(jnp.float16)
    half = jax.eval_shape(ols.cast_params, params)
    ways = {
        "float32": (loss_fn, params),
        "float16 by hand": (by_hand, params),
        "autocast": (ols.autocast(loss_fn), params),
        "autocast, O2": (ols.autocast(loss_fn, level="O2"), params),
        "autocast, O2, cast_params": (ols.autocast(loss_fn, level="O2"), half),
    }
    rows = []
    for gpu in ("v100", "cuda"):
        device = compiled_cost.device_of(gpu)
        temporaries = {}
        for way, (function, arguments) in ways.items():
            sharding = SingleDeviceSharding(device)
            args = jax.tree.map(
                lambda x, s=sharding: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=s
                ),
                (arguments, x),
            )
            compiled = jax.jit(jax.value_and_grad(function)).lower(*args).compile()
            found, casts = operands_of_products(compiled.as_text())
            memory = compiled.memory_analysis().temp_size_in_bytes
            temporaries[way] = memory
            rows.append(
                {
                    "way": way,
                    "compiled for": compiled_cost.NAMES[gpu],
                    "products": str(sum(found.values())),
                    "of float16": str(found["f16"]),
                    "kernels": str(compiled_cost.count(compiled.as_text())[1]),
                    "casts alone": str(casts),
                    "temporary MB": f"{memory / 1e6:.1f}",
                    "/ float32": f"{memory / temporaries['float32']:.2f}",
                }
            )
    return rows


def operands_of_products(program: str) -> tuple[collections.Counter[str], int]:
    """Dtypes of what products multiply, and the number of kernels that but cast."""
    types = dict(re.findall(r"%([\w.\-]+) = \(?(\w+)\[", program))
    calls = re.findall(
        r"custom-call\(([^)]*)\), custom_call_target=\"__cu(?:blas|dnn)", program
    )
    calls += re.findall(r" dot\(([^)]*)\)", program)
    found: collections.Counter[str] = collections.Counter()
    for operands in calls:
        names = re.findall(r"%([\w.\-]+)", operands)[:2]
        found["/".join(sorted({types[name] for name in names}))] += 1
    entry = program[program.index("\nENTRY") :]
    return found, len(re.findall(r"calls=%wrapped_convert", entry))


def main() -> None:
    """Prints the tables, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="without compiling")
    args = parser.parse_args()
    tables = {
        "Models": model_rows(),
        "Compiled": [] if args.quick else compiled_rows(),
        "Operations": operation_rows(),
    }
    print(f"{versions()}; loss scale {LOSS_SCALE:g}")
    for title, rows in tables.items():
        if rows:
            print(f"\n#### {title}\n")
            print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
