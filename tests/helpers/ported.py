"""Train a program of another project in float32 and in float16."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_lossscale as ols
from helpers.under_autocast import dtypes_of

SEEDS = range(4)


class Ported:
    """A training program: the original, or with `half=True` the same in float16.

    A program is a class `Program(Ported)` in a file of its own in `tests/ported`. It
    makes its optimizer, loss function and gradients with the first five methods below,
    which are all that `half` changes. It has

    * `init(seed)`, which returns the state: a dict of parameters, optimizer state and
      whatever else a step needs, such as a `key`, all that a skipped step may change;
    * `step(state, batch)`, jitted, which returns `(state, loss)`; by default that of
      `self.tx` and `self.loss_fn(params, batch)`, or `self.loss_fn(params, key, batch)`
      with a new key in each step, if the state has a `key`;
    * `batches(seed)`, which returns a list of batches, each a tree of arrays, at least
      one of which is floating.

    Attributes:
      falls_to: The final score must be below this fraction of the score at the start.
      last: How many of the last losses make the final score.
      low_share: More than this fraction of the products must be in float16.
    """

    falls_to = 0.5
    last = 20
    low_share = 0.5

    def __init__(self, half):
        self.half = half

    def autocast(self, loss_fn):
        return ols.autocast(loss_fn) if self.half else loss_fn

    def full_precision(self, fun):
        return ols.full_precision(fun) if self.half else fun

    def loss_scaled(self, tx):
        return ols.loss_scaled(tx) if self.half else tx

    def value_and_grad(self, loss_fn, opt_state, **settings):
        if self.half:
            return ols.scaled_value_and_grad(loss_fn, opt_state, **settings)
        return jax.value_and_grad(loss_fn, **settings)

    def where_applied(self, opt_state, new, old):
        return ols.where_applied(opt_state, new, old) if self.half else new

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, batch):
        params, opt_state, args = state["params"], state["opt_state"], (batch,)
        if "key" in state:
            key, step_key = jax.random.split(state["key"])
            state, args = {**state, "key": key}, (step_key, batch)
        loss, grads = self.value_and_grad(self.loss_fn, opt_state)(params, *args)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {**state, "params": params, "opt_state": opt_state}, loss

    def score(self, state, losses):
        """How well a state does, the lower the better, and positive.

        By default the mean of the losses, which are those of the last steps; at the
        start they are only the first.
        """
        return np.mean(losses)


class Run(NamedTuple):
    """A training with one seed, and its state after half of the batches."""

    first: float
    middle: dict
    final: float


@functools.cache
def trained(program_type, half):
    """The program, and its runs with all seeds."""
    program = program_type(half)
    return program, [_run(program, seed) for seed in SEEDS]


def _run(program, seed):
    initial, batches = program.init(seed), program.batches(seed)
    middle, losses = advance(program, initial, batches[: len(batches) // 2])
    first = program.score(initial, losses[:1])
    return Run(float(first), middle, final_score(program, middle, seed))


def final_score(program, middle, seed):
    """The score after the second half of the batches."""
    batches = program.batches(seed)
    state, losses = advance(program, middle, batches[len(batches) // 2 :])
    if program.half:
        ols.raise_if_stalled(state)
    return float(program.score(state, losses[-program.last :]))


def advance(program, state, batches):
    losses = []
    for batch in batches:
        state, loss = program.step(state, batch)
        losses.append(loss)
    return state, np.asarray(losses)


@functools.cache
def digits():
    """Scikit-learn's digits: 1797 images of 8 x 8 gray values up to 1, and labels."""
    images, labels = load_digits(return_X_y=True)
    return np.float32(images / 16).reshape(-1, 8, 8), np.int32(labels)


def random_batches(seed, count, size, arrays):
    """Batches of random rows of the arrays, or of a tree of them."""
    rng = np.random.default_rng(seed)
    length = len(jax.tree.leaves(arrays)[0])
    rows = [rng.choice(length, size, replace=False) for _ in range(count)]
    return [jax.tree.map(lambda array, r=r: array[r], arrays) for r in rows]


def with_nan(batch):
    """The batch with a NaN as the first entry of each floating array."""

    def spoil(leaf):
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.at[(0,) * leaf.ndim].set(jnp.nan)

    return jax.tree.map(spoil, batch)


def protected(state):
    """What of the state a skipped step must not change."""

    def is_loss_scale(node):
        return isinstance(node, ols.LossScaleState)

    parts = {name: part for name, part in state.items() if name != "key"}
    leaves = jax.tree.leaves(parts, is_leaf=is_loss_scale)
    return [leaf for leaf in leaves if not is_loss_scale(leaf)]


def has_nan(tree):
    return any(
        bool(jnp.isnan(leaf).any())
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def dtypes_of_products(program):
    """The dtype in which each product of a step multiplies, gradients included."""
    return dtypes_of(program.step, program.init(0), program.batches(0)[0])
