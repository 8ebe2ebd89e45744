"""The headroom rule."""

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
from helpers.history import scales_after, states_after

INF = math.inf


@given(
    strategies.bounds,
    strategies.powers_of_two,
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.3]),
    st.lists(
        st.floats(2.0**-40, 2.0**20, width=32) | st.sampled_from([0.0, INF, INF]),
        min_size=strategies.HISTORY_LENGTH,
        max_size=strategies.HISTORY_LENGTH,
    ),
)
def test_the_headroom_rule_equals_its_oracle(
    bounds, init, history, recent, margin, maxima
):
    settings = {"history": history, "recent": recent, "margin_bits": margin}
    rule = ols.headroom_loss_scale(
        init, min_scale=bounds[0], max_scale=bounds[1], **settings
    )
    states = states_after(rule, np.isfinite(maxima), grads_max=maxima)
    ours = states.loss_scale.tolist()
    assert ours == oracle.run_headroom(maxima, init, *bounds, **settings)
    assert states.last_finite.tolist() == np.isfinite(maxima).tolist()


def test_the_scale_is_exact_for_maxima_at_powers_of_two_and_just_above():
    # XLA's log2 is not exact.
    rule = ols.headroom_loss_scale(
        margin_bits=0.0, history=1, min_scale=2.0**-60, max_scale=2.0**60
    )
    scale_for = jax.jit(lambda x: rule.adjust(rule.init(), True, x).loss_scale)
    for exponent in range(-30, 31, 5):
        # With a scale of 2**-exponent this is the largest value of float16.
        fits = np.float32(65504 * 2.0**exponent)
        assert scale_for(fits) == 2.0**-exponent
        above = np.nextafter(fits, np.float32(INF))
        assert scale_for(above) == 2.0 ** -(exponent + 1)


def test_the_right_scale_is_reached_in_one_step_up_or_down():
    rule = ols.headroom_loss_scale(history=1, margin_bits=2.0)
    assert scales_after(rule, [2.0**-6, 2.0**3, 2.0**-6]) == [2.0**19, 2.0**10, 2.0**19]


def test_gradients_that_are_all_zero_do_not_move_the_scale_at_first():
    rule = ols.headroom_loss_scale(2.0**10, recent=3, margin_bits=2.0)
    assert (
        scales_after(rule, [0.0, 0.0, 1.0, 0.0, 0.0]) == [2.0**10] * 2 + [2.0**13] * 3
    )
    # Some platforms flush subnormal float32, so it counts as zero on all.
    assert scales_after(rule, [1e-40]) == [2.0**10]


@pytest.mark.parametrize(("largest", "expected"), [(2.0**-126, 2**24), (2.0**-127, 8)])
def test_subnormal_gradients_count_as_zero(largest, expected):
    assert scales_after(ols.headroom_loss_scale(8.0), [largest]) == [expected]


def test_a_scale_so_low_that_all_gradients_underflow_rises_again():
    rule = ols.headroom_loss_scale(2.0**-20, recent=4)

    def step(state, _):  # The gradients are 2**-10, in float16.
        grads = jnp.float16(state.loss_scale * 2.0**-10).astype(jnp.float32)
        state = rule.adjust(state, True, grads / state.loss_scale)
        return state, state.loss_scale

    _, trace = jax.lax.scan(step, rule.init(), length=20)
    assert trace[3] == 2.0**-20
    assert trace[-1] == 2.0**24  # The cap; the gradients would allow 65504 * 2**10.


def test_the_scale_rises_again_after_more_bad_batches_than_the_history_holds():
    rule = ols.headroom_loss_scale(history=4, recent=4)
    trace = scales_after(rule, [1.0] * 4 + [INF] * 9 + [0.0] * 60)
    assert trace[12] == 2.0**-24
    assert trace[-1] == 2.0**24


def test_a_peak_is_remembered_for_as_long_as_the_history():
    rule = ols.headroom_loss_scale(history=3, margin_bits=0.0)
    calm, peak = 1.0, 2.0**4
    expected = [2.0**15, 2.0**11, 2.0**11, 2.0**11, 2.0**15]
    assert scales_after(rule, [calm, peak, calm, calm, calm]) == expected


def test_a_maximum_that_is_not_a_peak_is_remembered_only_for_the_recent_steps():
    rule = ols.headroom_loss_scale(history=100, recent=3, margin_bits=1.0)
    # A maximum of 2 would not have overflowed, so it is no peak.
    assert scales_after(rule, [2.0, 1.5, 1.0, 1.0])[-1] == 2.0**14
    assert scales_after(rule, [1.0] * 9 + [2.0**6] + [1.0] * 99)[9:] == [2.0**8] * 100
    assert scales_after(rule, [1.0] * 9 + [2.0**6] + [1.0] * 100)[-1] == 2.0**14


