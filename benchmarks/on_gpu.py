"""Measures on an NVIDIA GPU what float16 gains and what loss scaling costs.

    python benchmarks/on_gpu.py [--tiny] [--json FILE]

The script first runs the tests that need a GPU, `python -m pytest -m gpu`. Then it
times whole training steps of a GPT (AdamW) and of a ResNet-50 (SGD with momentum) in
each precision, and the update by AdamW alone. It prints a table of each at the end.
This should take about ten minutes, most of which it needs to compile 26 steps.

In the tables of whole steps, `time / float32` compares with float32 products at the
highest precision, and `time / bare` with the same step without loss scaling. *By hand*
is Flax with `dtype=float16`, and *O2, masters* is autocast with float16 parameters and
`master_weights`. `peak MB` is the memory that the compiled program needs: arguments,
results and temporary arrays. The process holds more, because the steps of one precision
are timed in turns, and all have parameters and state. If the GPU has not enough memory
for a precision, its rows say so, and the others are still measured. GPUs before Ampere
have no units for TF32 and bfloat16, but these rows are measured there as well.

With `--tiny` the models are so small that a CPU needs only a minute or two. This shows
that the script runs to its end. The figures say nothing.
"""

import argparse
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp

from _lib.step_times import Measured, measure
from _lib.steps import fitting
from _lib.tables import print_tables, versions
from _lib.update_times import compare
from optax_lossscale._checks import check_output_file

OPTIMIZER_OF = {"GPT, 125 M": "adamw", "ResNet-50": "sgd with momentum"}
EXACT = "float32, highest"
PRECISIONS = [
    EXACT,
    "TF32",
    "autocast, bfloat16",
    "autocast, float8",
    "by hand",
    "autocast, O1",
    "autocast, O2",
    "O2, masters",
]
SCALERS = ["none", "loss_scaled", "flax DynamicScale"]
UPDATES = [
    "bare optimizer",
    "optax_lossscale",
    "with warn_after=50",
    "flax DynamicScale",
    "optax.apply_if_finite",
]
ROUNDS = 13
STEPS_OF_A_ROUND = 2


def run_gpu_tests() -> dict[str, str]:
    """Runs the tests that need a GPU, and returns a row with pytest's last line."""
    command = ["python", "-m", "pytest", "-m", "gpu"]
    done = subprocess.run(
        [sys.executable, *command[1:], "-q"],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {"command": " ".join(command), "outcome": lines[-1] if lines else "nothing"}


def measure_or_explain(
    model: str, precision: str, scalers: list[str], is_tiny: bool
) -> list[Measured] | str:
    """Measures a step with each scaler, or returns why the GPU cannot run it."""
    case = (model, precision, OPTIMIZER_OF[model], scalers, is_tiny)
    try:
        return measure("here", *case, rounds=ROUNDS, steps=STEPS_OF_A_ROUND)
    except jax.errors.JaxRuntimeError as error:
        print(error, file=sys.stderr)
        is_memory = "RESOURCE_EXHAUSTED" in str(error)
        return "out of memory" if is_memory else "failed"


def rows_of(model: str, is_tiny: bool) -> list[dict[str, str]]:
    """Returns a row for each precision and each scaler that fits it."""
    rows, exact_s = [], None
    for precision in PRECISIONS:
        print(f"{model}: {precision} ...", file=sys.stderr)
        scalers = fitting(SCALERS, precision)
        measured = measure_or_explain(model, precision, scalers, is_tiny)
        if precision == EXACT and not isinstance(measured, str):
            exact_s = measured[0].time_s
        for index, scaler in enumerate(scalers):
            labels = {"precision": precision, "loss scaling": scaler}
            if isinstance(measured, str):
                rows.append(labels | cells_of_failure(measured))
            else:
                rows.append(labels | cells(measured[index], measured[0], exact_s))
    return rows


def cells(own: Measured, bare: Measured, exact_s: float | None) -> dict[str, str]:
    """Describes a step beside the same step without loss scaling, and float32's."""
    return {
        "ms": f"{1e3 * own.time_s:.2f}",
        "time / float32": f"{own.time_s / exact_s:.3f}" if exact_s else "",
        "time / bare": f"{own.time_s / bare.time_s:.3f}",
        "peak MB": f"{own.cost.memory / 1e6:.2f}",
        "compile s": f"{own.cost.compile_s:.1f}",
    }


def cells_of_failure(reason: str) -> dict[str, str]:
    """Gives the reason in place of the time."""
    others = ["time / float32", "time / bare", "peak MB", "compile s"]
    return {"ms": reason} | dict.fromkeys(others, "")


def update_rows(is_tiny: bool) -> list[dict[str, str]]:
    """Returns a row for each way to update, for equal leaves and for those of a GPT."""
    print("the update alone ...", file=sys.stderr)
    cases = ["2 x 100"] if is_tiny else ["60 x 100000", "GPT's 76"]
    return [
        row
        for leaves in cases
        for row in compare("adamw", jnp.float16, leaves, UPDATES, repeats=1)
    ]


def main() -> None:
    """Runs the tests, and prints the tables, as JSON too if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="show in a minute that the script works"
    )
    parser.add_argument(
        "--json", type=check_output_file, help="write the tables to a file"
    )
    arguments = parser.parse_args()
    # JAX reserves 0.75 of the memory unless told otherwise.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    # The tests come first, because this process keeps the memory once it uses the GPU.
    print("python -m pytest -m gpu ...", file=sys.stderr)
    tests = run_gpu_tests()
    print(tests["outcome"], file=sys.stderr)
    if jax.default_backend() != "gpu":
        if not arguments.tiny:
            parser.error("JAX finds no GPU here. On a CPU only --tiny runs.")
        # Tiny steps take far longer to compile than to run.
        jax.config.update("jax_disable_most_optimizations", True)
    tables = {model: rows_of(model, arguments.tiny) for model in OPTIMIZER_OF}
    tables["The update alone"] = update_rows(arguments.tiny)
    tables["The tests that need a GPU"] = [tests]
    size = "; tiny models, whose figures say nothing" if arguments.tiny else ""
    print_tables(versions() + size, tables, arguments.json)


if __name__ == "__main__":
    main()
