"""Trains the programs of `examples/` in every precision, and compares the runs.

    python benchmarks/real_models.py [--record] [--tasks gpt resnet] [--seeds 0 1 2]

It prints the tables of `benchmarks/real_models/README.md` from the runs in `runs.json`
beside that file, and draws the pictures there. With `--record` it first trains what is
missing in `runs.json`, which takes over an hour on two cores. It may be stopped and
started again. The task `grpo` has its tables and runs in `benchmarks/rl/`.

XLA may leave out a rounding to float16 that is followed by a conversion back. The runs
forbid this, so that a value is rounded on a CPU wherever the program says so.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from _lib.tables import table_of, versions
from optax_lossscale.plotting._axes import STYLES

BENCHMARKS = pathlib.Path(__file__).parent
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_allow_excess_precision=false",
    "NPROC": "1",  # One thread for each run, because several run at once.
    "JAX_PLATFORMS": "cpu",
}
# The options of each arm, beside its precision.
Arms = dict[str, tuple[str, ...]]
ARMS: Arms = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16",),
    "float16 without a loss scale": ("float16-unscaled",),
    "float16": ("float16",),
    "O2": ("O2",),
    "float16 parameters": ("masters",),
}
RULE_ARMS: Arms = {"float16, headroom rule": ("float16", "--rule", "headroom")}
SAMPLER_ARMS: Arms = {
    f"{dtype}, {name}": (dtype, *options)
    for name, options in {
        "corrected": ("--correct", "yes"),
        "sampler at O1": ("--sampler", "O1"),
    }.items()
    for dtype in ("bfloat16", "float16")
}

# A picture has few lines, to be read on a phone; the tables have every arm.
DRAWN = ["float32", "bfloat16", "float16 without a loss scale", "float16"]
STYLE_OF = dict(zip(DRAWN, STYLES, strict=False))
STYLE_OF |= dict.fromkeys([*RULE_ARMS, "float16, sampler at O1"], STYLES[4])


class Panel(NamedTuple):
    """A part of a picture: a figure of some arms over the steps."""

    figure: str
    title: str
    arms: list[str] = DRAWN
    scale: str = "linear"


class Task(NamedTuple):
    """A program of `examples/`, and the figure by which its runs are compared.

    Attributes:
      figure: The name of the held-out figure in a report.
      label: This figure in words.
      digits: How many digits of it to show after the point.
      others: More columns of the table: their titles, by the names of the figures.
      over_all: Columns over all reports, not only the last one.
      arms: The precision and other options of each arm, by its name.
      folder: Where its runs and pictures are.
      also_drawn: A panel beneath that of the held-out figure.
    """

    figure: str
    label: str
    digits: int
    others: dict[str, str] = {}  # noqa: RUF012, never changed.
    arms: Arms = ARMS
    folder: str = "real_models"
    over_all: dict[str, str] = {}  # noqa: RUF012
    also_drawn: Panel | None = None


TASKS = {
    "gpt": Task("held_out_bits_per_byte", "held-out bits per byte", 3),
    "resnet": Task(
        "held_out_loss", "held-out loss", 3, {"held_out_accuracy": "accuracy"}
    ),
    "lstm": Task(
        "held_out_bits_per_chord",
        "held-out bits per chord",
        2,
        arms=ARMS | RULE_ARMS,
        also_drawn=Panel(
            "flushed",
            "share of gradient entries flushed to zero",
            ["bfloat16", "float16", *RULE_ARMS],
        ),
    ),
    "ppo": Task(
        "held_out_score",
        "held-out score",
        0,
        {"policy_kl": "KL divergence"},
        also_drawn=Panel(
            "policy_kl",
            "KL divergence of playing and training",
            ["bfloat16", "float16"],
            "log",
        ),
    ),
    "grpo": Task(
        "held_out_reward",
        "held-out reward",
        3,
        arms={arm: ARMS[arm] for arm in ARMS if arm != "float16 parameters"}
        | SAMPLER_ARMS,
        folder="rl",
        over_all={
            "difference_mean": "difference",
            "difference_max": "largest",
            "mismatch_kl": "KL",
            "outside_clip": "outside",
            "grad_norm": "norm",
        },
        also_drawn=Panel(
            "mismatch_kl",
            "KL divergence of sampler and learner",
            ["float32", "bfloat16", "float16", "float16, sampler at O1"],
            "log",
        ),
    ),
}

Run = dict[str, Any]  # A task, an arm, a seed, and columns of figures.


def train(task: str, arm: str, seed: int) -> Run:
    """Trains one arm, and returns its reports as columns."""
    precision, *options = TASKS[task].arms[arm]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "result.json"
        command = [sys.executable, EXAMPLES / f"train_{task}.py", f"--json={file}"]
        command += ["--precision", precision, "--seed", str(seed), *options]
        environment = os.environ | ENVIRONMENT
        subprocess.run(command, env=environment, check=True, capture_output=True)
        records = json.loads(file.read_text())["records"]
    columns = {
        name: [float(f"{record[name]:.6g}") for record in records]
        for name in records[0]
    }
    return {"task": task, "arm": arm, "seed": seed, "columns": columns}


def record(tasks: list[str], seeds: list[int], jobs: int) -> None:
    """Trains every arm that `runs.json` lacks, and adds it there."""
    runs = load(tasks)
    known = {(run["task"], run["arm"], run["seed"]) for run in runs}
    missing = [
        (task, arm, seed)
        for seed in seeds
        for task in tasks
        for arm in TASKS[task].arms
        if (task, arm, seed) not in known
    ]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(train, *each) for each in missing]
        done = concurrent.futures.as_completed(futures)
        for future in tqdm(done, total=len(futures)):
            runs.append(future.result())
            folder = TASKS[runs[-1]["task"]].folder
            here = [run for run in runs if TASKS[run["task"]].folder == folder]
            lines = ",\n".join(json.dumps(run) for run in here)
            title = json.dumps(versions())
            text = f'{{"versions": {title}, "runs": [\n{lines}\n]}}\n'
            (BENCHMARKS / folder / "runs.json").write_text(text)


def load(tasks: list[str]) -> list[Run]:
    """Returns the recorded runs in the folders of some tasks."""
    folders = dict.fromkeys(TASKS[task].folder for task in tasks)
    files = [BENCHMARKS / folder / "runs.json" for folder in folders]
    texts = [file.read_text() for file in files if file.exists()]
    return [run for text in texts for run in json.loads(text)["runs"]]


def recorded_arms(task: Task, runs: list[Run]) -> list[str]:
    """Returns the arms of a task that have runs, in the order of the table."""
    recorded = {run["arm"] for run in runs}
    return [arm for arm in task.arms if arm in recorded]


def of_arm(runs: list[Run], arm: str, name: str) -> np.ndarray:
    """Returns a figure of an arm, `f[seeds, reports]`."""
    return np.array([run["columns"][name] for run in runs if run["arm"] == arm])


def rows_of(task: Task, runs: list[Run]) -> list[dict[str, str]]:
    """Returns the table of a task, with a row for each arm."""
    rows = []
    for arm in recorded_arms(task, runs):
        last = of_arm(runs, arm, task.figure)[:, -1]
        low, mean, high = (
            f"{x:.{task.digits}f}" for x in (last.min(), last.mean(), last.max())
        )
        bits = np.log2(of_arm(runs, arm, "loss_scale")[:, -1]).mean()
        row = {"arm": arm, task.label: f"{mean} ({low} to {high})"}
        for name, title in task.others.items():
            row[title] = f"{of_arm(runs, arm, name)[:, -1].mean():.3g}"
        for name, title in task.over_all.items():
            values = of_arm(runs, arm, name)
            row[title] = f"{values.max() if 'max' in name else values.mean():.2g}"
        row["skipped steps"] = f"{of_arm(runs, arm, 'skipped')[:, -1].mean():.1f}"
        row["final scale"] = f"2**{bits:.3g}"
        if "flushed" in runs[0]["columns"]:
            row["flushed"] = f"{of_arm(runs, arm, 'flushed').mean():.3%}"
        rows.append(row)
    return rows


@plt.rc_context({"font.size": 12})
def draw(task: Task, runs: list[Run], file: pathlib.Path) -> None:
    """Draws figures of each arm over the steps: the mean and the range of the seeds."""
    panels = [Panel(task.figure, task.label), task.also_drawn]
    panels = [panel for panel in panels if panel is not None]
    figure, axes = plt.subplots(
        len(panels), figsize=(6, 4.5 * len(panels)), squeeze=False, layout="constrained"
    )
    for ax, panel in zip(axes.flat, panels, strict=True):
        for arm in panel.arms:
            style = STYLE_OF[arm]
            steps = of_arm(runs, arm, "step")[0]
            values = of_arm(runs, arm, panel.figure)
            ax.plot(steps, values.mean(axis=0), label=arm, **style)
            low, high = values.min(axis=0), values.max(axis=0)
            ax.fill_between(steps, low, high, color=style["color"], alpha=0.12)
        ax.set_title(panel.title, loc="left")
        ax.set_yscale(panel.scale)
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
        # Beneath the axis, where it hides no line.
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    """Trains what is missing if asked to, prints the tables, and draws the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="train what is missing")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.tasks, arguments.seeds, arguments.jobs)
    recorded = load(arguments.tasks)
    for name in arguments.tasks:
        runs = [run for run in recorded if run["task"] == name]
        if runs:
            print(f"\n#### {name}\n")
            print(table_of(rows_of(TASKS[name], runs)))
            draw(TASKS[name], runs, BENCHMARKS / TASKS[name].folder / f"{name}.png")


if __name__ == "__main__":
    main()
