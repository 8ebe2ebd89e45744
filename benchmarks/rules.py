"""Runs every rule on traces of gradient magnitudes: four tables and a picture.

    python benchmarks/rules.py [--quick] [--record] [--plot FILE]

A trace gives log2 of the gradients' largest magnitude at each step. A rule skips a step
if this magnitude times the scale exceeds float16's largest value; if the product is
below float16's smallest value, the rule sees zero. Five traces are made up;
`record_traces.py` recorded three more in `traces.npz`. The third table has bad batches
at many times and levels, the fourth activations larger than the parameters' gradients.
`--quick` runs only the two rules of the picture.
"""

import argparse
import functools
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.stats import norm

import optax_lossscale as ols
from _lib.files import check_picture_file
from _lib.tables import add_outputs, publish, versions
from optax_lossscale.plotting._axes import BLUE, RED

STEPS, SEEDS = 20_000, 10
FLOAT16_MAX = float(jnp.finfo(jnp.float16).max)
FIGURES = "skips / unused bits / steps to scale / flushed to zero"
RECORDED = pathlib.Path(__file__).with_name("traces.npz")
PRESETS = ["torch", "keras", "tf_keras", "mindspore_fixed", "mindspore_dynamic"]
PRESETS += ["flax", "jmp", "apex", "megatron", "deepspeed", "fairseq"]
RULES = {f"presets.{name}": getattr(ols.presets, name)() for name in PRESETS}
RULES["dynamic_loss_scale"] = ols.dynamic_loss_scale()
RULES["headroom_loss_scale"] = ols.headroom_loss_scale()
# The rules that are compared, with their names and styles in the picture.
COMPARED = {
    "presets.torch": {"label": "PyTorch's rule", "color": BLUE},
    "headroom_loss_scale": {"label": "headroom", "color": RED},
}
# The histories in the picture, which would be too long with all of them.
DRAWN = ["decaying 8 bits", "spikes of 8 bits", "sudden rise of 9 bits"]
DRAWN += ["text, transformer"]
WINDOW = 25  # Steps for which the picture shows one limit, the lowest.


class Trace(NamedTuple):
    """The magnitudes of the gradients at each step; all arrays are `f32[seeds, steps]`.

    Attributes:
      largest: log2 of the largest magnitude; NaN for a bad batch.
      mean: Mean of log2 of the nonzero magnitudes.
      std: Standard deviation of log2 of the nonzero magnitudes.
    """

    largest: np.ndarray
    mean: np.ndarray
    std: np.ndarray


# For each rule and trace: the scales, and whether each step was applied.
Runs = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]


