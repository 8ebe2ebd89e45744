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
FITTING_WAY = {
    "flax DynamicScale": "by hand",
    "compat.flax DynamicScale": "by hand",
    "loss_scaled, headroom": FULL_WAY,
}


class Measured(NamedTuple):
    """What is measured of a step.

    Attributes:
      cost: The cost of the compiled step.
      grad_bytes: Bytes of all gradients.
      time_s: Seconds of a step, where there is a device.
    """

    cost: Cost
    grad_bytes: int
    time_s: float | None = None


def measure(
    platform: str, model: str, way: str, optimizer: str, scalers: list[str], small: bool
) -> list[Measured]:
    """Compiles a step with each scaler, and times them if the device is here."""
    is_here = platform == "here"
    device = jax.devices()[0] if is_here else device_of(platform)
    measured, programs = [], []
    for scaler in scalers:
        run, args, grad_bytes = make_step(model, way, optimizer, scaler, small)
        compiled, cost = compile_step(run, args, device)
        measured.append(Measured(cost, grad_bytes))
        if is_here:
            programs.append((compiled, random_like(args)))
    times = seconds(programs) if is_here else [None] * len(measured)
    return [
        each._replace(time_s=time_s)
        for each, time_s in zip(measured, times, strict=True)
    ]


def random_like(shapes: Any) -> Any:
    """Makes random arrays.

    Floats are above zero, as second moments are. Integers differ too: a GPU adds the
    gradients of equal tokens one after the other.
    """
    key = jax.random.key(0)

    def fill(x):
        high = 0.1 if jnp.issubdtype(x.dtype, jnp.floating) else 64
        return jax.random.uniform(key, x.shape, maxval=high).astype(x.dtype)

    return jax.tree.map(fill, shapes)


def seconds(programs: list[tuple[Any, Any]]) -> list[float]:
    """Returns the median time of a step of each program, which take turns."""
    times: list[list[float]] = [[] for _ in programs]
    carries = [list(args[:2]) for _, args in programs]
    for _ in range(ROUNDS):
        for i, (step, args) in enumerate(programs):
            start = time.perf_counter()
            for _ in range(STEPS_OF_A_ROUND):
                carries[i][:] = step(*carries[i], *args[2:])[:2]
            jax.block_until_ready(carries[i])
            times[i].append((time.perf_counter() - start) / STEPS_OF_A_ROUND)
    return [statistics.median(each[3:]) for each in times]


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


def fits(scaler: str, way: str) -> bool:
    """Whether a step with this scaler is measured in this way."""
    if way == "float32":
        return scaler == "none"
    return way == FITTING_WAY.get(scaler, way)


def rows_of(
    platform: str, model: str, ways: list[str], optimizers: list[str], scalers: Any
) -> list[dict[str, str]]:
    """Returns a row for each way, optimizer and scaler that fits it."""
    is_small = platform == "here" and jax.default_backend() == "cpu"
    where = DEVICE_NAMES.get(platform, "here")
    rows = []
    for way in ways:
        for optimizer in optimizers:
            fitting = [scaler for scaler in scalers if fits(scaler, way)]
            measured = measure(platform, model, way, optimizer, fitting, is_small)
            for scaler, own in zip(fitting, measured, strict=True):
                names = {
                    "compiled for": "here, small" if is_small else where,
                    "precision": way,
                    "optimizer": optimizer,
                    "loss scaling": scaler,
                }
                rows.append(row(names, own, measured[0]))
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
