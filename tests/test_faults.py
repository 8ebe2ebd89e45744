"""Fault injection, in short; `python tests/faults.py` does a million steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same_bits
from faults import OPTIMIZERS, RULES, check, run
from inner import adam

import optax_lossscale as ols


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_no_fault_gets_through_and_every_count_is_right(rule, optimizer):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        seen = run(RULES[rule], OPTIMIZERS[optimizer], 10_000)
    assert 0.01 < check(seen) < 0.2


@pytest.mark.parametrize("value", [0.0, -8.0, jnp.nan, jnp.inf, 2.0**127, 1e-45])
@pytest.mark.parametrize("rule", RULES)
def test_a_damaged_scale_is_never_used_and_is_mended_at_once(rule, value):
    tx = ols.loss_scaled(adam(), RULES[rule])
    params = {"w": jnp.ones(3)}
    _, sound = tx.update(params, tx.init(params), params)
    damaged = sound._replace(
        loss_scale_state=sound.loss_scale_state._replace(loss_scale=jnp.float32(value))
    )
    for grads in (params, {"w": jnp.zeros(3)}, {"w": jnp.full(3, jnp.nan)}):
        updates, state = jax.jit(tx.update)(grads, damaged, params)
        assert_same_bits(optax.apply_updates(params, updates), params)
        assert_same_bits(state.inner_state, sound.inner_state)
        # As if a step at the rule's first scale had overflowed.
        first = sound.loss_scale_state._replace(
            loss_scale=tx.init(params).loss_scale_state.loss_scale
        )
        expected = RULES[rule].adjust(first, False, jnp.inf)
        assert_same_bits(state.loss_scale_state, expected)
        assert state.loss_scale_state.total_notfinite == 1
    _, state = tx.update(ols.scale(params, state), state, params)
    assert np.any(optax.tree.get(state, "mu")["w"] != optax.tree.get(sound, "mu")["w"])
