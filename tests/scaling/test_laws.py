"""The laws of loss scaling, as properties of random settings, histories and trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ols
from helpers import oracle, strategies
from helpers.compare import assert_same_bits, assert_within_ulp
from helpers.history import states_after
from helpers.inner import adam, lenient
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


INNERS = [adam(), lenient(optax.sgd(0.1, momentum=0.9))]
jit_once = functools.cache(jax.jit)
loss_scaled_once = functools.cache(ols.loss_scaled)


RULES = [
    ols.dynamic_loss_scale(),
    ols.static_loss_scale(8.0),
    ols.smooth_loss_scale(),
    ols.headroom_loss_scale(),
    needs_max(),
]


@given(
    rule=st.sampled_from(RULES),
    inner=st.sampled_from(INNERS),
    seed=st.integers(0, 2**31),
    value=strategies.nonfinite,
    is_jitted=st.booleans(),
    check_updates=st.booleans(),
)
def test_a_skipped_step_changes_no_bit_of_parameters_or_inner_state(
    rule, inner, seed, value, is_jitted, check_updates
):
    tx = loss_scaled_once(inner, rule, check_updates=check_updates)
    update = jit_once(tx.update) if is_jitted else tx.update
    _, before = jit_once(tx.update)(grads_like(PARAMS, seed), tx.init(PARAMS), PARAMS)
    bad = grads_like(PARAMS, seed + 1)
    bad["w"] = bad["w"].at[1, 0].set(value)
    updates, after = update(bad, before, PARAMS)
    assert_skipped(PARAMS, before, updates, after)
    lowered = ols.get_loss_scale(after) < ols.get_loss_scale(before)
    assert lowered == (rule not in (RULES[1], RULES[4]))


@given(st.sampled_from(INNERS), st.integers(0, 2**31), strategies.powers_of_two)
def test_a_good_step_equals_the_bare_optimizer(inner, seed, loss_scale):
    tx = ols.loss_scaled(inner, ols.static_loss_scale(loss_scale))
    grads = grads_like(PARAMS, seed)
    scaled = jax.tree.map(lambda g: g * loss_scale, grads)
    expected = inner.update(grads, inner.init(PARAMS), PARAMS)
    updates, state = tx.update(scaled, tx.init(PARAMS), PARAMS)
    assert_same_bits((updates, state.inner_state), expected)
    expected = jit_once(inner.update)(grads, inner.init(PARAMS), PARAMS)
    tx = loss_scaled_once(inner, ols.static_loss_scale(1.0))
    state = ols.set_loss_scale(tx.init(PARAMS), loss_scale)
    updates, state = jit_once(tx.update)(scaled, state, PARAMS)
    assert_within_ulp((updates, state.inner_state), expected)


def count_compilations(tx, poisons):
    """Number of compilations of a jitted training step after an eager `init`."""
    compilations = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(kwargs.get("fun_name"))

    @jax.jit
    def train_step(params, state, poison):
        grads = jax.tree.map(lambda p: p * poison, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    poisons = jnp.asarray(poisons)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for index in range(len(poisons)):
            params, state = train_step(params, state, poisons[index])
    finally:
        jax.monitoring.clear_event_listeners()
    return sum("train_step" in str(name) for name in compilations), state


def test_a_step_is_compiled_only_once_while_the_scale_changes():
    poisons = [1.0, 1.0, np.nan, 1.0, np.inf, 1.0, 1.0]
    bare, _ = count_compilations(adam(), poisons)
    rule = ols.dynamic_loss_scale(8.0, growth_interval=1)
    ours, state = count_compilations(ols.loss_scaled(adam(), rule), poisons)
    assert ols.get_loss_scale(state) == 8.0 * 2**5 / 2**2
    assert (bare, ours) == (1, 1)
