"""States whose leaves a checkpoint restored in another form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from tests.helpers.compare import assert_same_bits, types

PARAMS = jnp.ones(2)
RULES = {
    "smooth": ols.smooth_loss_scale(growth_bits=0.3),
    "headroom": ols.headroom_loss_scale(history=4, recent=3),
}


def trained(name):
    """An optimizer with a state that no longer is the first one."""
    tx = ols.loss_scaled(optax.sgd(0.1), RULES[name])
    state = tx.init(PARAMS)
    for grads in (PARAMS, PARAMS * jnp.nan, PARAMS):
        _, state = tx.update(grads, state, PARAMS)
    return tx, state


def lists(leaf):
    """What JSON makes of an array."""
    return np.asarray(leaf).tolist()


def bfloat16(leaf):
    return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", RULES)
def test_a_run_goes_on_from_lists_and_numbers_as_json_restores_them(name, run):
    tx, state = trained(name)
    restored = jax.tree.map(lists, state)
    expected = run(tx.update)(PARAMS, state, PARAMS)
    actual = run(tx.update)(PARAMS, restored, PARAMS)
    assert_same_bits(actual, expected)
    assert types(actual) == types(expected)


@pytest.mark.parametrize("name", RULES)
def test_a_state_restored_in_bfloat16_goes_on_in_float32(name):
    tx, state = trained(name)
    _, new = tx.update(PARAMS, jax.tree.map(bfloat16, state), PARAMS)
    assert types(new) == types(state)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", RULES)
def test_a_scale_restored_with_another_number_of_axes_is_refused(name, run):
    tx, state = trained(name)
    restored = jax.tree.map(lambda leaf: leaf[None], state)
    with pytest.raises(ValueError, match=r"as many axes as at first, got shape \(1,\)"):
        run(tx.update)(PARAMS, restored, PARAMS)


def test_after_a_damaged_count_of_steps_zeros_still_raise_a_scale_that_is_too_low():
    rule = ols.headroom_loss_scale(1.0, history=4, recent=2)
    state = rule.init()._replace(step_count=jnp.int32(-(2**31)))
    for _ in range(2):
        state = rule.adjust(state, True, 0.0)
    assert state.loss_scale > 1