def synthetic_traces() -> dict[str, Trace]:
    """Makes up five traces, with noise of half a bit."""
    rng = np.random.default_rng(0)
    steps = np.arange(STEPS)
    noise = rng.normal(0, 0.5, (5, SEEDS, STEPS))
    spikes = 8 * (rng.random((SEEDS, STEPS)) < 1e-3)
    nan = np.where(np.isin(steps, [5000, 10_000, 15_000]), np.nan, 0)
    log2 = {
        "stationary": -6,
        "decaying 8 bits": -8 * (1 - np.exp(-steps / 3000)),
        "spikes of 8 bits": -6 + spikes,
        "sudden rise of 9 bits": -6 + 9 * (steps >= STEPS // 2),
        "three NaN batches": -6 + nan,
    }
    # The magnitudes span some 40 binades, as those of SSD in Micikevicius et al. do
    # (figure 3).
    return {
        name: Trace(x + n, (np.nan_to_num(x) + 0 * n) - 20, np.full_like(n, 6))
        for (name, x), n in zip(log2.items(), noise, strict=True)
    }


def recorded_traces() -> dict[str, Trace]:
    """Loads the traces that `record_traces.py` wrote."""
    with np.load(RECORDED) as file:
        columns = {name: file[name].astype(np.float32).T[:, None] for name in file}
    return {name: Trace(*column) for name, column in columns.items()}


def run(
    rule: str, largest: np.ndarray, more_bits: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a rule on traces, all of them at once.

    Args:
      rule: The name of a loss scale rule.
      largest: log2 of the largest magnitude, `f32[runs, steps]`.
      more_bits: By how much something else overflows earlier, such as activations.

    Returns:
      The scale before each step, and whether the step was applied; `[runs, steps]`.
    """
    scales, applied = run_compiled(rule, jnp.float32(largest), jnp.float32(more_bits))
    return np.asarray(scales), np.asarray(applied)


@functools.partial(jax.jit, static_argnums=0)
def run_compiled(name: str, largest: jax.Array, more_bits: jax.Array) -> Any:
    """Does what `run` says, in one program for all traces of one length."""
    rule = RULES[name]

    def step(state, largest):
        magnitude = jnp.exp2(largest)
        scaled = magnitude * state.loss_scale
        finite = scaled * jnp.exp2(more_bits) <= FLOAT16_MAX  # False for NaN.
        magnitude = jnp.where(scaled > 2.0**-25, magnitude, 0.0)
        after = rule.adjust(state, finite, jnp.where(finite, magnitude, jnp.inf))
        return after, (state.loss_scale, finite)

    return jax.vmap(lambda run: jax.lax.scan(step, rule.init(), run)[1])(largest)


def measure(trace: Trace, scales: np.ndarray, applied: np.ndarray) -> dict[str, float]:
    """Returns the figures of one rule on one trace, averaged over seeds.

    Unused bits and flushed entries are averaged over the applied steps only; "steps to
    scale" is the median over seeds.
    """
    bits = np.log2(scales)
    unused = np.log2(FLOAT16_MAX) - bits - trace.largest
    flushed = norm.cdf((-25 - bits - trace.mean) / trace.std)
    near = applied & (unused <= 4)
    reached = np.where(near.any(axis=1), near.argmax(axis=1), np.inf)
    return {
        "skips": float(np.mean(np.sum(~applied, axis=1))),
        "unused bits": float(np.mean(unused[applied])),
        "steps to scale": float(np.median(reached)),
        "flushed": float(np.mean(flushed[applied])),
    }


def nan_histories() -> dict[str, np.ndarray]:
    """For each pattern, whether each step is a bad batch; `bool[steps]`."""
    rng = np.random.default_rng(0)
    steps = np.arange(STEPS)
    periods = [100, 300, 500, 1000, 2000, 2300]
    patterns = {f"every {period} steps": steps % period == 50 for period in periods}
    for period in (100, 1000, 2000):
        bad = rng.random(STEPS) < 1 / period
        patterns[f"at random, one in {period}"] = bad
    patterns["20 in a row, every 2000"] = steps % 2000 < 20
    patterns["20 in turn with good ones, once"] = (steps < 540) & (steps >= 500)
    patterns["20 in turn with good ones, once"] &= steps % 2 == 0
    patterns["5 in turn with good ones, every 1000"] = steps % 1000 < 10
    patterns["5 in turn with good ones, every 1000"] &= steps % 2 == 0
    return patterns


def nan_table() -> list[dict[str, str]]:
    """Returns a table of bad batches, at levels from 0 to 30 bits below the top."""
    rng = np.random.default_rng(1)
    levels = np.repeat(np.arange(0, 31, 3), 2)[:, None]
    noise = (
        0.5
        * rng.normal(size=(len(levels), STEPS))
        * (np.arange(len(levels)) % 2)[:, None]
    )
    calm = np.log2(FLOAT16_MAX) - levels + noise
    histories = nan_histories()
    largest = np.concatenate(
        [np.where(bad, np.nan, calm) for bad in histories.values()]
    )
    runs = {
        name: [np.split(array, len(histories)) for array in run(name, largest)]
        for name in COMPARED
    }
    rows = []
    for index, pattern in enumerate(histories):
        row = {"bad batches": pattern}
        figures = {}
        for name in COMPARED:
            scales, applied = (arrays[index] for arrays in runs[name])
            bits = np.log2(scales)
            unused = np.log2(FLOAT16_MAX) - bits - calm
            flushed = norm.cdf((-25 - bits - (calm - noise - 20)) / 6)
            zero = applied & (calm + bits <= -25)
            figures[name] = np.array(
                [np.mean(x, axis=1, where=applied) for x in (unused, flushed, zero)]
            )
            unused, flushed, zero = figures[name].mean(axis=1)
            row[name] = f"{unused:.1f} / {flushed:.1%} / {zero:.1%}"
        torch, headroom = figures.values()
        more = (headroom - torch).max(axis=1)
        row["at most more"] = (
            f"{more[0]:.2f} / {100 * more[1]:.2f} / {100 * more[2]:.2f}"
        )
        rows.append(row)
    return rows


def activations_table(traces: dict[str, Trace]) -> list[dict[str, str]]:
    """Returns a table of traces in which activations overflow before the parameters."""
    rows = []
    for more_bits in (8.0, 12.0):
        for kind in ("stationary", "decaying 8 bits", "sudden rise of 9 bits"):
            row = {"trace": kind, "bits above": f"{more_bits:.0f}"}
            for name in COMPARED:
                scales, applied = run(name, traces[kind].largest, more_bits)
                unused = (
                    np.log2(FLOAT16_MAX / scales) - traces[kind].largest - more_bits
                )
                skips = np.mean(np.sum(~applied, axis=1))
                row[name] = f"{skips:.1f} / {np.mean(unused[applied]):.1f}"
            rows.append(row)
    return rows


def cell(result: dict[str, Any]) -> str:
    """Formats the figures of one rule on one trace as a cell of the table."""
    steps = result["steps to scale"]
    return (
        f"{result['skips']:.1f} / {result['unused bits']:.1f} / "
        f"{f'{steps:.0f}' if np.isfinite(steps) else 'never'} / "
        f"{result['flushed']:.2%}"
    )


def run_all(names: Iterable[str], traces: dict[str, Trace]) -> Runs:
    """Runs rules on every trace."""
    largest = np.concatenate([trace.largest for trace in traces.values()])
    of_rules = {}
    for name in names:
        arrays = [np.split(array, len(traces)) for array in run(name, largest)]
        of_rules[name] = dict(zip(traces, zip(*arrays, strict=True), strict=True))
    return of_rules


def figures(traces: dict[str, Trace], runs: Runs) -> dict[str, dict[str, Any]]:
    """Returns the figures of each rule on each trace."""
    return {
        name: {kind: measure(traces[kind], *of_kind) for kind, of_kind in row.items()}
        for name, row in runs.items()
    }


def table(traces: dict[str, Trace], runs: Runs) -> list[dict[str, str]]:
    """Returns a table with a row for each rule."""
    return [
        {"rule": name, **{kind: cell(result) for kind, result in row.items()}}
        for name, row in figures(traces, runs).items()
    ]


@plt.rc_context({"font.size": 12})
def plot(traces: dict[str, Trace], runs: Runs, file: pathlib.Path) -> None:
    """Draws some rules' scales over steps, and the largest scales that fit float16.

    Each panel shows the first seed of a trace, and counts the steps skipped there.
    """
    figure, axes = plt.subplots(
        len(DRAWN), figsize=(6, 4 * len(DRAWN)), layout="constrained"
    )
    for ax, kind in zip(axes, DRAWN, strict=True):
        largest = traces[kind].largest[0]
        limit = np.log2(FLOAT16_MAX) - np.nanmax(largest.reshape(-1, WINDOW), axis=1)
        ax.stairs(
            limit,
            np.arange(0, len(largest) + 1, WINDOW),
            baseline=None,
            color="#888888",
            linewidth=0.8,
            label="largest that fits float16",
        )
        for name, style in COMPARED.items():
            scales, applied = (array[0] for array in runs[name][kind])
            label = f"{style['label']}: {np.sum(~applied)} skipped"
            steps = np.arange(len(scales))
            ax.step(
                steps, np.log2(scales), where="post", color=style["color"], label=label
            )
        ax.set_title(kind, loc="left")
        ax.set(xlabel="step", ylabel="log2 of scale")
        ax.locator_params(axis="x", nbins=5)
        ax.locator_params(axis="y", integer=True)
        ax.grid(alpha=0.3)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    """Prints the tables, and draws the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument(
        "--plot", type=check_picture_file, help="draw the picture to a file"
    )
    parser.add_argument("--quick", action="store_true", help="run two rules only")
    arguments = parser.parse_args()
    traces, recorded = synthetic_traces(), recorded_traces()
    names = list(COMPARED) if arguments.quick else list(RULES)
    runs, recorded_runs = run_all(names, traces), run_all(names, recorded)
    tables = {
        f"Made-up histories: {FIGURES}": table(traces, runs),
        f"Recorded histories: {FIGURES}": table(recorded, recorded_runs),
        "Bad batches: unused bits / flushed to zero / updates that are all zero": (
            nan_table()
        ),
        "Activations that overflow first: skips / unused bits": (
            activations_table(traces)
        ),
    }
    publish(versions(), tables, arguments)
    if arguments.plot is not None:
        every_run = {name: runs[name] | recorded_runs[name] for name in COMPARED}
        plot(traces | recorded, every_run, arguments.plot)


if __name__ == "__main__":
    main()
