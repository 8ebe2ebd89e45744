"""Measures on an NVIDIA GPU what float16 gains, and what loss scaling costs.

    python benchmarks/on_gpu.py PART [MODEL] --json FILE [--tiny]

`benchmarks/on_gpu.sh` runs all parts, and the tests. `start` makes the file. `steps`,
`largest batch` and `update` write their rows to it as soon as they have them, and skip
those that are there. `report` adds the results of the tests, and prints Markdown.

In the tables of whole steps, `time / float32` compares with float32 products at the
highest precision, and `time / bare` with the same step without loss scaling. *By hand*
is Flax with `dtype=float16`, or with bfloat16, and *O2, masters* is autocast with
float16 parameters and `master_weights`. With *float32 gradients* those between products
are float32 at O1, as all others are anyway. `peak MB` is the memory that the compiled
program needs: arguments, results and temporary arrays. The process holds more, because
the steps of one precision are timed in turns, and all have parameters and state. If the
GPU has not enough memory for a precision, its rows say so. GPUs before Ampere have no
units for TF32 and bfloat16, but these rows are measured there as well.

The largest batch is estimated from the programs for two batch sizes, as if memory grew
linearly with the batch. One step is run with it. If that does not fit, the batch is
made smaller by 1/16, at most three times.
"""

import argparse
import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from _lib.costs import compile_step
from _lib.files import check_output_file
from _lib.large_models import MODELS
from _lib.step_times import Measured, measure, random_like
from _lib.steps import Step, batch_size, fitting, make_step, with_batch
from _lib.tables import text_of, versions
from _lib.update_times import compare

Row = dict[str, str]

OPTIMIZER_OF = dict.fromkeys(MODELS, "adamw") | {"ResNet-50": "sgd with momentum"}
EXACT = "float32, highest"
PRECISIONS = [
    EXACT,
    "TF32",
    "by hand",
    "by hand, bfloat16",
    "autocast, bfloat16",
    "autocast, O1",
    "autocast, O1, float32 gradients",
    "autocast, O2",
    "O2, masters",
]
PRECISIONS_OF_BATCHES = [EXACT, "by hand", "autocast, O1", "O2, masters"]
SCALERS = ["none", "loss_scaled", "flax DynamicScale"]
UPDATES = [
    "bare optimizer",
    "optax_lossscale",
    "flax DynamicScale",
    "optax.apply_if_finite",
]
ROUNDS = 13
STEPS_OF_A_ROUND = 2
OUT_OF_MEMORY = "out of memory"


def read(file: pathlib.Path) -> dict[str, Any]:
    """Reads the title and the tables that are in the file."""
    return json.loads(file.read_text())


def write(file: pathlib.Path, results: dict[str, Any]) -> None:
    """Replaces the file at once, so that it is whole whenever the process is killed."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1))
    new.replace(file)


def start(file: pathlib.Path, title: str) -> None:
    """Makes the file, unless it exists; then it must have the same title."""
    if not file.exists():
        write(file, {"title": title, "tables": {}})
    found = read(file)["title"]
    if found != title:
        raise SystemExit(f"{file} has results of {found}. This is {title}.")


def fill(
    file: pathlib.Path,
    table: str,
    key: str,
    values: list[str],
    rows_of: Callable[[str, list[Row]], list[Row]],
) -> None:
    """Adds to a table the rows of each value of the column `key` that are not there.

    `rows_of(value, before)` measures them; `before` are the rows that are there.
    """
    for value in values:
        results = read(file)
        rows = results["tables"].setdefault(table, [])
        if not any(row[key] == value for row in rows):
            print(f"{table}: {value} ...", flush=True)
            rows += rows_of(value, rows)
            write(file, results)


def reason_of(error: jax.errors.JaxRuntimeError) -> str:
    """Says in two words why the GPU could not run a step, and prints the error."""
    print(error)
    return OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in str(error) else "failed"


def step_rows(model: str, tiny: bool, precision: str, before: list[Row]) -> list[Row]:
    """Returns a row for each scaler that fits the precision."""
    scalers = fitting(SCALERS, precision)
    labels = [{"precision": precision, "loss scaling": each} for each in scalers]
    case = (model, precision, OPTIMIZER_OF[model], scalers, tiny)
    try:
        measured = measure("here", *case, rounds=ROUNDS, steps=STEPS_OF_A_ROUND)
    except jax.errors.JaxRuntimeError as error:
        columns = ["time / float32", "time / bare", "peak MB", "compile s"]
        failure = {"ms": reason_of(error)} | dict.fromkeys(columns, "")
        return [label | failure for label in labels]
    bare = measured[0]
    exact_ms = before[0]["ms"] if before else str(1e3 * bare.time_s)
    return [
        label | cells(own, bare, exact_ms)
        for label, own in zip(labels, measured, strict=True)
    ]


def cells(own: Measured, bare: Measured, exact_ms: str) -> Row:
    """Describes a step beside the same step without loss scaling, and float32's."""
    has_exact = exact_ms[0].isdigit()  # Otherwise it says why there is no time.
    ratio = f"{1e3 * own.time_s / float(exact_ms):.3f}" if has_exact else ""
    return {
        "ms": f"{1e3 * own.time_s:.3f}",
        "time / float32": ratio,
        "time / bare": f"{own.time_s / bare.time_s:.3f}",
        "peak MB": f"{own.cost.memory / 1e6:.2f}",
        "compile s": f"{own.cost.compile_s:.1f}",
    }


