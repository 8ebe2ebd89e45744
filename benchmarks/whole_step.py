"""Compares whole training steps with and without loss scaling: a table for each model.

    python benchmarks/whole_step.py [--platforms cuda v100 tpu] [--models GPT] [--quick]

The script needs no TPU and no GPU, only their compilers: `pip install libtpu
'jax[cuda12]'`. Bytes, kernels and temporary memory are those of the compiled program.
The limit is the step without loss scaling, plus one more read of the gradients in the
dtype in which they are produced. With `--platforms here` the steps are compiled for the
device that JAX uses, and timed on it. On a CPU the models are small, so that their
figures say little, and XLA counts the bytes of a loop once.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from _lib.costs import Cost, compile_step
from _lib.devices import DEVICE_NAMES, device_of, use_host_cpu
from _lib.steps import MODELS, OPTIMIZERS, SCALERS, WAYS, make_step
from _lib.tables import print_tables, versions
from optax_lossscale._checks import check_output_file

ROUNDS = 30
STEPS_OF_A_ROUND = 10
FULL_WAY = "autocast, O1"  # With more optimizers and rules than the others.
FITTING_WAY = {"flax DynamicScale": "by hand", "loss_scaled, headroom": FULL_WAY}


class Measured(NamedTuple):
    """What is measured of a step.

    Attributes:
      cost: The cost of the compiled step.
      time_s: Seconds of a step, where there is a device.
      grad_bytes: Bytes of all gradients.
    """

    cost: Cost
    time_s: float | None
    grad_bytes: int


def measure(
    platform: str, model: str, way: str, optimizer: str, scaler: str, small: bool
) -> Measured:
    """Compiles one step, and times it on the device that is here."""
    run, args, grad_bytes = make_step(model, way, optimizer, scaler, small)
    is_here = platform == "here"
    device = jax.devices()[0] if is_here else device_of(platform)
    compiled, cost = compile_step(run, args, device)
    return Measured(cost, seconds(compiled, args) if is_here else None, grad_bytes)


def seconds(compiled: Any, args: Any) -> float:
    """Returns the median time of a step, over rounds of several steps in a row.

    Every array of floats holds random numbers above zero, as second moments are, and
    every other array zeros.
    """
    key = jax.random.key(0)

    def fill(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jax.random.uniform(key, x.shape, jnp.float32, 0, 0.1).astype(x.dtype)

    params, state, *batch = jax.tree.map(fill, args)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS_OF_A_ROUND):
            params, state, _ = compiled(params, state, *batch)
        jax.block_until_ready((params, state))
        times.append((time.perf_counter() - start) / STEPS_OF_A_ROUND)
    return statistics.median(times[3:])


def row(names: dict[str, str], own: Measured, bare: Measured) -> dict[str, str]:
    """Describes a step beside the same step without loss scaling."""
    cost, bare_cost = own.cost, bare.cost
    limit = bare_cost.moved + bare.grad_bytes
    times = {}
    if own.time_s is not None and bare.time_s is not None:
        times["ms"] = f"{1e3 * own.time_s:.2f}"
        times["time / bare"] = f"{own.time_s / bare.time_s:.3f}"
    return names | {
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
    is_small = platform == "here" and jax.default_backend() == "cpu"
    where = DEVICE_NAMES.get(platform, "here")
    rows = []
    for way in ways:
        for optimizer in optimizers:
            bare = measure(platform, model, way, optimizer, "none", is_small)
            for scaler in scalers:
                if scaler != "none" and way == "float32":
                    continue
                if way != FITTING_WAY.get(scaler, way):
                    continue
                case = (platform, model, way, optimizer, scaler, is_small)
                names = {
                    "compiled for": "here, small" if is_small else where,
                    "precision": way,
                    "optimizer": optimizer,
                    "loss scaling": scaler,
                }
                own = bare if scaler == "none" else measure(*case)
                rows.append(row(names, own, bare))
    return rows


def main() -> None:
    """Prints a table for each model, and writes them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--platforms",
        nargs="+",
        choices=["cuda", "v100", "tpu", "here"],
        default=["cuda", "v100", "tpu"],
        help="compile for these; `here` also times the steps (default: all but this)",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--json", type=check_output_file, help="write the tables to a file"
    )
    parser.add_argument(
        "--quick", action="store_true", help="AdamW only, and not the headroom rule"
    )
    arguments = parser.parse_args()
    if "here" not in arguments.platforms:
        use_host_cpu()
    scalers = list(SCALERS)
    if arguments.quick:
        scalers.remove("loss_scaled, headroom")
    tables: dict[str, list[dict[str, str]]] = {}
    for model in arguments.models:
        tables[model] = []
        for platform in arguments.platforms:
            rows = rows_of(platform, model, arguments.ways, ["adamw"], scalers)
            if FULL_WAY in arguments.ways and not arguments.quick:
                others, few = list(OPTIMIZERS)[1:], ["none", "loss_scaled"]
                rows += rows_of(platform, model, [FULL_WAY], others, few)
            tables[model] += rows
    title = f"{versions()}; limit: without loss scaling, and one read of the gradients"
    print_tables(title, tables, arguments.json)


if __name__ == "__main__":
    main()
