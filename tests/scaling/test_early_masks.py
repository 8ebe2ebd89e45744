"""Early masks change no result. `test_cost.py` shows that they save copies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.compare import assert_same_bits, assert_within_ulp
from helpers.inner import standard_promotion
from optax_lossscale._scaling.early_masks import run_masked
from optax_lossscale._scaling.masking import mask_results


def plain(is_applied, run, grads, old, params):
    return mask_results(is_applied, *run(grads, old, params), old)


def masked_by(mask, inner):
    @jax.jit
    def update(is_applied, grads, state, params):
        return mask(is_applied, inner.update, grads, state, params)

    return update


RATE = optax.linear_schedule(0.5, 0.25, 2)
OPTIMIZERS = {
    "adam": optax.adam(RATE),
    "adan": optax.adan(0.5),
    "averages": optax.chain(
        optax.ema(0.5),
        optax.optimistic_gradient_descent(0.5),
        optax.ema(0.5, debias=False),
    ),
    # Their state is computed from updates.
    "masters": ols.master_weights(optax.adam(0.5)),
    "accumulated": optax.MultiSteps(optax.adan(RATE), 2).gradient_transformation(),
}


@pytest.mark.parametrize(
    "name", slow_except({"averages", "masters", "accumulated"}, OPTIMIZERS)
)
def test_an_update_masked_early_equals_one_that_is_masked_afterwards(name):
    # Every dtype holds multiples of 1/8.
    params, *history = [
        {"a": np.float32(numbers[0]), "b": [np.float16(numbers)], "c": None}
        for numbers in np.random.default_rng(0).integers(-15, 16, (4, 3)) / 8
    ]
    inner = OPTIMIZERS[name]
    early, late = masked_by(run_masked, inner), masked_by(plain, inner)
    with standard_promotion():
        state = jax.tree.map(jnp.asarray, inner.init(params))
        for grads, is_applied in zip(history, [False, True, False], strict=True):
            after = early(is_applied, grads, state, params)
            assert_within_ulp(after, late(is_applied, grads, state, params))
            if not is_applied:
                assert_same_bits(after[1], state)
            state = after[1]


def test_an_update_that_reads_arrays_from_outside_and_prints_is_masked(capfd):
    outside = jnp.arange(2.0)

    @jax.jit
    def update(is_applied, grads, state):
        def run(grads, state, params):
            jax.debug.print("stepping")
            return grads * outside, state + grads

        return run_masked(is_applied, run, grads, state, None)

    updates, state = update(False, jnp.ones(2), jnp.ones(2))
    jax.effects_barrier()
    assert_same_bits(updates, jnp.full(2, -0.0))
    assert_same_bits(state, jnp.ones(2))
    assert capfd.readouterr().out == "stepping\n"
