"""The smooth rule and the headroom rule, and bounds that are schedules."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
import strategies
from compare import assert_same_bits, types
from compat import enable_x64, set_mesh
from history import states_after
from hypothesis import given
from hypothesis import strategies as st
from inner import adam
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

INF = math.inf
RULES = {
    "dynamic": ols.dynamic_loss_scale,
    "smooth": ols.smooth_loss_scale,
    "headroom": ols.headroom_loss_scale,
}


def scales(rule, maxima):
    """The scale after each step with such a largest magnitude."""
    states = states_after(rule, np.isfinite(maxima), grads_max=maxima)
    return states.loss_scale.tolist()


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

    def step(state, magnitude):  # Of the largest gradient, as a power of two.
        finite = state.loss_scale * magnitude < 65504
        state = rule.adjust(state, finite)
        return state, finite

    noise = np.random.default_rng(0).normal(-6, 1, 20_000)
    _, finite = jax.lax.scan(step, rule.init(), jnp.exp2(jnp.asarray(noise, "f4")))
    rate = 1 - np.mean(finite[2000:])
    assert rate == pytest.approx(1e-2, rel=0.2)


def test_by_default_the_smooth_rule_moves_by_a_thousandth_of_a_bit_and_by_one():
    rule = ols.smooth_loss_scale()
    state = rule.adjust(rule.init(), True)
    assert (state.loss_scale, state.rule_state.fraction) == (2.0**15, np.float32(1e-3))
    state = rule.adjust(state, False)
    assert state.loss_scale == 2.0**14


def test_the_smooth_rule_starts_with_a_fraction_where_the_scale_is_between():
    state = ols.smooth_loss_scale(2.0**10 * 1.5).init()
    assert state.loss_scale == 2.0**10
    assert state.rule_state.fraction == pytest.approx(math.log2(1.5))


def test_the_smooth_rule_goes_on_from_a_scale_that_was_set():
    rule = ols.smooth_loss_scale(8.0, growth_bits=0.5)
    state = ols.set_loss_scale(rule.adjust(rule.init(), True), 1000.0)
    assert rule.adjust(state, True).loss_scale == 2000
    assert rule.adjust(state, False).loss_scale == 500


def test_the_smooth_rule_takes_a_fraction_that_is_nan_for_zero():
    rule = ols.smooth_loss_scale(8.0, growth_bits=0.5)
    state = rule.init()
    rule_state = state.rule_state._replace(fraction=jnp.asarray(math.nan, jnp.float32))
    damaged = state._replace(rule_state=rule_state)
    assert_same_bits(rule.adjust(damaged, True), rule.adjust(state, True))


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


@pytest.mark.parametrize("exponent", range(-30, 31, 5))
def test_the_exponent_is_exact_at_powers_of_two_and_beside_them(exponent):
    # XLA's log2 is not.
    rule = ols.headroom_loss_scale(
        margin_bits=0.0, history=1, min_scale=2.0**-60, max_scale=2.0**60
    )
    fits = 65504 * 2.0**exponent  # With 2**-exponent it is float16's largest value.
    above = np.nextafter(np.float32(fits), np.float32(INF))
    assert scales(rule, [fits]) == [2.0**-exponent]
    assert scales(rule, [float(above)]) == [2.0 ** -(exponent + 1)]


def test_it_reaches_the_right_scale_in_one_step_up_or_down():
    rule = ols.headroom_loss_scale(history=1, margin_bits=2.0)
    assert scales(rule, [2.0**-6, 2.0**3, 2.0**-6]) == [2.0**19, 2.0**10, 2.0**19]


def test_gradients_that_are_all_zero_move_nothing_at_first():
    rule = ols.headroom_loss_scale(2.0**10, recent=3, margin_bits=2.0)
    assert scales(rule, [0.0, 0.0, 1.0, 0.0, 0.0]) == [2.0**10] * 2 + [2.0**13] * 3
    # A subnormal float32, which some platforms flush, counts as zero on all.
    assert scales(rule, [1e-40]) == [2.0**10]


@pytest.mark.parametrize(("largest", "expected"), [(2.0**-126, 2**24), (2.0**-127, 8)])
def test_gradients_that_are_subnormal_count_as_zero(largest, expected):
    assert scales(ols.headroom_loss_scale(8.0), [largest]) == [expected]


def test_a_scale_so_low_that_all_gradients_are_flushed_rises_again():
    rule = ols.headroom_loss_scale(2.0**-20, recent=4)

    def step(state, _):  # Gradients of 2**-10, in float16.
        grads = jnp.float16(state.loss_scale * 2.0**-10).astype(jnp.float32)
        state = rule.adjust(state, True, grads / state.loss_scale)
        return state, state.loss_scale

    _, trace = jax.lax.scan(step, rule.init(), length=20)
    assert trace[3] == 2.0**-20
    assert trace[-1] == 2.0**24  # The cap; 65504 * 2**10 would allow more.


def test_after_a_row_of_bad_batches_as_long_as_the_history_it_rises_again():
    rule = ols.headroom_loss_scale(history=4, recent=4)
    trace = scales(rule, [1.0] * 4 + [INF] * 9 + [0.0] * 60)
    assert trace[12] == 2.0**-24
    assert trace[-1] == 2.0**24


def test_a_peak_is_remembered_for_as_long_as_the_history():
    rule = ols.headroom_loss_scale(history=3, margin_bits=0.0)
    calm, peak = 1.0, 2.0**4
    expected = [2.0**15, 2.0**11, 2.0**11, 2.0**11, 2.0**15]
    assert scales(rule, [calm, peak, calm, calm, calm]) == expected


def test_what_is_no_peak_is_remembered_for_the_recent_steps_alone():
    rule = ols.headroom_loss_scale(history=100, recent=3, margin_bits=1.0)
    # From 2 to 1 and a half: nothing that would have overflowed.
    assert scales(rule, [2.0, 1.5, 1.0, 1.0])[-1] == 2.0**14
    assert scales(rule, [1.0] * 9 + [2.0**6] + [1.0] * 99)[9:] == [2.0**8] * 100
    assert scales(rule, [1.0] * 9 + [2.0**6] + [1.0] * 100)[-1] == 2.0**14


@pytest.mark.parametrize("bad", [1, 3, 12])
def test_bad_batches_cost_a_skip_each_and_no_lasting_bits(bad):
    rule = ols.headroom_loss_scale(history=64)
    maxima = [1.0] * 100 + [INF] * bad + [1.0] * 64
    trace = scales(rule, maxima)
    assert trace[99] == 2.0**15
    # At once only what one of them takes is gone, and after the history nothing.
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


def test_a_step_that_is_skipped_for_its_loss_alone_backs_nothing_off():
    rule = ols.headroom_loss_scale(history=4, margin_bits=2.0)
    state = rule.adjust(rule.init(), grads_finite=False, grads_max=1.0)
    assert (state.loss_scale, state.total_notfinite) == (2.0**13, 1)


def test_an_overflow_after_a_step_that_was_skipped_for_its_loss_is_the_first_of_a_row():
    rule = ols.headroom_loss_scale(margin_bits=2.0)
    state = rule.adjust(rule.init(), True, 1.0)
    state = rule.adjust(state, grads_finite=False, grads_max=1.0)
    state = rule.adjust(state, grads_finite=False, grads_max=INF)
    assert state.loss_scale == 2.0**10
    assert rule.adjust(state, True, 1.0).loss_scale == 2.0**10  # It was remembered.


def test_a_scale_that_was_set_lasts_one_step_on_the_headroom_rule():
    rule = ols.headroom_loss_scale(margin_bits=2.0)
    state = ols.set_loss_scale(rule.adjust(rule.init(), True, 1.0), 8.0)
    assert rule.adjust(state, True, 1.0).loss_scale == 2.0**13


def test_a_restored_state_goes_on_as_if_nothing_had_happened():
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
def test_headroom_is_that_of_the_dtype(dtype, expected):
    assert scales(ols.headroom_loss_scale(dtype=dtype), [1.0]) == [expected]


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


@pytest.mark.parametrize("name", ["growth_bits", "backoff_bits"])
@pytest.mark.parametrize("value", [0.0, -1.0, 126.5, 1000.0, math.nan])
def test_smooth_refuses_a_bad_setting(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be finite, at least 9.5"):
        ols.smooth_loss_scale(**{name: value})


def test_smooth_refuses_a_bad_first_scale():
    with pytest.raises(ValueError, match="`init_scale` must be positive"):
        ols.smooth_loss_scale(0.0)


def test_headroom_without_a_largest_magnitude_is_refused():
    rule = ols.headroom_loss_scale()
    with pytest.raises(ValueError, match="`grads_max` must be given"):
        rule.adjust(rule.init(), True)


@pytest.mark.parametrize("rule", [ols.smooth_loss_scale(), ols.headroom_loss_scale()])
def test_the_type_of_a_state_never_changes(rule):
    state = rule.init()
    for adjust in (rule.adjust, jax.jit(rule.adjust)):
        after = adjust(state, True, 1.0)
        assert types(after) == types(state)
        assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("rule", [ols.smooth_loss_scale(), ols.headroom_loss_scale()])
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_a_skipped_step_changes_no_bit_but_the_rule_s(rule, value):
    params = {"w": jnp.ones((2, 3)), "b": jnp.asarray([0.5, -0.0])}
    tx = ols.loss_scaled(adam(), rule)
    update = jax.jit(tx.update)
    _, state = update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    bad = {"w": jnp.ones((2, 3)).at[1, 2].set(value), "b": jnp.ones(2)}
    updates, after = update(bad, state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(after.inner_state, state.inner_state)
    assert ols.get_loss_scale(after) < ols.get_loss_scale(state)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shard", range(8))
def test_headroom_sees_a_nan_on_each_shard(axis_type, shard):
    # XLA's maximum over devices drops a NaN.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    tx = ols.loss_scaled(adam(), ols.headroom_loss_scale())
    with set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data"))
        params = jax.device_put(jnp.ones((8, 2)), sharding)
        grads = jnp.ones((8, 2)).at[shard, 1].set(math.nan)
        grads = jax.device_put(grads, sharding)
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert not ols.find_loss_scale_state(state).last_finite


@pytest.mark.parametrize("shard", range(8))
def test_headroom_is_the_same_on_all_devices_of_pmap(shard):
    tx = ols.loss_scaled(adam(), ols.headroom_loss_scale(), axis_name="data")
    params = jnp.ones(2)
    states = jax.tree.map(lambda x: jnp.stack([x] * 8), tx.init(params))
    update = jax.pmap(tx.update, axis_name="data", in_axes=(0, 0, None))
    grads = jnp.ones((8, 2)).at[shard].set(2.0**7)
    _, states = update(grads, states, params)
    # The largest unscaled gradient is 2**-8, and leaves half a bit and more.
    assert set(states.loss_scale_state.loss_scale.tolist()) == {2.0**23}
    _, states = update(grads.at[shard, 0].set(math.nan), states, params)
    assert set(states.loss_scale_state.loss_scale.tolist()) == {2.0**21}


def rising_floor(step):
    return jnp.where(step >= 3, 64.0, 1.0)


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_a_floor_may_be_a_schedule_of_the_steps_before(make):
    rule = make(2.0, min_scale=rising_floor, max_scale=2.0**20)
    trace = scales(rule, [INF] * 5)
    assert trace[:3] == [1.0] * 3
    assert trace[3:] == [64.0] * 2


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_a_scheduled_floor_holds_on_a_finite_step_too(make):
    rule = make(2.0, min_scale=lambda step: jnp.float32(2.0**12), max_scale=2.0**12)
    assert scales(rule, [2.0**-20]) == [2.0**12]


def powers(step):
    return jnp.ldexp(jnp.float32(1), step)


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_where_a_scheduled_floor_crosses_the_cap_the_cap_wins(make):
    rule = make(2.0, min_scale=powers, max_scale=8.0)
    assert scales(rule, [INF] * 6) == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_a_cap_may_be_a_schedule_of_optax(make):
    cap = optax.piecewise_constant_schedule(2.0**10, {2: 2.0**-5})
    with jax.numpy_dtype_promotion("standard"):  # As Optax needs.
        rule = make(2.0**15, min_scale=1.0, max_scale=cap)
        assert scales(rule, [2.0**-20] * 4) == [2.0**10] * 2 + [2.0**5] * 2


@pytest.mark.parametrize("name", ["smooth", "headroom"])
def test_bounds_are_rounded_inward_to_powers_of_two(name):
    rule = RULES[name](2.0**15, min_scale=3.0, max_scale=1000.0)
    assert scales(rule, [2.0**-20])[-1] == 512
    assert scales(rule, [2.0**30] + [INF] * 20)[-1] == 4


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, INF])
def test_a_schedule_never_takes_the_scale_out_of_its_range(make, value):
    rule = make(2.0, min_scale=lambda step: value, max_scale=lambda step: value)
    for magnitude in (1.0, INF):
        [scale] = scales(rule, [magnitude])
        assert 2.0**-126 <= scale <= 2.0**126


@pytest.mark.parametrize("make", RULES.values())
def test_a_schedule_may_give_an_integer(make):
    rule = make(2.0**10, max_scale=lambda count: 16)
    assert rule.adjust(rule.init(), True, 1.0).loss_scale == 16


@pytest.mark.parametrize("make", RULES.values())
def test_bounds_are_those_of_float32_in_x64_too(make):
    with enable_x64(True):
        cap = jnp.asarray(16.0, jnp.float64)
        rule = make(2.0**10, max_scale=lambda count: cap)
        scale = rule.adjust(rule.init(), True, 1.0).loss_scale
        assert (scale, scale.dtype) == (16, jnp.float32)
        rule = make(8.0, min_scale=8 * (1 + 2.0**-40), max_scale=16.0)
        state = rule.adjust(rule.init(), False, INF)
    assert state.loss_scale == 8


def test_a_schedule_must_give_one_number():
    message = "`min_scale` must be a schedule that gives"
    for value in (jnp.ones(2), (1.0, 2.0)):
        with pytest.raises(ValueError, match=message):
            ols.dynamic_loss_scale(min_scale=lambda step, value=value: value)
