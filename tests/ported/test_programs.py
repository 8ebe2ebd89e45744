"""Programs of other projects train in float16 as they do in float32.

Promised in README.md: three lines change. A program is a module with `init(key)`, which
returns parameters, `loss_fn(params, key, batch)`, `batches(seed)`, a list, and an
`OPTIMIZER`. At its end, its losses are below the fraction `FALLS_TO` of the first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.steps import assert_nothing_but_the_scale_changed
from helpers.under_autocast import dtypes_of
from ported import ctc, neural_ode, scanned_transformer

SEEDS = range(3)


@functools.cache
def compiled(program, half):
    """A program's first state, by a seed, and its step, as written or in float16."""
    loss_fn, tx = program.loss_fn, program.OPTIMIZER
    if half:
        loss_fn, tx = ols.autocast(loss_fn), ols.loss_scaled(tx)

    @jax.jit
    def step(state, batch):
        params, opt_state, key = state
        key, step_key = jax.random.split(key)
        if half:
            loss_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
        else:
            loss_and_grad = jax.value_and_grad(loss_fn)
        loss, grads = loss_and_grad(params, step_key, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    def init(seed):
        key = jax.random.key(seed)
        params = program.init(key)
        return params, tx.init(params), key

    return init, step


def with_nan(batch):
    """The batch with a NaN as the first entry of each floating array."""

    def spoil(leaf):
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        return np.where(np.arange(leaf.size).reshape(leaf.shape) == 0, np.nan, leaf)

    return jax.tree.map(spoil, batch)


def train(program, half, seed):
    """The first loss, the mean of the last 20, and the state half-way.

    There a NaN batch is fed to the float16 program, which then goes on.
    """
    init, step = compiled(program, half)
    state, losses = init(seed), []
    batches = program.batches(seed)
    for number, batch in enumerate(batches):
        if number == len(batches) // 2:
            middle = state
            if half:
                state, _ = step(state, with_nan(batch))
                assert_nothing_but_the_scale_changed(state[:2], middle[:2])
        state, loss = step(state, batch)
        losses.append(loss)
    if half:
        ols.raise_if_stalled(state)
    assert np.mean(losses[-20:]) < program.FALLS_TO * losses[0], losses[::20]
    return np.mean(losses[-20:]), middle


@pytest.mark.parametrize("program", [ctc, neural_ode, scanned_transformer])
def test_float16_reaches_the_loss_of_float32_in_spite_of_a_nan_batch(program):
    expected, found = (
        [train(program, half, seed) for seed in SEEDS] for half in (False, True)
    )
    losses, others = ([loss for loss, _ in runs] for runs in (expected, found))
    assert abs(np.mean(others) - np.mean(losses)) < np.ptp(losses)

    batch = program.batches(0)[0]
    init, step = compiled(program, True)
    dtypes = dtypes_of(step, init(0), batch)
    assert dtypes.count("float16") > program.LOW_SHARE * len(dtypes), dtypes
    # The NaN batch is the end of the original program.
    (_, middle), *_ = expected
    (params, *_), _ = compiled(program, False)[1](middle, with_nan(batch))
    assert any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves(params))
