"""Every rule on traces of gradient magnitudes: two tables and a picture.

    python benchmarks/rules.py [--json FILE] [--plot FILE]

A trace gives log2 of the gradients' largest magnitude at each step; a step is skipped
where that times the scale is above float16's largest value. Five traces are made up,
three are recorded: `traces.npz`, by `record_traces.py`.
"""

import argparse
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.stats import norm
from tables import print_table, versions

import optax_lossscale as ols

STEPS, SEEDS = 20_000, 10
FLOAT16_MAX = float(jnp.finfo(jnp.float16).max)
RECORDED = pathlib.Path(__file__).with_name("traces.npz")
PRESETS = ["torch", "keras", "tf_keras", "mindspore_fixed", "mindspore_dynamic"]
PRESETS += ["flax", "jmp", "apex", "megatron", "deepspeed", "fairseq"]
RULES = {f"presets.{name}": getattr(ols.presets, name)() for name in PRESETS}
RULES["dynamic_loss_scale"] = ols.dynamic_loss_scale()
RULES["smooth_loss_scale"] = ols.smooth_loss_scale()
RULES["headroom_loss_scale"] = ols.headroom_loss_scale()
DRAWN = {
    "presets.torch": {"color": "#0072B2"},
    "presets.megatron": {"color": "#E69F00", "linestyle": ":"},
    "smooth_loss_scale": {"color": "#009E73", "linestyle": "--"},
    "headroom_loss_scale": {"color": "#D55E00"},
}


class Trace(NamedTuple):
    """For each step, of the gradients' magnitudes, `f32[seeds, steps]` each.

    Attributes:
      largest: log2 of the largest one; NaN for a bad batch.
      mean: Mean of log2 of those that are not zero.
      std: Its standard deviation.
    """

    largest: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def synthetic_traces() -> dict[str, Trace]:
    """Five histories of the largest magnitude, with noise of half a bit."""
    rng = np.random.default_rng(0)
    t = np.arange(STEPS)
    noise = rng.normal(0, 0.5, (5, SEEDS, STEPS))
    spikes = 8 * (rng.random((SEEDS, STEPS)) < 1e-3)
    nan = np.where(np.isin(t, [5000, 10_000, 15_000]), np.nan, 0)
    log2 = {
        "stationary": -6,
        "decaying 8 bits": -8 * (1 - np.exp(-t / 3000)),
        "spikes of 8 bits": -6 + spikes,
        "sudden rise of 9 bits": -6 + 9 * (t >= STEPS // 2),
        "three NaN batches": -6 + nan,
    }
    # As wide as what Micikevicius et al. show of SSD (figure 3): some 40 binades.
    return {
        name: Trace(x + n, (np.nan_to_num(x) + 0 * n) - 20, np.full_like(n, 6))
        for (name, x), n in zip(log2.items(), noise, strict=True)
    }


def recorded_traces() -> dict[str, Trace]:
    """What `record_traces.py` wrote."""
    with np.load(RECORDED) as file:
        columns = {name: file[name].astype(np.float32).T[:, None] for name in file}
    return {name: Trace(*column) for name, column in columns.items()}


Runs = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]


def run(rule: ols.LossScale, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale before each step, and whether the step was applied; `[runs, steps]`."""

    def step(state, largest):
        magnitude = jnp.exp2(largest)
        finite = magnitude * state.loss_scale <= FLOAT16_MAX  # False for NaN.
        after = rule.adjust(state, finite, jnp.where(finite, magnitude, jnp.inf))
        return after, (state.loss_scale, finite)

    def run_once(largest):
        return jax.lax.scan(step, rule.init(), largest)[1]

    scales, applied = jax.jit(jax.vmap(run_once))(jnp.asarray(largest, jnp.float32))
    return np.asarray(scales), np.asarray(applied)


def measure(trace: Trace, scales: np.ndarray, applied: np.ndarray) -> dict[str, float]:
    """Means over seeds; bits and flushed entries over the steps that were applied."""
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


def show(result: dict[str, Any]) -> str:
    """One cell."""
    steps = result["steps to scale"]
    return (
        f"{result['skips']:.1f} / {result['unused bits']:.1f} / "
        f"{f'{steps:.0f}' if np.isfinite(steps) else 'never'} / "
        f"{result['flushed']:.2%}"
    )


def run_all(traces: dict[str, Trace]) -> Runs:
    """Every rule on every trace, all traces of a rule at once."""
    largest = np.concatenate([trace.largest for trace in traces.values()])
    of_rules = {}
    for name, rule in RULES.items():
        arrays = [np.split(array, len(traces)) for array in run(rule, largest)]
        of_rules[name] = dict(zip(traces, zip(*arrays, strict=True), strict=True))
    return of_rules


def table(traces: dict[str, Trace], runs: Runs) -> dict[str, dict[str, Any]]:
    """Prints a line a rule, and returns the figures."""
    results = {
        name: {kind: measure(traces[kind], *of_kind) for kind, of_kind in row.items()}
        for name, row in runs.items()
    }
    print_table(
        [
            {"rule": name, **{kind: show(result) for kind, result in row.items()}}
            for name, row in results.items()
        ]
    )
    return results


def plot(traces: dict[str, Trace], runs: Runs, file: pathlib.Path) -> None:
    """Draws scales over steps, and the largest one that would not have overflowed."""
    figure, axes = plt.subplots(
        len(traces), 1, figsize=(9, 2 * len(traces)), layout="constrained", sharex=True
    )
    for ax, (kind, trace) in zip(axes, traces.items(), strict=True):
        limit = np.log2(FLOAT16_MAX) - trace.largest[0].reshape(-1, 25)
        ax.fill_between(
            np.arange(0, STEPS, 25),
            np.nanmin(limit, axis=1),
            30,
            color="#DDDDDD",
            linewidth=0,
            label="overflows",
        )
        for name, style in DRAWN.items():
            scales, _ = runs[name][kind]
            ax.plot(np.log2(scales[0]), label=name, linewidth=1.4, **style)
        ax.set(title=kind, ylabel="log2 of scale", ylim=(8, 27))
    axes[0].legend(ncols=5, fontsize="small", loc="lower right")
    axes[-1].set_xlabel("step")
    figure.suptitle("headroom_loss_scale follows the gradients, and seldom overflows")
    figure.savefig(file, dpi=72)
    plt.close(figure)


def main() -> None:
    """Prints the tables, and writes them as JSON, and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    print(f"{versions()}; skips / unused bits / steps to scale / flushed to zero\n")
    traces, recorded = synthetic_traces(), recorded_traces()
    runs = run_all(traces)
    results = {"synthetic": table(traces, runs)}
    print()
    results["recorded"] = table(recorded, run_all(recorded))
    if args.plot:
        plot(traces, runs, args.plot)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
