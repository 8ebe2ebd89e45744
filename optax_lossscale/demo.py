"""The main job: float16 fails, and with a loss scale trains as well as float32.

    python -m optax_lossscale.demo [--seed N] [--steps N] [--rule NAME] [--autocast]
        [--json FILE] [--plot FILE]

Trains the same network on scikit-learn's digits (1,797 real 8x8 images) in five
ways. Nothing is scaled down to make float16 fail: the loss is a mean over batch and
classes, and four sigmoid layers shrink its gradients below float16's range.
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from optax_lossscale._types import PyTree

try:
    import flax.linen as nn
    import matplotlib.pyplot
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f"the demo needs {error.name}: pip install 'optax-lossscale[demo]'"
    ) from error

TRAIN_SIZE = 1400
BATCH_SIZE = 1024
LEARNING_RATE = 2e-3
REPORTS = 20  # Times that the progress bar moves, and that gradients are compared.

RULES = {
    "dynamic": ols.dynamic_loss_scale(growth_interval=200),
    "smooth": ols.smooth_loss_scale(growth_bits=1 / 200),
    "headroom": ols.headroom_loss_scale(),
}
VARIANTS: dict[str, tuple[jax.typing.DTypeLike, ols.LossScale]] = {
    "float32": (jnp.float32, ols.no_loss_scale()),
    "float16": (jnp.float16, ols.no_loss_scale()),
    "float16_static": (jnp.float16, ols.static_loss_scale(8.0)),
    "float16_dynamic": (jnp.float16, RULES["dynamic"]),
    "bfloat16": (jnp.bfloat16, ols.no_loss_scale()),
}


Apply: TypeAlias = Callable[..., Any]  # From parameters and images to outputs.


class Data(NamedTuple):
    """Digits: images `f32[n, 64]` in [0, 1], labels `i32[n]`."""

    images: jax.Array
    labels: jax.Array


class Run(NamedTuple):
    """What one variant did: its results, and its history step by step."""

    results: dict[str, float]
    losses: np.ndarray
    loss_scales: np.ndarray


class MLP(nn.Module):
    """Four hidden layers of 64 and one output a class, all with sigmoid."""

    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the outputs, `dtype[n, 10]`, from images `f32[n, 64]`."""
        hidden = images
        for width in (64, 64, 64, 64, 10):
            hidden = nn.sigmoid(nn.Dense(width, dtype=self.dtype)(hidden))
        return hidden


def load_data() -> tuple[Data, Data]:
    """Loads the digits: 1,400 images to train on, 397 to test with."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    data = Data(
        images=jnp.asarray(images[order] / 16, jnp.float32),
        labels=jnp.asarray(labels[order], jnp.int32),
    )
    return Data(*(x[:TRAIN_SIZE] for x in data)), Data(*(x[TRAIN_SIZE:] for x in data))


def make_apply(dtype: jax.typing.DTypeLike, by_autocast: bool) -> Apply:
    """The network in `dtype`: by its own setting, or the float32 one by autocast."""
    if by_autocast and dtype != jnp.float32:
        return ols.autocast(MLP(jnp.float32).apply, dtype)
    return MLP(dtype).apply


def make_loss_fn(apply: Apply) -> Callable[[PyTree, Data], jax.Array]:
    """Mean squared error over batch and classes; the mean is taken in float32."""

    def loss_fn(params: PyTree, batch: Data) -> jax.Array:
        outputs = jnp.asarray(apply(params, batch.images), jnp.float32)
        targets = jax.nn.one_hot(batch.labels, 10, dtype=jnp.float32)
        return jnp.mean((outputs - targets) ** 2)

    return loss_fn


def draw_batch(data: Data, key: jax.Array, step: jax.Array) -> Data:
    """Draws one step's batch, without replacement."""
    order = jax.random.permutation(jax.random.fold_in(key, step), TRAIN_SIZE)
    return Data(*(x[order[:BATCH_SIZE]] for x in data))


def make_train_chunk(
    loss_fn: Callable[[PyTree, Data], jax.Array],
    tx: optax.GradientTransformationExtraArgs,
    data: Data,
    key: jax.Array,
) -> Callable[..., Any]:
    """Several training steps in one compiled scan; gives losses and scales."""

    def train_step(carry: tuple[PyTree, PyTree], step: jax.Array) -> Any:
        params, opt_state = carry
        grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state)
        loss, grads = grad_fn(params, draw_batch(data, key, step))
        loss_scale = ols.get_loss_scale(opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss, loss_scale)

    return jax.jit(lambda carry, steps: jax.lax.scan(train_step, carry, steps))


@functools.partial(jax.jit, static_argnums=0)
def count_flushed(
    apply: Apply, params: PyTree, opt_state: PyTree, batch: Data
) -> jax.Array:
    """Gradient entries flushed to zero, and those nonzero in float32, `i32[2]`."""
    exact = jax.grad(make_loss_fn(MLP(jnp.float32).apply))(params, batch)
    scaled = ols.scaled_grad(make_loss_fn(apply), opt_state)(params, batch)
    grads = ols.unscale(scaled, opt_state)
    nonzero = jax.tree.map(lambda e: jnp.sum(e != 0), exact)
    flushed = jax.tree.map(lambda e, g: jnp.sum((e != 0) & (g == 0)), exact, grads)
    return jnp.stack([optax.tree.sum(flushed), optax.tree.sum(nonzero)])


