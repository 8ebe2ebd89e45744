"""The headroom rule."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ols
from helpers import oracle, strategies
from helpers.compare import assert_same_bits
from helpers.compat import enable_x64
from helpers.history import scales_after, states_after
from helpers.inner import lenient

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
    exponents = np.arange(-30, 31, 5)
    # With a scale of 2**-exponent this is the largest value of float16.
    fits = np.ldexp(np.float32(65504), exponents)
    above = np.nextafter(fits, np.float32(INF))
    assert np.log2(scales_after(rule, fits)).tolist() == (-exponents).tolist()
    assert np.log2(scales_after(rule, above)).tolist() == (-exponents - 1).tolist()


TRACES = {
    "the right scale is reached in one step, up or down": (
        {"history": 1, "margin_bits": 2.0},
        [2.0**-6, 2.0**3, 2.0**-6],
        [19, 10, 19],
    ),
    "zeros do not move the scale at first": (
        {"init_scale": 2.0**10, "recent": 3, "margin_bits": 2.0},
        [0.0, 0.0, 1.0, 0.0, 0.0],
        [10, 10, 13, 13, 13],
    ),
    "the first scale is rounded down, however near the next one is": (
        {"init_scale": float(np.nextafter(2.0**10, 0.0))},
        [0.0],
        [9],
    ),
    # Some platforms flush subnormal float32, so it counts as zero on all.
    "subnormal gradients count as zeros": ({"init_scale": 8.0}, [2.0**-127], [3]),
    "the smallest normal ones do not": ({"init_scale": 8.0}, [2.0**-126], [24]),
    # The peak starts at 3 and loses a bit in 10 steps; 65504 / 3 is 0.41 bits above
    # 2**14, and 65504 / 1.5 as much above 2**15. So 6 steps suffice.
    "a nonfinite step costs one bit that comes back": (
        {"history": 40, "recent": 4, "margin_bits": 0.0},
        [1.5, INF] + [1.5] * 9,
        [15] + [14] * 6 + [15] * 4,
    ),
    # The cap is 2**9. The overflow counts as one at the cap, and 4 / 42 bits come back
    # in each step, so 11 steps suffice.
    "a cap between two powers of two is rounded down for an overflow, too": (
        {"history": 42, "margin_bits": 0.0, "max_scale": 1000.0},
        [2.0**-20] * 4 + [INF] + [2.0**-20] * 12,
        [9] * 4 + [8] * 11 + [9] * 2,
    ),
    # The peak was 3 * 2**7 and has faded by 7/4 bits until the last overflow; since
    # then 16 steps have taken a quarter of a bit each.
    "an overflow is remembered for the history": (
        {"history": 16, "recent": 4, "margin_bits": 0.0},
        [1.5] * 4 + [INF, 1.5] * 8 + [1.5] * 16,
        [12, 13, 15],
    ),
    "a search is taken back while gradients are all zero": (
        {"recent": 16, "margin_bits": 0.0},
        [1.5] * 20 + [INF] * 4 + [0.0] + [INF] * 4 + [0.0] * 9,
        [-10, 14, 13, 5, -3, -11] + [13] * 9,
    ),
    "after more bad batches than the history holds it rises again": (
        {"history": 4, "recent": 4},
        [1.0] * 4 + [INF] * 9 + [0.0] * 60,
        [24],
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_the_scale_follows_the_magnitudes(name):
    settings, maxima, exponents = TRACES[name]
    trace = scales_after(ols.headroom_loss_scale(**settings), maxima)
    assert np.log2(trace).tolist()[-len(exponents) :] == exponents


def train(rule, true_maxima):
    """Scale, whether finite, and whether zero, of each step in float16; NaN is bad."""

    def step(state, magnitude):
        scaled = magnitude * state.loss_scale
        finite = scaled <= 65504  # False for NaN.
        zero = finite & (scaled <= 2.0**-25)
        seen = jnp.where(finite, jnp.where(zero, 0.0, magnitude), INF)
        return rule.adjust(state, finite, seen), (state.loss_scale, finite, zero)

    return jax.lax.scan(step, rule.init(), jnp.asarray(true_maxima, jnp.float32))[1]


@pytest.mark.slow
def test_a_scale_so_low_that_all_gradients_underflow_rises_again():
    rule = ols.headroom_loss_scale(2.0**-20, recent=4)
    scales, _, zero = train(rule, [2.0**-10] * 20)
    assert zero[:4].all()
    assert scales[3] == 2.0**-20
    assert scales[4] == 2.0**-16
    assert scales[-1] == 2.0**24  # The cap; the gradients would allow 65504 * 2**10.


@pytest.mark.slow
def test_skipped_steps_are_no_steps_of_zeros():
    rule = ols.headroom_loss_scale(recent=4)
    tx = ols.loss_scaled(optax.sgd(1.0), rule)
    state = tx.init(jnp.ones(2))
    for _ in range(5):
        _, state = tx.update(jnp.ones(2), state, accept=False)
    _, state = tx.update(jnp.zeros(2), state)
    assert ols.get_loss_scale(state) == 2.0**15


def test_a_row_of_bad_batches_lowers_the_scale_by_one_bit_for_at_most_the_history():
    rule = ols.headroom_loss_scale(history=64)
    for bad in (1, 3, 12):
        row = [INF] * bad + [1.0] * (12 - bad)
        trace = scales_after(rule, [1.0] * 100 + row + [1.0] * 64)
        assert trace[99] == 2.0**15
        assert trace[100 + bad] == 2.0**14
        assert trace[-1] == 2.0**15


# The hardest histories of all are searched for in benchmarks/hardest_histories.py.
@pytest.mark.parametrize("level", [0, 30])
def test_headroom_loses_no_more_to_nan_batches_than_the_rule_of_torch(level):
    periods = [100, 500, 2300]
    maxima = np.full((len(periods), 10_000), 65504 * 2.0**-level, np.float32)
    for row, period in zip(maxima, periods, strict=True):
        row[period - 1 :: period] = np.nan
    (torch, _, lost_by_torch), (ours, _, lost_by_us) = (
        jax.device_get(jax.jit(jax.vmap(functools.partial(train, rule)))(maxima))
        for rule in (ols.presets.torch(), ols.headroom_loss_scale())
    )
    assert np.all(lost_by_us.sum(axis=1) <= lost_by_torch.sum(axis=1))
    unused = [
        np.nanmean(np.log2(65504 / maxima / scales), axis=1) for scales in (torch, ours)
    ]
    assert np.all(unused[1] <= unused[0] + 1)


def test_a_sudden_rise_of_nine_bits_costs_at_most_three_skips():
    magnitudes = [2.0**-6] * 10 + [2.0**3] * 30
    scales, finite, _ = train(ols.headroom_loss_scale(), magnitudes)
    assert np.sum(~finite) <= 3
    assert scales[-1] == 2.0**12


def test_a_step_skipped_only_for_its_loss_is_no_overflow_and_lowers_no_scale():
    rule = ols.headroom_loss_scale(margin_bits=2.0)
    state = rule.adjust(rule.init(), True, 1.0)
    state = rule.adjust(state, grads_finite=False, grads_max=1.0)
    assert (state.loss_scale, state.total_notfinite) == (2.0**13, 1)
    state = rule.adjust(state, grads_finite=False, grads_max=INF)
    assert state.loss_scale == 2.0**12
    assert state.rule_state.peaks[-1] == 2


@pytest.mark.parametrize("kind", [float, int, np.float64, jnp.float16, jnp.bfloat16])
def test_the_largest_magnitude_may_be_any_kind_of_number(kind):
    rule = ols.headroom_loss_scale()
    expected = rule.adjust(rule.init(), True, jnp.float32(4.0))
    assert_same_bits(rule.adjust(rule.init(), True, kind(4.0)), expected)


def test_of_a_long_memory_the_last_32_steps_of_zeros_raise_the_scale():
    rule = ols.headroom_loss_scale(history=64, recent=64)
    first = rule.adjust(rule.init(), True, 1.0)
    zeros = states_after(rule, [True] * 32, first, grads_max=np.zeros(32))
    assert jnp.all(zeros.loss_scale[:31] == first.loss_scale)
    assert zeros.loss_scale[31] == 16 * first.loss_scale


def test_the_recent_magnitudes_may_be_many():
    rule = ols.headroom_loss_scale(recent=500, margin_bits=0.0)
    maxima = np.asarray([1.0] + [2.0**-5] * 500, np.float32)
    scales = states_after(rule, [True] * 501, grads_max=maxima).loss_scale
    assert np.all(scales[:500] == 2.0**15)
    assert scales[500] == 2.0**20


def test_in_a_wide_dtype_gradients_overflow_where_float32_does():
    maxima = np.asarray([1.0, INF, INF, 2.0**90, 0.0], np.float32)
    wide, float32 = (
        states_after(
            ols.headroom_loss_scale(dtype=dtype), maxima < INF, grads_max=maxima
        )
        for dtype in (np.float64, np.float32)
    )
    assert_same_bits(wide, float32)


@pytest.mark.parametrize(
    ("largest", "margin", "init_scale"), [(3e38, 0.0, 1.0), (0.0, 126.0, 2.0**126)]
)
def test_the_magnitude_that_an_overflow_stands_for_is_a_normal_float32(
    largest, margin, init_scale
):
    rule = ols.headroom_loss_scale(
        init_scale, margin_bits=margin, min_scale=2.0**-126, max_scale=2.0**126
    )
    state = rule.adjust(rule.init(), True, largest)
    state = rule.adjust(state, False, INF)
    limits = np.finfo(np.float32)
    assert limits.tiny <= state.rule_state.peaks[-1] <= limits.max


@pytest.mark.parametrize("magnitude", [INF, math.nan])
def test_a_nonfinite_magnitude_is_an_overflow_whatever_the_flag_says(magnitude):
    rule = ols.headroom_loss_scale()
    expected = rule.adjust(rule.init(), False, INF)
    for flag in (True, False):
        assert_same_bits(rule.adjust(rule.init(), flag, magnitude), expected)


def test_a_finite_float64_beyond_float32_is_no_overflow():
    with enable_x64(True):
        grads = jnp.asarray([1e39 * 2.0**15])
        tx = ols.loss_scaled(optax.identity(), ols.headroom_loss_scale())
        updates, state = tx.update(grads, tx.init(grads))
    assert state.loss_scale_state.last_finite
    assert updates.tolist() == [1e39]


def test_at_the_floor_an_infinity_in_the_memory_is_ignored():
    rule = ols.headroom_loss_scale(1.0, min_scale=1.0, recent=4, history=4)
    recent = jnp.asarray([1.0, 1.0, 1.0, INF])
    state = rule.init()
    state = state._replace(rule_state=state.rule_state._replace(recent=recent))
    after = rule.adjust(state, True, 1.0)
    assert np.isfinite(after.rule_state.recent).all()
    assert after.loss_scale > 1.0


def test_an_overflow_after_zeros_and_a_step_skipped_for_its_updates_is_the_first():
    rule = ols.headroom_loss_scale(2.0**10)
    tx = ols.loss_scaled(lenient(optax.scale(INF)), rule, check_updates=True)
    state = tx.init(jnp.ones(2))
    for grads in (jnp.zeros(2), jnp.ones(2), jnp.full(2, INF)):
        _, state = tx.update(grads, state)
    assert ols.find_loss_scale_state(state).total_notfinite == 3
    assert ols.get_loss_scale(state) == 2.0**9


@pytest.mark.parametrize("field", ["recent", "peaks"])
def test_a_number_that_cannot_be_right_is_ignored(field):
    rule = ols.headroom_loss_scale(recent=4, history=4, margin_bits=0.0)
    adjust = jax.jit(rule.adjust)
    state = adjust(rule.init(), True, 2.0**-4)
    memory = getattr(state.rule_state, field)
    # A peak of 2**10 would have overflowed at the present scale.
    wrong = [math.nan, INF, -INF, -1.0, 1e20, 3e38] + [2.0**10] * (field == "peaks")
    for bad, where in itertools.product(wrong, [slice(None), 2, -1]):
        rule_state = state.rule_state._replace(**{field: memory.at[where].set(bad)})
        damaged = state._replace(rule_state=rule_state)
        for maximum, expected in ((2.0**-4, 2.0**19), (INF, 2.0**18)):
            after = adjust(damaged, maximum < INF, maximum)
            assert after.loss_scale == expected, (bad, where)
            for leaf in after.rule_state:
                assert np.all(np.isfinite(leaf) & (leaf >= 0)), (bad, where)


@pytest.mark.parametrize("setting", ["recent", "history"])
def test_a_state_that_was_saved_with_other_settings_is_refused(setting):
    settings = {"recent": 4, "history": 8}
    saved = ols.headroom_loss_scale(**settings | {setting: 6}).init()
    rule = ols.headroom_loss_scale(**settings)
    got = settings | {setting: 6}
    shapes = rf"\({got['recent']},\) and \({got['history']},\)"
    message = f"`recent` 4 and `history` 8, got .* {shapes}.*Give the rule the settings"
    with pytest.raises(ValueError, match=message):
        rule.adjust(saved, True, 1.0)
    tx = ols.loss_scaled(lenient(optax.sgd(0.1)), rule)
    with pytest.raises(ValueError, match=message):
        tx.update(jnp.ones(2), ols.LossScaledState(saved, tx.init(jnp.ones(2))[1]))
    with pytest.raises(ValueError, match="`grads_max` must be given"):
        rule.adjust(rule.init(), True)


def test_a_scale_that_was_set_lasts_one_step_under_the_headroom_rule():
    rule = ols.headroom_loss_scale(margin_bits=2.0)
    state = ols.set_loss_scale(rule.adjust(rule.init(), True, 1.0), 8.0)
    assert rule.adjust(state, True, 1.0).loss_scale == 2.0**13


def test_in_a_wide_dtype_a_row_of_overflows_is_searched_and_an_infinity_ignored():
    rule = ols.headroom_loss_scale(2.0**100, max_scale=2.0**126, dtype=jnp.bfloat16)
    trace = scales_after(rule, [1.0, INF, INF, INF])
    assert [a / b for a, b in itertools.pairwise(trace[1:])] == [2.0**8] * 2
    rule = ols.headroom_loss_scale(2.0**-2, recent=4, history=4, dtype=jnp.bfloat16)
    state = rule.adjust(rule.init(), True, 1.0)
    for field in ("recent", "peaks"):
        memory = getattr(state.rule_state, field).at[1].set(INF)
        low = ols.set_loss_scale(state, 2.0**-2)
        damaged = state.rule_state._replace(**{field: memory})
        after = rule.adjust(low._replace(rule_state=damaged), True, 1.0)
        assert all(np.isfinite(leaf).all() for leaf in after.rule_state)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(jnp.float16, 2.0**14), (jnp.float8_e4m3fn, 2.0**14)]
)
def test_a_first_step_that_overflows_costs_one_bit_in_any_dtype(dtype, expected):
    rule = ols.headroom_loss_scale(margin_bits=0.0, dtype=dtype)
    assert rule.adjust(rule.init(), False, INF).loss_scale == expected


def test_from_a_scale_between_two_powers_the_rule_goes_on_from_the_lower_one():
    rule = ols.headroom_loss_scale()
    state = ols.set_loss_scale(rule.init(), 60_000.0)
    assert rule.adjust(state, True, 0.0).loss_scale == 2.0**15


def test_a_scale_that_was_set_below_the_floor_makes_the_rule_forget_nothing():
    rule = ols.headroom_loss_scale(1.0, min_scale=1.0, margin_bits=0.0)
    state = rule.adjust(rule.init(), True, 2.0**17)
    state = ols.set_loss_scale(state, 2.0**-3)
    assert rule.adjust(state, True, 1.0).loss_scale == 1.0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(jnp.float16, 2.0**15), (jnp.float8_e5m2, 2.0**15), (jnp.bfloat16, 2.0**24)],
)
def test_headroom_is_measured_to_the_largest_value_of_the_dtype(dtype, expected):
    rule = ols.headroom_loss_scale(dtype=dtype)
    assert rule.adjust(rule.init(), True, 1.0).loss_scale == expected


def test_in_a_dtype_without_infinity_headroom_is_measured_to_its_largest_number():
    rule = ols.headroom_loss_scale(margin_bits=0.0, dtype=jnp.float8_e4m3fn)
    for magnitude, expected in ((1.75, 2.0**8), (1.85, 2.0**7)):  # 448 / 2**8 = 1.75
        assert rule.adjust(rule.init(), True, magnitude).loss_scale == expected


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"history": 0}, ValueError, "`history` must be at least 1"),
        ({"history": 2.0}, TypeError, "`history` must be an integer"),
        ({"recent": 0}, ValueError, "`recent` must be at least 1"),
        ({"recent": 64.9}, TypeError, "`recent` must be an integer, got 64.9"),
        ({"recent": True}, TypeError, "`recent` must be an integer, got True"),
        ({"init_scale": True}, TypeError, "`init_scale` must be a number, got True"),
        ({"init_scale": "8"}, TypeError, "`init_scale` must be a number, got '8'"),
        ({"margin_bits": "1"}, TypeError, "`margin_bits` must be a number, got '1'"),
        ({"margin_bits": 126.5}, ValueError, "`margin_bits` .* at most 126, got 126.5"),
        ({"margin_bits": -1.0}, ValueError, "`margin_bits` must be finite, at least 0"),
        ({"init_scale": 0.0}, ValueError, "`init_scale` must be positive"),
    ],
)
def test_headroom_refuses_a_bad_setting(settings, error, message):
    with pytest.raises(error, match=message):
        ols.headroom_loss_scale(**settings)


def test_the_largest_magnitude_that_fits_at_the_floor_is_remembered():
    rule = ols.headroom_loss_scale(2.0, min_scale=1.0, margin_bits=0.0)
    state = rule.init()
    recent = state.rule_state.recent.at[-1].set(65504.0)
    state = state._replace(rule_state=state.rule_state._replace(recent=recent))
    assert rule.adjust(state, True, 1.0).loss_scale == 1.0
