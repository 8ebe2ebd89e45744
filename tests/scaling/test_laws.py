"""The laws of loss scaling, as properties of random settings, histories and trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ols
from helpers import oracle, strategies
from helpers.compare import assert_same_bits
from helpers.history import states_after
from helpers.inner import adam
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


@given(strategies.dynamic_settings(), strategies.histories)
def test_any_history_under_scan_equals_the_oracle(settings, history):
    states = states_after(ols.dynamic_loss_scale(**settings), history)
    ours = zip(*(leaf.tolist() for leaf in states[:5]), strict=True)
    assert list(ours) == oracle.run_dynamic(history, **settings)


@given(strategies.dynamic_settings(), strategies.histories)
def test_the_scale_stays_finite_and_inside_its_bounds(settings, history):
    scales = states_after(ols.dynamic_loss_scale(**settings), history).loss_scale
    low = min(settings["min_scale"], settings["init_scale"])
    high = max(settings["max_scale"], settings["init_scale"])
    assert np.all((scales >= low) & (scales <= high))
    assert np.all(np.isfinite(scales) & (scales > 0))


def needs_max():
    """A custom rule that needs the largest magnitude."""
    static = ols.static_loss_scale(2.0**10)

    def adjust(state, grads_finite, grads_max=None):
        assert grads_max is not None
        return static.adjust(state, grads_finite)

    return ols.LossScale(static.init, adjust, needs_grads_max=True)


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


RULES = [
    ols.dynamic_loss_scale(),
    ols.static_loss_scale(8.0),
    ols.smooth_loss_scale(),
    ols.headroom_loss_scale(),
    needs_max(),
]


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
    assert lowered == (rule not in (RULES[1], RULES[4]))