def train(
    name: str,
    apply: Apply,
    rule: ols.LossScale,
    data: tuple[Data, Data],
    seed: int,
    steps: int,
) -> Run:
    """Trains one variant and measures it."""
    train_data, test_data = data
    params_key, batch_key = jax.random.split(jax.random.key(seed))
    params = MLP(jnp.float32).init(params_key, train_data.images)
    tx = ols.loss_scaled(optax.adam(LEARNING_RATE), rule)
    train_chunk = make_train_chunk(make_loss_fn(apply), tx, train_data, batch_key)

    carry = (params, tx.init(params))
    history, flushed = [], []
    with tqdm(total=steps, desc=f"{name:15}", unit="step") as bar:
        for chunk in np.array_split(np.arange(steps), min(REPORTS, steps)):
            carry, chunk_history = train_chunk(carry, chunk)
            history.append(chunk_history)
            batch = draw_batch(train_data, batch_key, chunk[-1])
            flushed.append(count_flushed(apply, *carry, batch))
            bar.update(len(chunk))

    params, opt_state = carry
    losses, loss_scales = (np.concatenate(x) for x in zip(*history, strict=True))
    flushed_count, nonzero_count = np.sum(flushed, axis=0)
    predicted = apply(params, test_data.images).argmax(axis=-1)
    metrics = ols.loss_scale_metrics(opt_state)
    results = {
        "accuracy": float(jnp.mean(predicted == test_data.labels)),
        "final_loss": float(losses[-1]),
        "skipped_steps": int(metrics["total_notfinite"]),
        "final_scale": float(metrics["loss_scale"]),
        "flushed_to_zero": float(flushed_count / nonzero_count),
    }
    return Run(results, losses, loss_scales)


def format_table(runs: dict[str, list[Run]]) -> str:
    """The results in Markdown: a line a variant, and in each cell a figure a seed."""
    columns: dict[str, Callable[[dict[str, float]], str]] = {
        "test accuracy": lambda r: f"{r['accuracy']:.3f}",
        "final loss": lambda r: f"{r['final_loss']:.4f}",
        "skipped steps": lambda r: f"{r['skipped_steps']}",
        "final scale": lambda r: f"2**{np.log2(r['final_scale']):g}",
        "flushed to zero": lambda r: f"{r['flushed_to_zero']:.1%}",
    }
    rows = [["variant", *columns]]
    for name, of_seeds in runs.items():
        cells = [
            " ".join(show(r.results) for r in of_seeds) for show in columns.values()
        ]
        rows.append([name, *cells])
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    rows.insert(
        1, [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
    )
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def plot(runs: dict[str, Run], file: Path) -> None:
    """Draws loss curves, and beneath them the loss scales, into a PNG."""
    losses = {name: run.losses for name, run in runs.items()}
    scaled = ("float16_static", "float16_dynamic")
    scales = {name: runs[name].loss_scales for name in scaled}
    loss_ax, scale_ax = ols.plotting.plot_training(losses, scales)
    loss_ax.set_title(
        "float16 stalls; with a dynamic loss scale it trains like float32"
    )
    scale_ax.set_title("The dynamic scale grows as long as nothing overflows")
    matplotlib.pyplot.savefig(file, dpi=110)
    matplotlib.pyplot.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every variant, then prints the table and draws the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_lossscale.demo",
        description="Train on real digits in float32, float16 and bfloat16, with and "
        "without a loss scale.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="seeds of weights and batches; the table has a figure for each",
    )
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="(default: 1000)"
    )
    parser.add_argument(
        "--rule", choices=RULES, default="dynamic", help="rule of float16_dynamic"
    )
    parser.add_argument(
        "--autocast", action="store_true", help="cast the float32 network by autocast"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results here"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        default=Path("loss_scale_demo.png"),
        help="write the picture here (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")

    data, runs = load_data(), {}
    for name, (dtype, rule) in VARIANTS.items():
        rule = RULES[arguments.rule] if name == "float16_dynamic" else rule
        apply = make_apply(dtype, arguments.autocast)
        steps, seeds = arguments.steps, arguments.seed
        runs[name] = [train(name, apply, rule, data, s, steps) for s in seeds]
    print(f"\n{format_table(runs)}\n")
    if arguments.json is not None:
        results: dict[str, Any] = {}
        for name, of_seeds in runs.items():
            each = [run.results for run in of_seeds]
            results[name] = each if len(each) > 1 else each[0]
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
        print(f"results: {arguments.json}")
    plot({name: of_seeds[0] for name, of_seeds in runs.items()}, arguments.plot)
    print(f"picture: {arguments.plot}")


if __name__ == "__main__":
    main()
