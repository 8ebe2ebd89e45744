"""examples/sketch_for_optax.py makes the steps of this library."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
import sketch_for_optax as sketch

pytestmark = pytest.mark.usefixtures("standard_promotion")
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6)}
IS_BAD = [False, True, False, False, True, True, False, False, False]
INNER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))


def run(tx, is_bad):
    """The updates and the scales of a history, in which some gradients are NaN."""
    state, history = tx.init(PARAMS), []
    update = jax.jit(tx.update)
    number = 0  # Of good batches so far.
    for bad in is_bad:
        scale = optax.tree.get(state, "loss_scale")
        grads = scale * jnp.cos(number + PARAMS["w"]) / 1000
        grads = jnp.where(bad, jnp.nan, grads).astype(jnp.float16)
        updates, state = update({"w": grads}, state, PARAMS)
        history.append((np.asarray(updates["w"]), float(scale)))
        number += not bad
    return history


def test_a_skipped_step_is_as_if_it_had_never_been():
    with_skips = run(sketch.loss_scaled(INNER), IS_BAD)
    without = run(sketch.loss_scaled(INNER), [False] * IS_BAD.count(False))
    pairs = zip(with_skips, IS_BAD, strict=True)
    kept = [updates for (updates, _), bad in pairs if not bad]
    for updates, (expected, _) in zip(kept, without, strict=True):
        np.testing.assert_array_equal(updates, expected)  # Scales are powers of two.


def test_the_loss_is_the_true_one_and_the_gradients_are_scaled():
    def sum_of_squares(params):
        return jnp.sum(params["w"] ** 2)

    state = sketch.loss_scaled(INNER).init(PARAMS)
    loss, grads = sketch.scaled_value_and_grad(sum_of_squares, state)(PARAMS)
    assert loss == sum_of_squares(PARAMS)
    np.testing.assert_array_equal(grads["w"], 2.0**15 * 2 * PARAMS["w"])


def test_scales_and_updates_are_those_of_this_library():
    rule = ols.dynamic_loss_scale(growth_interval=3)
    ours = run(ols.loss_scaled(INNER, rule), IS_BAD)
    sketched = run(sketch.loss_scaled(INNER, growth_interval=3), IS_BAD)
    for (updates, scale), (expected, other) in zip(sketched, ours, strict=True):
        np.testing.assert_allclose(updates, expected, rtol=1e-5)
        np.testing.assert_array_equal(np.signbit(updates), np.signbit(expected))
        assert scale == other
