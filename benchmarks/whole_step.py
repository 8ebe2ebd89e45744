"""Compares whole training steps with and without loss scaling: a table for each model.

    python benchmarks/whole_step.py [--platforms v100 cuda tpu] [--models GPT] [--quick]

The script needs no TPU and no GPU, only their compilers: `pip install libtpu
'jax[cuda12]'`. Bytes, kernels and temporary memory are those of the compiled program.
The limit is the step without loss scaling, plus one more read of the gradients in the
dtype in which they are produced. With `--platforms here` the steps are compiled for the
device that JAX uses, and timed on it. On a CPU the models are small, so that their
figures say little, and XLA counts the bytes of a loop once. With `--products` the
script prints one table instead, of the products by the dtypes of their operands.
"""

import argparse
import re
from typing import Any

import jax

from _lib.devices import DEVICE_NAMES, use_host_cpu
from _lib.large_models import MODELS
from _lib.step_times import Measured, measure
from _lib.steps import SCALERS, WAYS, fitting
from _lib.tables import add_outputs, publish, versions

FEW_MODELS = ["GPT", "ResNet-18", "LSTM"]
FEW_WAYS = ["float32", "by hand", "autocast, O1", "autocast, O2", "masters"]
FULL_WAY = "autocast, O1"  # With more optimizers and rules than the others.
OTHER_OPTIMIZERS = ["adamw, clipped", "adamw, accumulated"]


def row(labels: dict[str, str], own: Measured, bare: Measured) -> dict[str, str]:
    """Describes a step beside the same step without loss scaling."""
    cost, bare_cost = own.cost, bare.cost
    limit = bare_cost.moved + bare.grad_bytes
    times = {}
    if own.time_s is not None and bare.time_s is not None:
        times["ms"] = f"{1e3 * own.time_s:.2f}"
        times["time / bare"] = f"{own.time_s / bare.time_s:.3f}"
    return labels | {
        "MB": f"{cost.moved / 1e6:.0f}",
        "/ limit": f"{cost.moved / limit:.3f}",
        "loss scaling's share": f"{1 - bare_cost.moved / cost.moved:.1%}",
        "kernels": str(cost.kernels),
        "more": f"{cost.kernels - bare_cost.kernels:+d}",
        "temporary MB": f"{cost.temporaries / 1e6:.0f}",
        "trace s": f"{cost.trace_s:.2f}",
        "compile s": f"{cost.compile_s:.1f}",
        **times,
    }


def rows_of(
    platform: str, model: str, ways: list[str], optimizers: list[str], scalers: Any
) -> list[dict[str, str]]:
    """Returns a row for each way, optimizer and scaler that fits it."""
    is_small = is_small_on(platform)
    rows = []
    for way in ways:
        for optimizer in optimizers:
            names = fitting(scalers, way)
            measured = measure(platform, model, way, optimizer, names, is_small)
            for scaler, own in zip(names, measured, strict=True):
                labels = {
                    "compiled for": device_name(platform),
                    "precision": way,
                    "optimizer": optimizer,
                    "loss scaling": scaler,
                }
                rows.append(row(labels, own, measured[0]))
    return rows


def is_small_on(platform: str) -> bool:
    """Whether the models are small, as they are where a CPU runs them."""
    return platform == "here" and jax.default_backend() == "cpu"


def device_name(platform: str) -> str:
    """Names the device for which a step is compiled."""
    here = "here, small" if is_small_on(platform) else "here"
    return DEVICE_NAMES.get(platform, here)


def product_rows(
    platforms: list[str], model: str, ways: list[str]
) -> list[dict[str, str]]:
    """Returns a row for each way: the products of the step without loss scaling."""
    rows = []
    for way in ways:
        row = {"model": model, "precision": way}
        for platform in platforms:
            is_small = is_small_on(platform)
            (bare,) = measure(platform, model, way, "adamw", ["none"], is_small)
            row[device_name(platform)] = in_words(bare.cost.products)
        rows.append(row)
    return rows


def in_words(products: dict[str, int]) -> str:
    """Lists numbers of products, such as `8 float16, 2 float32`."""
    names = {each: re.sub(r"f(?=\d)", "float", each) for each in sorted(products)}
    return ", ".join(f"{products[each]} {name}" for each, name in names.items())


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--platforms",
        nargs="+",
        choices=["v100", "cuda", "tpu", "here"],
        default=["v100", "cuda", "tpu"],
        help="compile for these; `here` also times the steps (default: all but this)",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=FEW_MODELS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=FEW_WAYS)
    add_outputs(parser)
    parser.add_argument(
        "--quick", action="store_true", help="AdamW only, and not the headroom rule"
    )
    parser.add_argument(
        "--products", action="store_true", help="count only the products, by dtype"
    )
    arguments = parser.parse_args()
    if "here" not in arguments.platforms:
        use_host_cpu()
    if arguments.products:
        platforms, ways = arguments.platforms, arguments.ways
        rows = [
            row
            for model in arguments.models
            for row in product_rows(platforms, model, ways)
        ]
        publish(versions(), {"Products by dtype": rows}, arguments)
        return
    scalers = list(SCALERS)
    if arguments.quick:
        scalers.remove("loss_scaled, headroom")
    tables: dict[str, list[dict[str, str]]] = {}
    for model in arguments.models:
        tables[model] = []
        for platform in arguments.platforms:
            rows = rows_of(platform, model, arguments.ways, ["adamw"], scalers)
            if FULL_WAY in arguments.ways and not arguments.quick:
                few = ["none", "loss_scaled"]
                rows += rows_of(platform, model, [FULL_WAY], OTHER_OPTIMIZERS, few)
            tables[model] += rows
    title = f"{versions()}; limit: without loss scaling, and one read of the gradients"
    publish(title, tables, arguments)


if __name__ == "__main__":
    main()
