"""Loss scaling with Flax Linen and NNX, and with Equinox."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam

SCALE = 2.0**10
RULE = ols.dynamic_loss_scale(SCALE)
X = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)


class Net(nn.Module):
    """Float16 compute, float32 parameters."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(4, dtype=jnp.float16)(x))
        return nn.Dense(1, dtype=jnp.float16)(x).astype(jnp.float32)


def test_a_linen_train_state_trains_skips_a_bad_step_and_continues():
    net = Net()
    state = TrainState.create(
        apply_fn=net.apply,
        params=net.init(jax.random.key(0), X),
        tx=ols.loss_scaled(adam(0.01), RULE),
    )

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            return jnp.mean((state.apply_fn(params, x) - 1.0) ** 2)

        loss, grads = ols.scaled_value_and_grad(loss_fn, state)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(30):
        state, loss = step(state, X)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    bad, _ = step(state, X.at[0, 0].set(jnp.nan))
    assert_same_bits(bad.params, state.params)
    assert_same_bits(bad.opt_state.inner_state, state.opt_state.inner_state)
    assert ols.get_loss_scale(bad) == SCALE / 2
    assert step(bad, X)[1] < losses[0]


class NnxNet(nnx.Module):
    """The same in NNX."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(3, 4, dtype=jnp.float16, rngs=rngs)
        self.out = nnx.Linear(4, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x))).astype(jnp.float32)


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("jit", [nnx.jit, lambda f: f], ids=["jit", "eager"])
def test_an_nnx_optimizer_trains_skips_a_bad_step_and_continues(jit):
    model = NnxNet()
    optimizer = nnx.Optimizer(model, ols.loss_scaled(adam(0.01), RULE), wrt=nnx.Param)

    @jit
    def step(model, optimizer, x):
        def loss_fn(model):
            loss = jnp.mean((model(x) - 1.0) ** 2)
            return ols.scale(loss, optimizer), loss

        grads, loss = nnx.grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    before = jax.tree.map(jnp.copy, nnx.state(model))
    step(model, optimizer, X.at[0, 0].set(jnp.nan))
    assert_same_bits(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(before))
    assert ols.get_loss_scale(optimizer) == SCALE / 2
    assert ols.loss_scale_metrics(optimizer)["total_notfinite"] == 1
    assert step(model, optimizer, X) < losses[0]


def test_an_equinox_model_with_static_leaves_trains_and_skips_a_bad_step():
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    tx = ols.loss_scaled(adam(0.03), RULE)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state, x):
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss_fn(params):
            half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            out = jax.vmap(eqx.combine(half, static))(x.astype(jnp.float16))
            return jnp.mean((out.astype(jnp.float32) - 1.0) ** 2)

        loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(30):
        model, opt_state, loss = step(model, opt_state, X)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    bad_model, bad_state, _ = step(model, opt_state, X.at[0, 0].set(jnp.inf))
    arrays = eqx.filter((bad_model, bad_state.inner_state), eqx.is_array)
    assert_same_bits(arrays, eqx.filter((model, opt_state.inner_state), eqx.is_array))
