"""What a precision means: how a run computes, and how it stores its parameters.

The example programs share this file. It also holds the options that all of them have.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols

PRECISIONS = {
    "float32": "everything in float32",
    "bfloat16": "autocast to bfloat16",
    "float16": "autocast to float16 at level O1, with a loss scale",
    "float16-unscaled": "the same without a loss scale",
    "O2": "autocast to float16 at level O2, with a loss scale",
    "masters": "the same with float16 parameters and float32 master weights",
}
RULES = {
    "dynamic": ols.dynamic_loss_scale,
    "headroom": ols.headroom_loss_scale,
    "smooth": ols.smooth_loss_scale,
}


def parse_options(
    description: str, steps: int, report: int, **own: dict[str, Any]
) -> argparse.Namespace:
    """Reads the options that all programs have, and the program's `own`."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    precisions = "; ".join(f"{name}: {text}" for name, text in PRECISIONS.items())
    path = {"type": pathlib.Path, "metavar": "FILE"}
    options: dict[str, dict[str, Any]] = {
        "precision": {"choices": PRECISIONS, "default": "float16", "help": precisions},
        "rule": {
            "choices": RULES,
            "default": "dynamic",
            "help": "how the scale changes",
        },
        "seed": {"type": int, "default": 0, "help": "of parameters, batches, dropout"},
        "steps": {"type": int, "default": steps, "help": "training steps"},
        "report": {"type": int, "default": report, "help": "steps between reports"},
        "devices": {"type": int, "default": 1, "help": "devices of each process"},
        "mesh": {
            "choices": ["data", "fsdp"],
            "default": "data",
            "help": "what the devices share: batches, or parameters and states too",
        },
        "folder": {
            "type": pathlib.Path,
            "help": "keep logs and checkpoints here, and continue from the last one",
        },
        "json": path | {"help": "write the figures of all reports to this file"},
        "plot": path | {"help": "draw the figures of all reports to this picture"},
    }
    for name, settings in (options | own).items():
        parser.add_argument("--" + name.replace("_", "-"), **settings)
    return parser.parse_args()


def cast(fun: Callable[..., Any], options: argparse.Namespace) -> Callable[..., Any]:
    """Returns the function as the precision of this run computes it."""
    match options.precision:
        case "float32":
            return fun
        case "bfloat16":
            return ols.autocast(fun, jnp.bfloat16)
        case "float16" | "float16-unscaled":
            return ols.autocast(fun)
        case _:
            return ols.autocast(fun, level="O2")


def cast_params(params: Any, options: argparse.Namespace) -> Any:
    """Returns the parameters as the precision of this run stores them."""
    return ols.cast_params(params) if options.precision == "masters" else params


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps, options: argparse.Namespace
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer as the precision of this run needs it."""
    if options.precision in ("float32", "bfloat16", "float16-unscaled"):
        return ols.loss_scaled(inner, ols.no_loss_scale())
    if options.precision == "masters":
        inner = ols.master_weights(inner)
    return ols.loss_scaled(inner, RULES[options.rule]())


def flushed_share(grads: Any, exact: Any) -> jax.Array:
    """Returns which share of the nonzero entries of `exact` is zero in `grads`."""
    grads, exact = jax.tree.leaves(grads), jax.tree.leaves(exact)
    pairs = list(zip(grads, exact, strict=True))
    nonzero = sum(jnp.sum(y != 0) for _, y in pairs)
    return sum(jnp.sum((x == 0) & (y != 0)) for x, y in pairs) / nonzero


def scale_figures(state: Any) -> dict[str, jax.Array]:
    """Returns the loss scale of the next step, and the number of steps skipped."""
    metrics = ols.loss_scale_metrics(state)
    return {"loss_scale": metrics["loss_scale"], "skipped": metrics["total_notfinite"]}
