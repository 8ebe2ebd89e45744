"""A trainer's own step on a mesh of four devices, of the shape of MaxText's.

It differentiates the loss, adds up gradients of microbatches in a scan, logs loss and
norms, clips, and updates a sharded state that is donated. Only the loss function and
the optimizer are given to it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, bits

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.several_devices,
]
WIDTH, BATCH, MICROBATCHES, STEPS = 16, 32, 4, 6
SHARDED = {"kernel": P("embed", "mlp"), "bias": P("mlp")}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(2 * WIDTH, name="first")(x))
        return nn.Dense(2, name="second")(x)


def loss_of(apply):
    def loss_fn(params, batch, is_training=True):
        x, y = batch
        losses = jnp.sum((apply(params, x) - y) ** 2, axis=1)
        return jnp.mean(losses), {"rows": jnp.float32(len(x))}

    return loss_fn


def train_step(loss_fn, mesh, state, batch):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulate(total, batch):
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("embed")))
        (loss, aux), grads = grad_fn(state.params, batch, is_training=True)
        return jax.tree.map(jnp.add, total, (loss, grads)), aux

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
    batches = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)
    total, aux = jax.lax.scan(accumulate, zeros, batches)
    loss, grads = jax.tree.map(lambda x: x / MICROBATCHES, total)
    norm = optax.tree.norm(grads)
    clip = optax.clip_by_global_norm(0.5)
    clipped, _ = clip.update(grads, clip.init(grads))
    metrics = {"loss": loss, "norm": norm, "clipped": optax.tree.norm(clipped)}
    return state.apply_gradients(grads=clipped), metrics | {"rows": sum(aux["rows"])}


def sharding_of(mesh, path, leaf):
    """That of a parameter by its name; anything else is replicated."""
    name = getattr(path[-1], "key", None)
    spec = SHARDED.get(name, P()) if np.ndim(leaf) else P()
    return NamedSharding(mesh, spec if "second" not in str(path) else P())


def train(wrap, tx, bad=None):
    """The last state, that before it, and what each step logged."""
    params = Net().init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    apply = lambda params, x: Net().apply({"params": params}, x)  # noqa: E731
    kinds = 2 * (AxisType.Auto,)
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("embed", "mlp"), axis_types=kinds, devices=devices)
    place = functools.partial(sharding_of, mesh)
    state = TrainState.create(apply_fn=apply, params=params, tx=tx)
    shardings = jax.tree_util.tree_map_with_path(place, state)
    state = jax.device_put(state, shardings)
    everywhere = NamedSharding(mesh, P())
    step = jax.jit(
        functools.partial(train_step, wrap(loss_of(apply)), mesh),
        in_shardings=(shardings, everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )
    logged = []
    for number in range(STEPS):
        x = jax.random.normal(jax.random.key(number), (BATCH, WIDTH))
        x = x.at[3, 1].set(jnp.nan) if number == bad else x
        before = jax.device_get((state.params, state.opt_state))
        state, metrics = step(state, (x, jnp.nan_to_num(x[:, :2])))
        logged.append(jax.device_get(metrics))
    return state, before, logged


def low(loss_fn):
    return ols.scaled_backward(ols.autocast(loss_fn), 2.0**12)


@pytest.mark.slow
def test_a_step_logs_and_clips_as_in_float32_and_skips_a_nan_batch():
    adam = optax.adam(1e-2)
    _, _, logged = train(lambda loss_fn: loss_fn, adam)
    tx = ols.loss_scaled(adam, ols.static_loss_scale(1.0))
    state, before, low_logged = train(low, tx, bad=STEPS - 1)
    for expected, actual in zip(logged[:-1], low_logged[:-1], strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(actual[name], value, rtol=5e-3, err_msg=name)
        assert actual["rows"] == BATCH
    assert logged[0]["clipped"] < logged[0]["norm"]
    assert bits(low_logged[-2]["loss"]) != bits(logged[-2]["loss"])  # It is float16.

    assert np.isnan(low_logged[-1]["norm"])
    params, opt_state = before
    assert_same_bits(state.params, params)
    assert_same_bits(state.opt_state.inner_state, opt_state.inner_state)
    assert ols.loss_scale_metrics(state)["total_notfinite"] == 1
    kernel = state.params["first"]["kernel"]
    assert kernel.sharding.spec == P("embed", "mlp")
    moment = state.opt_state.inner_state[0].mu["first"]["kernel"]
    assert moment.sharding == kernel.sharding
