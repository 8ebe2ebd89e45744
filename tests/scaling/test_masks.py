"""Masks in the forms in which the frameworks make them."""

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

STATE = ols.static_loss_scale(4.0).init()


def is_weight(path, _):
    return "bias" not in jax.tree_util.keystr(path)


def test_a_mask_can_be_an_equinox_module_although_it_is_callable():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    mask = jax.tree.map_with_path(is_weight, model)
    assert callable(mask)
    unscaled = ols.unscale(model, STATE, mask=mask)
    np.testing.assert_array_equal(unscaled.weight, model.weight / 4)
    np.testing.assert_array_equal(unscaled.bias, model.bias)


def test_a_mask_can_hold_its_bools_in_flax_variables():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    mask = jax.tree.map_with_path(is_weight, nnx.state(model, nnx.Param))
    tx = ols.loss_scaled(optax.sgd(1.0), ols.static_loss_scale(4.0), unscale_mask=mask)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kernel = model.kernel[...]
    grads = jax.tree.map(lambda p: jnp.full_like(p, 4.0), nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.kernel[...], kernel - 1.0, rtol=1e-6)
    np.testing.assert_array_equal(model.bias[...], -4.0)
