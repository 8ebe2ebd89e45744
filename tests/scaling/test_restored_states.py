"""States whose leaves a checkpoint restored in another form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.steps import eager_and_jitted

PARAMS = jnp.ones(2)
RULES = {
    "dynamic": ols.dynamic_loss_scale(),
    "headroom": ols.headroom_loss_scale(history=4, recent=3),
    "static": ols.static_loss_scale(8.0),
}


def trained(name):
    """An optimizer with a state that no longer is the first one."""
    tx = ols.loss_scaled(optax.sgd(0.1), RULES[name])
    state = tx.init(PARAMS)
    for grads in (PARAMS, PARAMS * jnp.nan, PARAMS):
        _, state = tx.update(grads, state, PARAMS)
    return tx, state


def each(convert):
    return lambda state: jax.tree.map(convert, state)


def numbers(state):
    """What JSON makes of a state: numbers of Python, and lists of them."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), state)


def unsigned(leaf):
    return leaf.astype(jnp.uint16) if leaf.dtype == jnp.int32 else leaf


RESTORED = {
    "Python": numbers,
    "NumPy": each(lambda leaf: np.asarray(leaf)[()]),
    "NumPy, 64 bits": lambda state: jax.tree.map(np.asarray, numbers(state)),
    "JAX, float": each(lambda leaf: leaf.astype(float)),
    "JAX, unsigned": each(unsigned),
}


@eager_and_jitted
@pytest.mark.parametrize("kind", RESTORED)
@pytest.mark.parametrize("name", RULES)
def test_a_run_goes_on_with_the_same_bits_from_what_a_checkpoint_restores(
    name, kind, run
):
    tx, state = trained(name)
    restored = RESTORED[kind](state)
    expected = run(tx.update)(PARAMS, state, PARAMS)
    actual = run(tx.update)(PARAMS, restored, PARAMS)
    assert_same_bits(actual, expected)
    assert types(actual) == types(expected)
    scaled = ols.scale(2.0, restored)
    assert_same_bits(scaled, ols.scale(2.0, state))


@pytest.mark.parametrize("kind", RESTORED)
def test_the_scale_of_a_restored_state_can_be_set(kind):
    _, state = trained("dynamic")
    changed = ols.set_loss_scale(RESTORED[kind](state), 8.0)
    assert ols.get_loss_scale(changed) == 8.0


@pytest.mark.parametrize("kind", RESTORED)
@pytest.mark.parametrize("name", RULES)
def test_a_restored_state_may_be_adjusted_by_hand(name, kind):
    rule, state = RULES[name], trained(name)[1].loss_scale_state
    adjusted = rule.adjust(RESTORED[kind](state), True, 1.0)
    expected = rule.adjust(state, True, 1.0)
    assert_same_bits(adjusted, expected)
    assert types(adjusted) == types(expected)


@pytest.mark.parametrize("kind", RESTORED)
def test_without_a_loss_scale_the_counts_of_a_restored_state_are_integers(kind):
    tx = ols.loss_scaled(optax.sgd(0.1), ols.no_loss_scale())
    state = tx.init(PARAMS)
    _, after = tx.update(PARAMS, RESTORED[kind](state), PARAMS, accept=False)
    assert types(after.loss_scale_state) == types(state.loss_scale_state)
    assert after.loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize("integer", [int, np.int64])
def test_a_large_count_is_restored_exactly(integer):
    tx, state = trained("dynamic")
    count = 2**24 + 1  # Not a float32.
    counted = state.loss_scale_state._replace(step_count=integer(count))
    _, after = tx.update(PARAMS, state._replace(loss_scale_state=counted), PARAMS)
    assert after.loss_scale_state.step_count == count + 1


@pytest.mark.parametrize("kind", RESTORED)
def test_metrics_and_raise_if_stalled_read_a_restored_state(kind):
    tx, state = trained("dynamic")
    _, state = tx.update(PARAMS * jnp.nan, state)
    restored = RESTORED[kind](state)
    assert_same_bits(ols.loss_scale_metrics(restored), ols.loss_scale_metrics(state))
    ols.raise_if_stalled(restored, max_consecutive=2)
    message = r"the last 1 steps .* 2 of 4 in all\), and the loss scale is 8192\."
    with pytest.raises(ols.LossScaleStalledError, match=message):
        ols.raise_if_stalled(restored, max_consecutive=1)


@pytest.mark.parametrize("name", RULES)
def test_a_state_restored_in_bfloat16_goes_on_in_float32(name):
    tx, state = trained(name)
    restored = optax.tree.cast(state, jnp.bfloat16)
    _, new = tx.update(PARAMS, restored, PARAMS)
    assert types(new) == types(state)


@eager_and_jitted
def test_a_scale_restored_with_another_number_of_axes_is_refused(run):
    tx, state = trained("headroom")
    restored = jax.tree.map(lambda leaf: leaf[None], state)
    with pytest.raises(ValueError, match=r"as many axes as at first, got shape \(1,\)"):
        run(tx.update)(PARAMS, restored, PARAMS)


def test_a_number_in_place_of_an_array_with_one_entry_is_refused():
    static = ols.static_loss_scale(8.0)
    own = static._replace(init=lambda: static.init()._replace(rule_state=jnp.zeros(1)))
    tx = ols.loss_scaled(optax.sgd(0.1), own)
    state = tx.init(PARAMS)
    restored = state.loss_scale_state._replace(rule_state=0.0)
    with pytest.raises(ValueError, match=r"as many axes as at first, got shape \(\)"):
        tx.update(PARAMS, state._replace(loss_scale_state=restored), PARAMS)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("step_count", -(2**31)),
        ("total_notfinite", 2**31 - 1),
        ("total_notfinite", -(2**31)),
    ],
)
def test_after_a_damaged_count_zeros_still_raise_a_scale_that_is_too_low(name, count):
    rule = ols.headroom_loss_scale(1.0, history=4, recent=2)
    state = rule.init()._replace(**{name: jnp.int32(count)})
    for _ in range(2):
        state = rule.adjust(state, True, 0.0)
    assert state.loss_scale > 1


def test_the_arrays_of_a_rule_may_be_restored_as_lists():
    tx, state = trained("headroom")
    lists = jax.tree.map(lambda leaf: leaf.tolist(), state.loss_scale_state)
    restored = state._replace(loss_scale_state=lists)
    expected = tx.update(PARAMS, state, PARAMS)
    assert_same_bits(tx.update(PARAMS, restored, PARAMS), expected)
