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


# Parsed options; and an option: its type or its choices, its default, a line of help.
Options = argparse.Namespace
Option = tuple[Any, Any, str]


def natural(text: str) -> int:
    """Reads an option that must be a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text}")
    return int(text)


def positive(text: str) -> int:
    """Reads an option that must be at least 1."""
    if (number := natural(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def new_file(text: str) -> pathlib.Path:
    """Reads the name of a file to write, and checks that its folder exists."""
    path = pathlib.Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def parse_options(description: str, steps: int, report: int, **own: Option) -> Options:
    """Reads the options that all programs have, and the program's `own`."""
    precisions = "; ".join(f"{name}: {text}" for name, text in PRECISIONS.items())
    options: dict[str, Option] = {
        "precision": (PRECISIONS, "float16", precisions),
        "rule": (RULES, "dynamic", "how the loss scale changes"),
        "seed": (natural, 0, "of all random numbers"),
        "steps": (positive, steps, "training steps"),
        "report": (positive, report, "steps from one report to the next"),
        **own,
        "devices": (positive, 1, "devices of each process"),
        "mesh": (
            ["data", "fsdp"],
            "data",
            "split only batches over the devices, or parameters and states too",
        ),
        "coordinator": (str, None, "HOST:PORT where several processes meet"),
        "processes": (positive, 1, "number of processes"),
        "process": (natural, 0, "index of this process"),
        "folder": (
            pathlib.Path,
            None,
            "keep logs and checkpoints here, and continue from the last checkpoint",
        ),
        "json": (new_file, None, "write the figures of all reports to this file"),
        "plot": (new_file, None, "draw the figures of all reports to this picture"),
    }
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, (kind, default, text) in options.items():
        choices = {"type": kind} if callable(kind) else {"choices": list(kind)}
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=default, help=text, **choices)
    return parser.parse_args()


def cast(fun: Callable[..., Any], options: Options) -> Callable[..., Any]:
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


def cast_params(params: Any, options: Options) -> Any:
    """Returns the parameters as the precision of this run stores them."""
    return ols.cast_params(params) if options.precision == "masters" else params


def with_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps, options: Options
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer as the precision of this run needs it."""
    if options.precision in ("float32", "bfloat16", "float16-unscaled"):
        return ols.loss_scaled(inner, ols.no_loss_scale())
    if options.precision == "masters":
        inner = ols.master_weights(inner)
    return ols.loss_scaled(inner, RULES[options.rule]())


def gradient_figures(state: Any, grads: Any, exact: Any) -> dict[str, jax.Array]:
    """Returns figures for a report: what was flushed, the loss scale, steps skipped.

    "Flushed" is the share of the nonzero entries of `exact`, the gradients in float32,
    that are zero in `grads`. The loss scale is the one that the next step will use.
    """
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True)
    counts = [(jnp.sum((x == 0) & (y != 0)), jnp.sum(y != 0)) for x, y in pairs]
    flushed, nonzero = (sum(column) for column in zip(*counts, strict=True))
    metrics = ols.loss_scale_metrics(state)
    return {
        "flushed": flushed / nonzero,
        "loss_scale": metrics["loss_scale"],
        "skipped": metrics["total_notfinite"],
    }
