"""What a precision means: how a run computes, and how it stores its parameters.

The example programs share this file.
"""

import argparse
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
UNSCALED = ("float32", "bfloat16", "float16-unscaled")
RULES = {
    "dynamic": ols.dynamic_loss_scale,
    "headroom": ols.headroom_loss_scale,
}


def low_dtype(options: argparse.Namespace) -> Any:
    """Returns the dtype of this run's activations."""
    others = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    return others.get(options.precision, jnp.float16)


def cast(fun: Callable[..., Any], options: argparse.Namespace) -> Callable[..., Any]:
    """Returns the function as the precision of this run computes it."""
    if options.precision == "float32":
        return fun
    level = "O2" if options.precision in ("O2", "masters") else "O1"
    return ols.autocast(fun, low_dtype(options), level=level)


def cast_params(params: Any, options: argparse.Namespace) -> Any:
    """Returns the parameters as the precision of this run stores them."""
    return ols.cast_params(params) if options.precision == "masters" else params


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps, options: argparse.Namespace
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer as the precision of this run needs it."""
    if options.precision in UNSCALED:
        return ols.loss_scaled(inner, ols.no_loss_scale())
    if options.precision == "masters":
        inner = ols.master_weights(inner)
    return ols.loss_scaled(inner, RULES[options.rule]())


def scale_figures(state: Any, grads: Any, exact: Any) -> dict[str, jax.Array]:
    """Returns figures for a report: what was flushed, the loss scale, steps skipped.

    "Flushed" is the share of the nonzero entries of `exact`, the gradients in float32,
    that are zero in `grads`. The loss scale is the one that the next step will use.
    """
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True)
    counts = [(jnp.sum((x == 0) & (y != 0)), jnp.sum(y != 0)) for x, y in pairs]
    flushed, nonzero = (sum(column) for column in zip(*counts, strict=True))
    metrics = ols.loss_scale_metrics(state)
    return {
        "flushed": flushed / jnp.maximum(nonzero, 1),
        "loss_scale": metrics["loss_scale"],
        "skipped": metrics["total_notfinite"],
    }
