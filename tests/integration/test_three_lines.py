"""The same three lines train a model with batch normalization and dropout everywhere.

The three lines are `loss_scaled`, `scaled_value_and_grad` and, where a framework does
not call it itself, `update`. `where_applied` keeps the batch statistics of a skipped
step, which live outside the optimizer.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_lossscale as ols

# The layers of these frameworks need it.
pytestmark = pytest.mark.usefixtures("standard_promotion")
SCALE = 2.0**10
X = jnp.linspace(-1.0, 1.0, 96).reshape(32, 3)
Y = X.sum(axis=1, keepdims=True)
BAD_X = X.at[0, 0].set(jnp.nan)


def flat(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


# Each function below returns a step, which takes rows and returns the loss; and what
# returns parameters, statistics and inner state, and what holds the loss scale.
TX = ols.loss_scaled(optax.adamw(0.02), ols.dynamic_loss_scale(SCALE))


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(3, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def in_nnx():
    model = NnxNet()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @ols.autocast
    def loss_fn(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    @nnx.jit
    def step(model, optimizer, x, y):
        old = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
        loss, grads = ols.scaled_value_and_grad(loss_fn, optimizer)(model, x, y)
        optimizer.update(model, grads)
        new = nnx.state(model, nnx.BatchStat)
        nnx.update(model, ols.where_applied(optimizer, new, old))
        return loss

    def parts():
        params, statistics = nnx.state(model, nnx.Param, nnx.BatchStat)
        return params, statistics, optimizer.opt_state.inner_state

    return lambda x: step(model, optimizer, x, Y), parts, lambda: optimizer


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(32)(x))
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=False)(nn.relu(x)))


def in_linen():
    net, key = LinenNet(), jax.random.key(0)
    variables = net.init({"params": key, "dropout": key}, X)
    state = TrainState.create(apply_fn=net.apply, params=variables["params"], tx=TX)
    statistics = variables["batch_stats"]

    @ols.autocast
    def loss_fn(params, statistics, x, y, key):
        out, changed = net.apply(
            {"params": params, "batch_stats": statistics},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return jnp.mean((out - y) ** 2), changed["batch_stats"]

    @jax.jit
    def step(state, old, x, y):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        grad_fn = ols.scaled_value_and_grad(loss_fn, state, has_aux=True)
        (loss, new), grads = grad_fn(state.params, old, x, y, key)
        state = state.apply_gradients(grads=grads)
        return state, ols.where_applied(state, new, old), loss

    def train(x):
        nonlocal state, statistics
        state, statistics, loss = step(state, statistics, x, Y)
        return loss

    def parts():
        return state.params, statistics, state.opt_state.inner_state

    return train, parts, lambda: state


class EqxNet(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key):
        self.hidden = eqx.nn.Linear(3, 32, key=key)
        self.norm = eqx.nn.BatchNorm(32, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.1)
        self.out = eqx.nn.Linear(32, 1, key=key)

    def __call__(self, x, statistics, key):
        x, statistics = self.norm(self.hidden(x), statistics)
        return self.out(self.dropout(jax.nn.relu(x), key=key)), statistics


def in_equinox():
    model, statistics = eqx.nn.make_with_state(EqxNet)(jax.random.key(0))
    opt_state = TX.init(model)

    @ols.autocast
    def loss_fn(model, statistics, x, y, key):
        mapped = jax.vmap(model, (0, None, 0), (0, None), axis_name="batch")
        out, statistics = mapped(x, statistics, jax.random.split(key, len(x)))
        return jnp.mean((out - y) ** 2), statistics

    @eqx.filter_jit
    def step(model, opt_state, old, x, y):
        count = ols.find_loss_scale_state(opt_state).step_count
        key = jax.random.fold_in(jax.random.key(1), count)
        grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, new), grads = grad_fn(model, old, x, y, key)
        updates, opt_state = TX.update(grads, opt_state, model)
        model = eqx.apply_updates(model, updates)
        return model, opt_state, ols.where_applied(opt_state, new, old), loss

    def train(x):
        nonlocal model, opt_state, statistics
        model, opt_state, statistics, loss = step(model, opt_state, statistics, x, Y)
        return loss

    def parts():
        return model, statistics, opt_state.inner_state

    return train, parts, lambda: opt_state


@pytest.mark.parametrize("start", [in_nnx, in_linen, in_equinox])
def test_three_lines_train_and_a_skipped_step_changes_nothing(start):
    step, parts, scaled = start()
    losses = [float(step(X)) for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    before = [*map(flat, parts())]  # Parameters, statistics and inner state.
    assert np.any(before[1] != 0)
    assert np.isnan(step(BAD_X))
    for actual, expected in zip(map(flat, parts()), before, strict=True):
        np.testing.assert_array_equal(actual, expected)
    metrics = ols.loss_scale_metrics(scaled())
    assert (metrics["loss_scale"], metrics["total_notfinite"]) == (SCALE / 2, 1)
    assert np.isfinite(step(X))
    assert np.any(flat(parts()[1]) != before[1])
