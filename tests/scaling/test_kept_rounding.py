"""No program of ours holds casts to less and back that XLA may leave out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.float_values import DTYPES, as_float64, values_of
from helpers.inner import lenient
from helpers.programs import casts_left_out_on_gpu
from optax_lossscale._ground.bits import keep_rounding, split

NARROW = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn]
TX = ols.master_weights(lenient(optax.sgd(1.0)))


def test_a_cast_to_float16_and_back_may_be_left_out():
    assert casts_left_out_on_gpu(jax.jit(lambda x: (x, half(x)[0])), 1.0) == 1


@jax.jit
def half(x):
    return x.astype(jnp.float16).astype(jnp.float32), x


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeping_the_rounding_changes_no_bit_of_a_number(dtype):
    values = values_of(dtype)
    values = jnp.asarray(values[~np.isnan(as_float64(values))])
    assert_same_bits(jax.jit(keep_rounding)(values), values)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("dtype", NARROW)
def test_the_update_of_masters_is_the_difference_of_rounded_numbers(dtype, compact):
    tx = ols.loss_scaled(ols.master_weights(lenient(optax.sgd(1.0)), compact=compact))
    params = jnp.ones(2, dtype)
    assert casts_left_out_on_gpu(tx.update, params, tx.init(params), params) == 0


@pytest.mark.parametrize("dtype", NARROW[:2])
def test_masters_of_cast_parameters_are_rounded(dtype):
    def init(x):
        return TX.init(ols.cast_params(x, dtype))

    assert casts_left_out_on_gpu(init, np.float32(1.0)) == 0


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("check", [ols.all_finite, ols.max_magnitude, split])
def test_checks_see_the_numbers_that_an_array_holds(check, dtype):
    def rounded_and_checked(x):
        return check(x.astype(dtype))

    assert casts_left_out_on_gpu(rounded_and_checked, np.float32([1.0])) == 0


@pytest.mark.parametrize("rule", [ols.dynamic_loss_scale(), ols.headroom_loss_scale()])
def test_a_step_is_skipped_for_what_the_gradients_hold(rule):
    tx = ols.loss_scaled(lenient(optax.sgd(1.0)), rule)
    params = jnp.ones(2)

    def update(grads, state):
        _, state = tx.update(grads.astype(jnp.float16), state, params)
        return state.loss_scale_state

    # The one cast that is left out is in the gradients for the optimizer.
    assert casts_left_out_on_gpu(update, params, tx.init(params)) == 1