def batch_rows(model: str, tiny: bool, precision: str, _: list[Row]) -> list[Row]:
    """Returns a row with the largest batch that fits, or with the reason for none.

    The step has loss scaling where there is float16.
    """
    scaler = fitting(["none", "loss_scaled"], precision)[-1]
    row = {"precision": precision, "loss scaling": scaler}
    step = make_step(model, precision, OPTIMIZER_OF[model], scaler, tiny)
    try:
        return [row | largest_batch(step)]
    except jax.errors.JaxRuntimeError as error:
        columns = ["estimate", "peak MB", "MB / example", "limit MB"]
        return [row | {"batch": reason_of(error)} | dict.fromkeys(columns, "")]


def largest_batch(step: Step) -> Row:
    """Estimates the largest batch that fits, and runs a step with it."""
    device, size = jax.devices()[0], batch_size(step)
    first, second = (
        compile_step(each.run, each.args, device)[1].memory
        for each in (step, with_batch(step, 2 * size))
    )
    of_an_example = (second - first) / size
    # A CPU has no limit; this one takes the script through its code.
    limit = (device.memory_stats() or {"bytes_limit": 4 * first})["bytes_limit"]
    estimate = max(1, size + int((limit - first) / of_an_example))
    batch, memory = run_or_shrink(step, estimate)
    return {
        "batch": str(batch),
        "estimate": str(estimate),
        "peak MB": f"{memory / 1e6:.2f}",
        "MB / example": f"{of_an_example / 1e6:.3f}",
        "limit MB": f"{limit / 1e6:.2f}",
    }


def run_or_shrink(step: Step, size: int, tries: int = 4) -> tuple[int, int]:
    """Runs a step, of fewer examples if need be; returns batch and memory."""
    try:
        return size, run_once(with_batch(step, size))
    except jax.errors.JaxRuntimeError as error:
        if min(tries, size) == 1 or reason_of(error) != OUT_OF_MEMORY:
            raise
    # Here the error is gone, and with it the arrays of the step.
    return run_or_shrink(step, size - max(1, size // 16), tries - 1)


def run_once(step: Step) -> int:
    """Runs a step once, and returns the memory of its program."""
    compiled, cost = compile_step(step.run, step.args, jax.devices()[0])
    jax.block_until_ready(compiled(*random_like(step.args)))
    return cost.memory


def update_rows(leaves: str, _: list[Row]) -> list[Row]:
    """Returns a row for each way to update."""
    return compare("adamw", jnp.float16, leaves, UPDATES, repeats=1)


def tables_of_tests(folder: pathlib.Path) -> dict[str, list[Row]]:
    """Reads from the logs of pytest how the tests ended, and which failed."""
    outcomes, failed = [], {}
    for log in sorted(folder.glob("tests*.log")):
        lines = log.read_text().splitlines()
        last = lines[-1].strip("= ") if lines else ""
        done = sum("%]" in line for line in lines)
        outcome = last if " in " in last else f"killed after {done} tests"
        outcomes.append({"tests": log.stem, "outcome": outcome})
        for line in lines:
            # Each is in a line while the tests run, and with its error at the end.
            _, mark, test = line.replace("ERROR ", "FAILED ").partition("FAILED ")
            if mark and test.startswith(("tests/", "optax_lossscale/")):
                failed[test.split(" - ")[0].strip()] = test.replace("|", "\\|").strip()
    return {
        "Tests": outcomes,
        "Tests that failed": [{"test": test} for test in failed.values()],
    }


def report(file: pathlib.Path) -> None:
    """Adds the results of the tests to the file, and prints all tables."""
    results = read(file)
    results["tables"] |= tables_of_tests(file.parent)
    write(file, results)
    print(text_of(results["title"], results["tables"]))


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ["start", "steps", "largest batch", "update", "report"]
    parser.add_argument("part", choices=parts)
    parser.add_argument("model", choices=MODELS, nargs="?")
    parser.add_argument("--json", type=check_output_file, required=True)
    parser.add_argument(
        "--tiny", action="store_true", help="show on a CPU that the script works"
    )
    arguments = parser.parse_args()
    part, model, file = arguments.part, arguments.model, arguments.json
    tiny = arguments.tiny
    if part == "report":
        report(file)
        return
    # JAX reserves 0.75 of the memory unless told otherwise.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if tiny:
        # Tiny steps take far longer to compile than to run.
        jax.config.update("jax_disable_most_optimizations", True)
    elif jax.default_backend() != "gpu":
        parser.error("JAX finds no GPU here. On a CPU only --tiny runs.")
    if part == "start":
        size = "; tiny models, whose figures say nothing" if tiny else ""
        start(file, versions() + size)
    elif part == "steps":
        rows_of = functools.partial(step_rows, model, tiny)
        fill(file, model, "precision", PRECISIONS, rows_of)
    elif part == "largest batch":
        rows_of = functools.partial(batch_rows, model, tiny)
        fill(file, f"{part}: {model}", "precision", PRECISIONS_OF_BATCHES, rows_of)
    else:
        cases = ["2 x 100"] if tiny else ["60 x 100000", "GPT's 76"]
        fill(file, "The update alone", "leaves", cases, update_rows)


if __name__ == "__main__":
    main()
