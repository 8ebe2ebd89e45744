"""Short runs with faults; `python tests/tools/faults.py` runs a million steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam, standard_promotion
from helpers.steps import assert_skipped, with_scale
from tools.faults import OPTIMIZERS, RULES, check, run


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_no_fault_reaches_the_parameters_and_every_count_is_right(rule):
    with standard_promotion():
        seen = run(RULES[rule], OPTIMIZERS["adamw"], 3000)
    assert 0.01 < check(seen) < 0.2


DAMAGED = [0.0, -8.0, jnp.nan, jnp.inf, 2.0**127, 1e-45]


@functools.cache
def optimizer(rule):
    """A loss-scaled optimizer, and its update, compiled once for all values."""
    tx = ols.loss_scaled(adam(), RULES[rule])
    return tx, jax.jit(tx.update)


@pytest.mark.parametrize("value", DAMAGED)
@pytest.mark.parametrize("rule", RULES)
def test_a_damaged_scale_skips_the_step_and_the_rule_restarts(rule, value):
    tx, update = optimizer(rule)
    params = {"w": jnp.ones(3)}
    _, sound = update(params, tx.init(params), params)
    damaged = with_scale(sound, value)
    for grads in (params, {"w": jnp.zeros(3)}, {"w": jnp.full(3, jnp.nan)}):
        updates, state = update(grads, damaged, params)
        assert_skipped(params, sound, updates, state)
        # The rule restarts as if a step at its initial scale had overflowed.
        first = sound.loss_scale_state._replace(
            loss_scale=tx.init(params).loss_scale_state.loss_scale
        )
        expected = RULES[rule].adjust(first, False, jnp.inf)
        assert_same_bits(state.loss_scale_state, expected)
    _, state = update(ols.scale(params, state), state, params)
    assert np.any(optax.tree.get(state, "mu")["w"] != optax.tree.get(sound, "mu")["w"])


@pytest.mark.parametrize("value", DAMAGED)
def test_a_damaged_scale_skips_a_step_under_a_rule_that_never_skips_but_not_under_none(
    value,
):
    tx = ols.loss_scaled(adam(), ols.static_loss_scale(8.0, skip_nonfinite=False))
    params = {"w": jnp.ones(3)}
    damaged = with_scale(tx.init(params), value)
    updates, state = tx.update(ols.scale(params, damaged), damaged, params)
    assert_skipped(params, damaged, updates, state)
    assert ols.get_loss_scale(state) == 8.0
    tx = ols.loss_scaled(adam(), ols.no_loss_scale())
    damaged = with_scale(tx.init(params), value)
    assert ols.get_loss_scale(damaged) == 1.0
    assert ols.loss_scale_metrics(damaged)["loss_scale"] == 1.0
    loss, grads = ols.scaled_value_and_grad(jnp.sum, damaged)(jnp.ones(3))
    assert (loss, grads.tolist()) == (3.0, [1.0, 1.0, 1.0])
