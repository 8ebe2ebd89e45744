"""No program of ours holds a cast to less and back that XLA for GPU may leave out."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.inner import lenient
from helpers.programs import casts_left_out_on_gpu

SGD = lenient(optax.sgd(1.0))
in_each_half = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])


@in_each_half
def test_the_update_of_masters_is_the_difference_of_rounded_numbers(dtype):
    tx, params = ols.loss_scaled(ols.master_weights(SGD)), jnp.ones(2, dtype)
    assert casts_left_out_on_gpu(tx.update, params, tx.init(params), params) == 0


@in_each_half
def test_masters_of_cast_parameters_are_rounded(dtype):
    def init(x):
        return ols.master_weights(SGD).init(ols.cast_params(x, dtype))

    assert casts_left_out_on_gpu(init, np.float32(1.0)) == 0


@in_each_half
@pytest.mark.parametrize("check", [ols.all_finite, ols.max_magnitude])
def test_checks_see_the_numbers_that_an_array_holds(check, dtype):
    def rounded_and_checked(x):
        return check(x.astype(dtype))

    assert casts_left_out_on_gpu(rounded_and_checked, np.float32([1.0])) == 0


@pytest.mark.parametrize("rule", [ols.dynamic_loss_scale(), ols.headroom_loss_scale()])
def test_a_step_is_skipped_for_what_the_gradients_hold(rule):
    tx, params = ols.loss_scaled(SGD, rule), jnp.ones(2)

    def update(grads, state):
        _, state = tx.update(grads.astype(jnp.float16), state, params)
        return state.loss_scale_state

    assert casts_left_out_on_gpu(update, params, tx.init(params)) == 0
