"""Modules of NNX and Equinox under autocast, and a whole train step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.programs import dtypes_of
from helpers.under_autocast import HALF, W, X, assert_close, dot_loss


@pytest.mark.slow
def test_changes_that_a_call_makes_to_an_nnx_module_are_kept():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(jax.nn.relu(self.norm(self.linear(x))))

    def loss_fn(net, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jnp.mean(net(x) ** 2)

    one, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(loss_fn)(one, X)
    cast_loss, cast_grads = nnx.value_and_grad(ols.autocast(loss_fn))(other, X)
    assert_close(cast_loss, loss)
    difference = jax.tree.map(jnp.subtract, cast_grads, grads)
    assert optax.tree.norm(difference) < 1e-2 * optax.tree.norm(grads)
    assert jnp.any(one.norm.mean[...] != 0)
    assert_close(other.norm.mean[...], one.norm.mean[...])
    assert other.dropout.rngs.count[...] == 1


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_changes_to_other_nnx_objects_and_new_variables_are_kept():
    class Sower(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "hidden", x)
            return jnp.sum(x)

    sower = Sower()
    ols.autocast(lambda m, x: m(x))(sower, X)
    (hidden,) = jax.tree.leaves(sower)
    np.testing.assert_array_equal(hidden, X)

    rngs = nnx.Rngs(0)
    ols.autocast(lambda rngs, x: x * jax.random.normal(rngs(), x.shape))(rngs, X)
    assert rngs.default.count[...] == 1

    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    ols.autocast(lambda m, x: m.update(loss=jnp.sum(x)))(metrics, X)
    with jax.numpy_dtype_promotion("standard"):
        assert_close(metrics.compute()["loss"], jnp.sum(X))


def test_the_functional_interface_of_nnx_returns_the_new_state():
    graph, state = nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))

    def fun(state, x):
        with jax.numpy_rank_promotion("allow"):
            module = nnx.merge(graph, state)
            return jnp.sum(module(x)), nnx.state(module)

    _, new = jax.jit(ols.autocast(fun))(state, X)
    _, expected = jax.jit(fun)(state, X)
    assert_close(jax.tree.leaves(new), jax.tree.leaves(expected))


def test_an_equinox_module_can_be_differentiated():
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    grads = eqx.filter_grad(loss_fn)(model, X)
    cast_grads = eqx.filter_jit(eqx.filter_grad(ols.autocast(loss_fn)))(model, X)
    assert_close(jax.tree.leaves(cast_grads), jax.tree.leaves(grads), 2e-2)
    arrays, rest = eqx.partition(model, eqx.is_array)
    found = dtypes_of(
        lambda arrays: ols.autocast(loss_fn)(eqx.combine(arrays, rest), X), arrays
    )
    assert found == [HALF] * 3


def test_a_train_step_skips_the_steps_that_overflow():
    tx = ols.loss_scaled(optax.sgd(0.1), ols.dynamic_loss_scale(2.0**24))
    params = {"w": W}
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        loss_fn = ols.autocast(lambda p: dot_loss(p["w"], X))
        loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(30):
        params, opt_state, loss = step(params, opt_state)
    metrics = ols.loss_scale_metrics(opt_state)
    assert 0 < metrics["total_notfinite"] < 20
    assert loss < dot_loss(W, X)
