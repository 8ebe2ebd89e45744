"""Known bugs of other loss scalers, and what happens here instead.

Others are shown where their subject is: scales that reach zero or infinity, and jmp's
floor that `jit` loses, in `test_presets.py`; counts that are compared by `==` in
`test_torch_state_dicts.py`; sums instead of means and float16 losses that overflow in
`test_flax.py`; clips that hide an infinity in `test_migration_pages.py`; micro-batches
with a NaN in `test_keras.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")

BAD = jnp.asarray([0.5, jnp.nan, -1.0])


def test_mpx_unscales_by_the_next_scale_and_this_by_the_one_that_scaled():
    rule = ols.dynamic_loss_scale(8.0, growth_interval=1)
    tx = ols.loss_scaled(optax.sgd(1.0), rule)
    updates, opt_state = tx.update(jnp.float32(8.0), tx.init(jnp.float32(0.0)))
    assert (updates, ols.get_loss_scale(opt_state)) == (-1.0, 16.0)


def test_apply_if_finite_accepts_a_nan_after_many_and_loss_scaled_never_does():
    params = jnp.ones(3)
    tx = ols.loss_scaled(optax.sgd(1.0))

    def step(carry, _):
        params, opt_state = carry
        updates, opt_state = tx.update(BAD, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    (after, opt_state), _ = jax.lax.scan(step, (params, tx.init(params)), length=1000)
    assert_same_bits(after, params)
    with pytest.raises(ols.LossScaleStalledError, match="1000 of 1000"):
        ols.raise_if_stalled(opt_state)


@pytest.mark.parametrize("of_params", [jnp.bfloat16, jnp.float32])
def test_gradients_narrower_than_the_scale_work_and_jmp_fails_on_them(of_params):
    # jmp's issue 47: a float16 gradient and a float32 scale do not fit together.
    tx, params = ols.loss_scaled(optax.sgd(0.1)), jnp.ones(3, of_params)
    opt_state = tx.init(params)
    for grads in (jnp.ones(3), BAD):
        updates, opt_state = tx.update(grads.astype(jnp.float16), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert params.dtype == of_params
    assert ols.loss_scale_metrics(opt_state)["total_notfinite"] == 1


def test_torch_checks_scaled_gradients_and_misses_what_overflows_on_unscaling():
    tx = ols.loss_scaled(optax.sgd(1.0), ols.static_loss_scale(2.0**-10))
    updates, opt_state = tx.update(jnp.asarray([1e38]), tx.init(jnp.ones(1)))
    assert updates == 0.0
    assert not ols.find_loss_scale_state(opt_state).last_finite


def test_apex_and_deepspeed_take_large_gradients_for_infinite_ones_by_their_sum():
    assert ols.all_finite(jnp.full(4, 3e38))


def test_tf_keras_flushes_the_reciprocal_of_a_large_scale_in_float16():
    # 1 / 2**25 is zero in float16, and gradients become zero without a warning.
    state = ols.static_loss_scale(2.0**25).init()
    grads = ols.unscale(jnp.asarray([2.0**10], jnp.float16), state)
    np.testing.assert_array_equal(grads, [2.0**-15])
