"""Shows what autocast does to models, and to whole training steps on GPU and TPU.

    python benchmarks/autocast.py [--models NAME ...]
                                  [--platforms v100 cuda tpu] [--record]

The tables of whole steps need the compilers (`pip install libtpu 'jax[cuda12]'`), but
no GPU and no TPU. With `--platforms` and no name after it they are left out.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from _lib.costs import Cost, compile_step
from _lib.devices import DEVICE_NAMES, device_of, use_host_cpu
from _lib.models import MODELS, Case
from _lib.plain_models import MODELS as STEPS
from _lib.steps import run_ours, with_wide_gradients
from _lib.tables import add_outputs, publish, versions
from optax_lossscale._autocast.products import PRODUCTS, low_product_p
from optax_lossscale._autocast.programs import equations_of

LOSS_SCALE = 2.0**10


def product_dtypes(function: Any, *args: Any) -> list[str]:
    """Returns the dtype of the factors of each product that a function computes."""
    dtypes = []
    for equation in equations_of(jax.make_jaxpr(function)(*args)):
        if equation.primitive is low_product_p:
            dtypes.append(equation.params["product"].low.name)
        elif equation.primitive in PRODUCTS:
            dtypes.append(equation.invars[0].aval.dtype.name)
    return dtypes


def model_row(name: str, case: Case) -> dict[str, str]:
    """Returns the row of a model: its products and its gradient error."""
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
    return {
        "model": name,
        "products": str(len(found)),
        "in float16": str(found.count("float16")),
        "gradient error": f"{float(error / optax.tree.norm(exact)):.2%}",
    }


class Way(NamedTuple):
    """A way to train a model.

    Attributes:
      dtype: The dtype of activations by hand, or `None` if nothing is cast.
      stream: The same of what goes from layer to layer.
      level: The level of autocast, or `None` if it is not used.
      is_wide: Whether gradients between products are float32 too.
    """

    dtype: Any = None
    stream: Any = None
    level: str | None = None
    is_wide: bool = False


WAYS = {
    "float32": Way(),
    "by hand": Way(jnp.float16, jnp.float16),
    "by hand, float32 between layers": Way(jnp.float16, jnp.float32),
    "autocast, O1": Way(level="O1"),
    "autocast, O1, float32 gradients": Way(level="O1", is_wide=True),
    "autocast, O3": Way(level="O3"),
}


def step_costs(platform: str, model: str) -> dict[str, Cost]:
    """Compiles the training step of a model in each way, with AdamW.

    The steps under autocast scale the loss, the others have the bare optimizer.
    """
    costs = {}
    low = jnp.bfloat16 if platform == "tpu" else jnp.float16
    for name, way in WAYS.items():
        dtype, stream = (low if x == jnp.float16 else x for x in way[:2])
        loss_fn, params, batch = STEPS[model](dtype, stream, False)
        rule = None
        if way.level is not None:
            loss_fn = ols.autocast(loss_fn, low, level=way.level)
            rule = ols.dynamic_loss_scale
        init, run = run_ours(loss_fn, optax.adamw(1e-3), rule)
        if way.is_wide:
            run = with_wide_gradients(run)
        args = (params, jax.eval_shape(init, params), *batch)
        costs[name] = compile_step(run, args, device_of(platform))[1]
    return costs


def step_rows(platform: str) -> list[dict[str, str]]:
    """Returns a row for each model and each way to train it."""
    rows = []
    for model in STEPS:
        costs = step_costs(platform, model)
        by_hand = costs["by hand"]
        for way, cost in costs.items():
            rows.append(
                {
                    "model": model,
                    "way": way,
                    "MB": f"{cost.moved / 1e6:.0f}",
                    "/ by hand": f"{cost.moved / by_hand.moved:.2f}",
                    "temporary MB": f"{cost.temporaries / 1e6:.0f}",
                    "/ by hand ": f"{cost.temporaries / by_hand.temporaries:.2f}",
                    "compile s": f"{cost.compile_s:.1f}",
                }
            )
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument(
        "--platforms",
        nargs="*",
        choices=DEVICE_NAMES,
        default=["v100", "cuda", "tpu"],
        help="compile steps for these (default: V100, H200 and TPU)",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="NAME",
        help="models of the first table (default: all)",
    )
    arguments = parser.parse_args()
    use_host_cpu()
    tables = {"Models": [model_row(name, MODELS[name]()) for name in arguments.models]}
    for platform in arguments.platforms:
        name = f"Whole steps, compiled for {DEVICE_NAMES[platform]}"
        tables[name] = step_rows(platform)
    publish(f"{versions()}; loss scale {LOSS_SCALE:g}", tables, arguments)


if __name__ == "__main__":
    main()