@pytest.mark.parametrize("bad", [1, 3, 12])
def test_bad_batches_lower_the_scale_only_until_the_history_has_passed(bad):
    rule = ols.headroom_loss_scale(history=64)
    maxima = [1.0] * 100 + [INF] * bad + [1.0] * 64
    trace = scales_after(rule, maxima)
    assert trace[99] == 2.0**15
    # Right after them the scale is two bits lower, and after the history it is back.
    assert trace[100 + bad] == 2.0**13
    assert trace[-1] == 2.0**15


def test_a_sudden_rise_of_nine_bits_costs_at_most_three_skips():
    rule = ols.headroom_loss_scale()
    state = rule.init()
    skips = 0
    for magnitude in [2.0**-6] * 10 + [2.0**3] * 30:
        finite = float(state.loss_scale) * magnitude <= 65504
        state = rule.adjust(state, finite, magnitude if finite else INF)
        skips += not finite
    assert skips <= 3
    assert state.loss_scale == 2.0**12


def test_a_step_skipped_only_for_its_loss_does_not_lower_the_scale():
    rule = ols.headroom_loss_scale(history=4, margin_bits=2.0)
    state = rule.adjust(rule.init(), grads_finite=False, grads_max=1.0)
    assert (state.loss_scale, state.total_notfinite) == (2.0**13, 1)


def test_an_overflow_after_a_step_skipped_for_its_loss_counts_as_the_first():
    rule = ols.headroom_loss_scale(margin_bits=2.0)
    state = rule.adjust(rule.init(), True, 1.0)
    state = rule.adjust(state, grads_finite=False, grads_max=1.0)
    state = rule.adjust(state, grads_finite=False, grads_max=INF)
    assert state.loss_scale == 2.0**10
    assert (
        rule.adjust(state, True, 1.0).loss_scale == 2.0**10
    )  # The overflow was remembered.


def test_a_scale_that_was_set_lasts_one_step_under_the_headroom_rule():
    rule = ols.headroom_loss_scale(margin_bits=2.0)
    state = ols.set_loss_scale(rule.adjust(rule.init(), True, 1.0), 8.0)
    assert rule.adjust(state, True, 1.0).loss_scale == 2.0**13


def test_a_restored_state_continues_with_the_same_bits():
    rule = ols.headroom_loss_scale(history=5)
    maxima = [1.0, 4.0, INF, 2.0, 0.5, 0.25, 0.25, 0.25]
    states = states_after(rule, np.isfinite(maxima), grads_max=maxima)
    saved = jax.device_get(jax.tree.map(lambda leaf: leaf[3], states))
    restored = jax.tree.map(jnp.asarray, saved)
    rest = states_after(rule, np.isfinite(maxima[4:]), restored, maxima[4:])
    assert_same_bits(rest, jax.tree.map(lambda leaf: leaf[4:], states))


def test_by_default_headroom_remembers_64_steps_and_the_peaks_of_2400():
    recent, peaks = ols.headroom_loss_scale().init().rule_state
    assert (recent.shape, peaks.shape) == ((64,), (2400,))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(jnp.float16, 2.0**15), (jnp.float8_e5m2, 2.0**15), (jnp.bfloat16, 2.0**24)],
)
def test_headroom_is_measured_to_the_largest_value_of_the_dtype(dtype, expected):
    assert scales_after(ols.headroom_loss_scale(dtype=dtype), [1.0]) == [expected]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"history": 0}, ValueError, "`history` must be at least 1"),
        ({"history": 2.0}, TypeError, "`history` must be an integer"),
        ({"recent": 0}, ValueError, "`recent` must be at least 1"),
        ({"margin_bits": "1"}, TypeError, "`margin_bits` must be a number, got '1'"),
        ({"margin_bits": 126.5}, ValueError, "`margin_bits` .* at most 126, got 126.5"),
        ({"margin_bits": -1.0}, ValueError, "`margin_bits` must be finite, at least 0"),
        ({"dtype": jnp.int8}, TypeError, "`dtype` must be a floating dtype"),
        ({"init_scale": 0.0}, ValueError, "`init_scale` must be positive"),
        ({"min_scale": 8.0, "max_scale": 4.0}, ValueError, "Did you swap them"),
    ],
)
def test_headroom_refuses_a_bad_setting(settings, error, message):
    with pytest.raises(error, match=message):
        ols.headroom_loss_scale(**settings)


def test_a_call_without_the_largest_magnitude_is_refused():
    rule = ols.headroom_loss_scale()
    with pytest.raises(ValueError, match="`grads_max` must be given"):
        rule.adjust(rule.init(), True)
