"""The demo: float16 alone fails; with a loss scale it trains as well as float32.

    python -m optax_lossscale.demo [--seed N ...] [--steps N] [--autocast] [--plot FILE]

It trains the same network on scikit-learn's digits (1,797 real 8x8 images) in five
variants, which differ in dtype and loss scale. Nothing is scaled down to make float16
fail: the loss is a mean over batch and classes, and five sigmoid layers shrink its
gradients below float16's range.

The table's "flushed to zero" is the share of nonzero gradient entries that came out as
zero, and its "final scale" is the one that the next step would use.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import optax_lossscale as ols
from optax_lossscale._ground.types import PyTree

try:
    import flax.linen as nn
    import matplotlib.pyplot as plt
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f"the demo needs {error.name}: pip install 'optax-lossscale[demo]'"
    ) from error

TRAIN_SIZE = 1400
BATCH_SIZE = 1024
LEARNING_RATE = 2e-3
STATIC_SCALE = 8.0
STATIC_SCALE_NOTE = f"""\
float16_static always scales by {STATIC_SCALE:g}, as Micikevicius et al. (2018,
https://arxiv.org/abs/1710.03740) did to train the detector Multibox SSD."""
TIMES_COUNTED = 20  # In a run, how often flushed gradient entries are counted.
VARIANTS: dict[str, tuple[jax.typing.DTypeLike, ols.LossScale]] = {
    "float32": (jnp.float32, ols.no_loss_scale()),
    "float16": (jnp.float16, ols.no_loss_scale()),
    "float16_static": (jnp.float16, ols.static_loss_scale(STATIC_SCALE)),
    "float16_dynamic": (jnp.float16, ols.dynamic_loss_scale(growth_interval=200)),
    "bfloat16": (jnp.bfloat16, ols.no_loss_scale()),
}


class Data(NamedTuple):
    """Digits: images, `f32[n, 64]` from 0 to 1, and labels, `i32[n]`."""

    images: jax.Array
    labels: jax.Array


class Run(NamedTuple):
    """One training run: the cells of the table, and what the picture shows.

    Attributes:
      results: The cells, by the titles of their columns.
      losses: The loss of each step, `f32[steps]`.
      loss_scales: The scale that each step used, and at the end the final scale, which
        the next step would use, `f32[steps + 1]`.
    """

    results: dict[str, str]
    losses: np.ndarray
    loss_scales: np.ndarray


class MLP(nn.Module):
    """Four hidden layers of width 64 and an output layer of 10, all with sigmoid."""

    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the outputs, `dtype[n, 10]`, from images `f32[n, 64]`."""
        hidden = images
        for width in (64, 64, 64, 64, 10):
            hidden = nn.sigmoid(nn.Dense(width, dtype=self.dtype)(hidden))
        return hidden


def load_data() -> tuple[Data, Data]:
    """Loads the digits: 1,400 images for training, and 397 for testing."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = jnp.asarray(images[order] / 16, jnp.float32)
    labels = jnp.asarray(labels[order], jnp.int32)
    n = TRAIN_SIZE
    return Data(images[:n], labels[:n]), Data(images[n:], labels[n:])


def make_apply(dtype: jax.typing.DTypeLike, *, by_autocast: bool) -> Any:
    """Returns the network in `dtype`, either built in it or cast to it by autocast."""
    if by_autocast and dtype != jnp.float32:
        return ols.autocast(MLP(jnp.float32).apply, dtype)
    return MLP(dtype).apply


def loss_fn(params: PyTree, apply: Callable[..., Any], batch: Data) -> jax.Array:
    """Mean squared error over batch and classes. The mean is taken in float32."""
    outputs = jnp.asarray(apply(params, batch.images), jnp.float32)
    targets = jax.nn.one_hot(batch.labels, 10, dtype=jnp.float32)
    return jnp.mean((outputs - targets) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def count_flushed(
    apply: Callable[..., Any], params: PyTree, opt_state: PyTree, batch: Data
) -> jax.Array:
    """Counts gradient entries flushed to zero: zero here, but nonzero in float32.

    Returns that count, and the count of all nonzero entries in float32, as `i32[2]`.
    """
    exact = jax.grad(loss_fn)(params, MLP(jnp.float32).apply, batch)
    scaled = ols.scaled_grad(loss_fn, opt_state)(params, apply, batch)
    is_zero = ravel_pytree(ols.unscale(scaled, opt_state))[0] == 0
    is_nonzero = ravel_pytree(exact)[0] != 0
    return jnp.stack([jnp.sum(is_zero & is_nonzero), jnp.sum(is_nonzero)])


def train(
    name: str,
    apply: Callable[..., Any],
    rule: ols.LossScale,
    data: tuple[Data, Data],
    seed: int,
    steps: int,
) -> Run:
    """Trains one variant with one seed, and measures its results."""
    train_data, test_data = data
    params_key, batch_key = jax.random.split(jax.random.key(seed))
    params = MLP(jnp.float32).init(params_key, train_data.images)
    tx = ols.loss_scaled(optax.adam(LEARNING_RATE), rule)
    opt_state = tx.init(params)

    def draw_batch(step: int) -> Data:
        key = jax.random.fold_in(batch_key, step)
        rows = jax.random.permutation(key, TRAIN_SIZE)[:BATCH_SIZE]
        return Data(*(x[rows] for x in train_data))

    @jax.jit
    def train_step(params: PyTree, opt_state: PyTree, step: int) -> Any:
        grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state)
        loss, grads = grad_fn(params, apply, draw_batch(step))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses, loss_scales, flushed = [], [ols.get_loss_scale(opt_state)], []
    # Without a terminal there is no bar, which would fill a log.
    for step in tqdm(range(steps), desc=f"{name:15}", unit="step", disable=None):
        params, opt_state, loss = train_step(params, opt_state, step)
        losses.append(loss)
        loss_scales.append(ols.get_loss_scale(opt_state))
        if (step + 1) % max(steps // TIMES_COUNTED, 1) == 0:
            flushed.append(count_flushed(apply, params, opt_state, draw_batch(step)))

    flushed_count, nonzero_count = np.sum(flushed, axis=0)
    predicted = apply(params, test_data.images).argmax(axis=-1)
    results = {
        "test accuracy": f"{jnp.mean(predicted == test_data.labels):.3f}",
        "final loss": f"{losses[-1]:.4f}",
        "skipped steps": str(ols.loss_scale_metrics(opt_state)["total_notfinite"]),
        # In backticks, or `2**3 2**3` would turn bold.
        "final scale": f"`2**{np.log2(loss_scales[-1]):g}`",
        "flushed to zero": f"{flushed_count / nonzero_count:.1%}",
    }
    return Run(results, np.array(losses), np.array(loss_scales))


def format_table(runs: dict[str, list[Run]]) -> str:
    """Formats the results as a Markdown table with a row for each variant.

    A cell holds a figure for each seed, and is padded to the width of its column.
    """
    table = [["variant", *runs]]
    for title in runs["float32"][0].results:
        cells = [" ".join(run.results[title] for run in runs[name]) for name in runs]
        table.append([title, *cells])
    for index, column in enumerate(table):
        width = max(map(len, column))
        align = ":".ljust if index == 0 else ":".rjust
        column.insert(1, align(width, "-"))
        column[:] = [text.ljust(width) for text in column]
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*table, strict=True))


