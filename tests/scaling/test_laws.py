"""The laws of loss scaling, as properties of random settings, histories and trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ols
from helpers import oracle, strategies
from helpers.compare import assert_same_bits
from helpers.history import states_after
from helpers.inner import adam, standard_promotion
from helpers.steps import assert_skipped

PARAMS = {"w": jnp.asarray([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.asarray([0.1, -0.0])}


@given(st.lists(strategies.exact_float32, min_size=1), strategies.powers_of_two)
def test_scaling_then_unscaling_by_a_power_of_two_is_exact(values, loss_scale):
    state = ols.static_loss_scale(loss_scale).init()
    tree = jnp.asarray(values, jnp.float32)
    assert_same_bits(ols.unscale(ols.scale(tree, state), state), tree)


@given(strategies.float16_arrays, strategies.powers_of_two)
def test_scaling_then_unscaling_float16_equals_a_cast_to_float32(array, loss_scale):
    state = ols.static_loss_scale(loss_scale).init()
    assert_same_bits(
        ols.unscale(ols.scale(array, state), state), array.astype(jnp.float32)
    )


@pytest.mark.slow
@given(strategies.dynamic_settings(), strategies.histories)
def test_any_history_under_scan_equals_the_oracle(settings, history):
    states = states_after(ols.dynamic_loss_scale(**settings), history)
    ours = zip(*(leaf.tolist() for leaf in states[:5]), strict=True)
    assert list(ours) == oracle.run_dynamic(history, **settings)


@pytest.mark.slow
@given(strategies.dynamic_settings(), strategies.histories)
def test_the_scale_stays_finite_and_inside_its_bounds(settings, history):
    scales = states_after(ols.dynamic_loss_scale(**settings), history).loss_scale
    low = min(settings["min_scale"], settings["init_scale"])
    high = max(settings["max_scale"], settings["init_scale"])
    assert np.all((scales >= low) & (scales <= high))
    assert np.all(np.isfinite(scales) & (scales > 0))


BAD = st.none() | strategies.nonfinite


@pytest.mark.slow
@given(
    inner=strategies.optimizers,
    settings=strategies.dynamic_settings(),
    trees=strategies.similar_trees(7),
    bad=st.lists(BAD, min_size=6, max_size=6),
)
def test_outside_jit_every_history_has_the_bits_of_the_plain_core(
    inner, settings, trees, bad
):
    params, *history = trees
    for step, value in enumerate(bad):
        if value is not None:
            history[step] = strategies.poisoned(history[step], step, value)
    with strategies.x64_for(params), standard_promotion():
        params, *history = jax.tree.map(jnp.asarray, [params, *history])
        # One program for both, so that only what is around it runs outside `jit`.
        inner = inner._replace(update=jax.jit(inner.update))
        tx = ols.loss_scaled(inner, ols.dynamic_loss_scale(**settings))
        state = tx.init(params)
        rows = oracle.run_loss_scaled(inner, params, history, **settings)
        for grads, (*expected, counts) in zip(history, rows, strict=True):
            updates, state = tx.update(grads, state, params)
            assert_same_bits([updates, state.inner_state], expected)
            assert tuple(x.item() for x in state.loss_scale_state[:5]) == counts


def grads_like(params, seed):
    keys = jax.random.split(jax.random.key(seed), len(params))
    return {
        name: jax.random.normal(key, params[name].shape)
        for name, key in zip(params, keys, strict=True)
    }


@functools.cache
def optimizer(rule):
    """An optimizer, and its update, compiled once for all examples."""
    tx = ols.loss_scaled(adam(), rule)
    return tx, jax.jit(tx.update)


STATIC = ols.static_loss_scale(8.0)
RULES = [ols.dynamic_loss_scale(), STATIC, ols.headroom_loss_scale()]


@given(
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 2**31),
    value=strategies.nonfinite,
)
def test_a_skipped_step_changes_no_bit_of_parameters_or_inner_state(rule, seed, value):
    tx, update = optimizer(rule)
    _, before = update(grads_like(PARAMS, seed), tx.init(PARAMS), PARAMS)
    bad = grads_like(PARAMS, seed + 1)
    bad["w"] = bad["w"].at[1, 0].set(value)
    updates, after = update(bad, before, PARAMS)
    assert_skipped(PARAMS, before, updates, after)
    lowered = ols.get_loss_scale(after) < ols.get_loss_scale(before)
    assert lowered == (rule is not STATIC)
