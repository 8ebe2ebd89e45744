"""The smooth rule."""

import math

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


@pytest.mark.slow
@given(
    strategies.bounds,
    strategies.powers_of_two,
    st.sampled_from([1e-3, 0.1, 0.5, 1.0, 2.5]),
    st.sampled_from([0.3, 0.5, 1.0, 2.0]),
    strategies.histories,
)
def test_the_smooth_rule_equals_its_oracle(bounds, init, growth, backoff, history):
    settings = {"growth_bits": growth, "backoff_bits": backoff}
    rule = ols.smooth_loss_scale(
        init, min_scale=bounds[0], max_scale=bounds[1], **settings
    )
    states = states_after(rule, history)
    exponents = oracle.run_smooth(history, init, *bounds, **settings)
    ours = np.log2(states.loss_scale) + states.rule_state.fraction
    np.testing.assert_allclose(ours, exponents, atol=1e-5)
    assert np.all(np.exp2(np.round(np.log2(states.loss_scale))) == states.loss_scale)
    assert np.all((states.loss_scale >= bounds[0]) & (states.loss_scale <= bounds[1]))


def test_the_smooth_rule_skips_at_the_rate_of_growth_over_backoff():
    rule = ols.smooth_loss_scale(2.0**20, growth_bits=1e-2, backoff_bits=1.0)

    def step(state, magnitude):  # `magnitude` is that of the largest gradient.
        finite = state.loss_scale * magnitude < 65504
        state = rule.adjust(state, finite)
        return state, finite

    noise = np.random.default_rng(0).normal(-6, 1, 20_000)
    _, finite = jax.lax.scan(step, rule.init(), jnp.exp2(jnp.asarray(noise, "f4")))
    rate = 1 - np.mean(finite[2000:])
    assert rate == pytest.approx(1e-2, rel=0.2)


def test_by_default_the_smooth_rule_rises_by_0_001_bits_and_falls_by_one_bit():
    rule = ols.smooth_loss_scale()
    state = rule.adjust(rule.init(), True)
    assert (state.loss_scale, state.rule_state.fraction) == (2.0**15, np.float32(1e-3))
    state = rule.adjust(state, False)
    assert state.loss_scale == 2.0**14
    state = ols.smooth_loss_scale(2.0**10 * 1.5).init()
    assert state.loss_scale == 2.0**10
    assert state.rule_state.fraction == pytest.approx(math.log2(1.5))


def test_a_scale_just_below_a_power_of_two_starts_with_a_fraction_below_one():
    rule = ols.smooth_loss_scale(2.0**15 * (1 - 2.0**-40), growth_bits=0.5)
    state = rule.init()
    assert state.loss_scale == 2.0**14
    assert state.rule_state.fraction == np.nextafter(np.float32(1), np.float32(0))
    assert rule.adjust(state, True).loss_scale == 2.0**15


def test_the_smooth_rule_continues_from_a_scale_that_was_set():
    rule = ols.smooth_loss_scale(8.0, growth_bits=0.5)
    state = ols.set_loss_scale(rule.adjust(rule.init(), True), 1000.0)
    assert rule.adjust(state, True).loss_scale == 2000
    assert rule.adjust(state, False).loss_scale == 500


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1.0, 1e30])
def test_the_smooth_rule_treats_a_fraction_out_of_range_as_zero(bad):
    rule = ols.smooth_loss_scale(8.0, growth_bits=0.5)
    state = rule.init()
    rule_state = state.rule_state._replace(fraction=jnp.asarray(bad, jnp.float32))
    damaged = state._replace(rule_state=rule_state)
    assert_same_bits(rule.adjust(damaged, True), rule.adjust(state, True))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[("growth_bits", x, "finite, at least 9.5") for x in (0.0, 126.5, math.nan)],
        *[("backoff_bits", x, "finite, at least 9.5") for x in (0.0, -1.0, 1000.0)],
        ("init_scale", 0.0, "positive"),
    ],
)
def test_smooth_refuses_a_bad_setting(name, value, message):
    with pytest.raises(ValueError, match=f"`{name}` must be {message}"):
        ols.smooth_loss_scale(**{name: value})