def plot(runs: dict[str, Run], file: str) -> None:
    """Draws the loss curves, with the loss scales beneath, into a file."""
    scaled = ("float16_static", "float16_dynamic")
    losses = {name: run.losses for name, run in runs.items()}
    scales = {name: runs[name].loss_scales for name in scaled}
    loss_ax, scale_ax = ols.plotting.plot_training(losses, scales)
    loss_ax.set_title("float16 stalls; with a dynamic scale it trains like float32")
    first, final = np.log2(scales["float16_dynamic"][[0, -1]])
    scale_ax.set_title(f"The dynamic scale goes from 2**{first:g} to 2**{final:g}")
    plt.savefig(file, dpi=150)
    plt.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Trains every variant, prints the table, and draws the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_lossscale.demo",
        description="Train on real digits in float32, float16 and bfloat16, with and "
        "without a loss scale.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, nargs="+", default=[0], help="of weights and batches")
    add("--steps", type=int, default=1000, help="how many steps to train")
    add("--autocast", action="store_true", help="cast the float32 network by autocast")
    add("--plot", default="loss_scale_demo.png", help="write the picture here")
    arguments = parser.parse_args(argv)
    data, runs = load_data(), {}
    for name, (dtype, rule) in VARIANTS.items():
        apply = make_apply(dtype, by_autocast=arguments.autocast)
        runs[name] = [
            train(name, apply, rule, data, seed, arguments.steps)
            for seed in arguments.seed
        ]
    print(f"\n{format_table(runs)}\n\n{STATIC_SCALE_NOTE}\n")
    plot({name: of_seeds[0] for name, of_seeds in runs.items()}, arguments.plot)
    print(f"picture: {arguments.plot}")


if __name__ == "__main__":
    main()
