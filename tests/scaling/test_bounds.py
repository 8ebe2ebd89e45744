"""Fixed and scheduled bounds of the loss scale."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.compat import enable_x64
from helpers.history import scales_after

INF = math.inf
of_both_rules = pytest.mark.parametrize(
    "make", [ols.dynamic_loss_scale, ols.headroom_loss_scale]
)


def rising_floor(step):
    return jnp.where(step >= 3, 64, 1)  # Integers will do.


@of_both_rules
def test_the_floor_can_be_a_schedule_of_the_steps_taken_so_far(make):
    rule = make(1.0, min_scale=rising_floor, max_scale=2.0**20)
    for maximum in (INF, 65504.0):
        assert scales_after(rule, [maximum] * 5) == [1.0] * 3 + [64.0] * 2


def powers(step):
    return jnp.ldexp(jnp.float32(1), step)


@of_both_rules
def test_the_cap_wins_where_a_scheduled_floor_exceeds_it(make):
    rule = make(2.0, min_scale=powers, max_scale=8.0)
    assert scales_after(rule, [INF] * 6) == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


@of_both_rules
def test_the_cap_can_be_a_schedule_of_optax(make):
    cap = optax.piecewise_constant_schedule(2.0**10, {2: 2.0**-5})
    with jax.numpy_dtype_promotion("standard"):  # As Optax needs.
        rule = make(2.0**15, min_scale=1.0, max_scale=cap)
        assert scales_after(rule, [2.0**-20] * 4) == [2.0**10] * 2 + [2.0**5] * 2


def test_after_a_cap_has_risen_an_overflow_lowers_the_scale_by_one_bit():
    cap = lambda step: jnp.where(step < 2, 2.0**10, 2.0**24)  # noqa: E731
    rule = ols.headroom_loss_scale(2.0**10, max_scale=cap)
    expected = [2.0**10] * 2 + [2.0**24, 2.0**23]
    assert scales_after(rule, [2.0**-12] * 3 + [INF]) == expected


def test_a_fixed_bound_beside_a_scheduled_one_applies_to_changes_only():
    rule = ols.dynamic_loss_scale(min_scale=1.0, max_scale=lambda step: 2.0**24)
    below = ols.set_loss_scale(rule.init(), 0.125)
    assert rule.adjust(below, False).loss_scale == rule.adjust(below, True).loss_scale
    assert rule.adjust(below, False).loss_scale == 0.125
    rule = ols.dynamic_loss_scale(64.0, min_scale=powers, max_scale=8.0)
    assert scales_after(rule, [1.0, INF, INF, INF, INF]) == [64.0, 32.0, 16.0, 8.0, 8.0]


@of_both_rules
def test_a_schedule_goes_on_for_as_long_as_a_run(make):
    def cap(step):
        return jnp.where(step < 10**9, 2.0**10, 2.0**5)

    rule = make(2.0**15, min_scale=1.0, max_scale=cap)
    state = rule.init()._replace(step_count=jnp.int32(10**9))
    assert rule.adjust(state, True, 2.0**-20).loss_scale == 2.0**5


def test_a_cap_that_falls_applies_to_a_step_that_backs_off_too():
    cap = lambda step: jnp.where(step < 2, 2.0**10, 2.0**5)  # noqa: E731
    rule = ols.dynamic_loss_scale(2.0**15, max_scale=cap)
    assert scales_after(rule, [1.0, 1.0, INF]) == [2.0**10] * 2 + [2.0**5]


@pytest.mark.parametrize("backoff_factor", [0.5, 1 / 3])
def test_an_overflow_never_raises_a_scale_that_was_set_below_the_floor(backoff_factor):
    rule = ols.dynamic_loss_scale(
        8.0, min_scale=2.0, growth_interval=2, backoff_factor=backoff_factor
    )
    state, scales = ols.set_loss_scale(rule.init(), 2.0**-30), []
    for finite in (False, False, True, True, False):
        state = rule.adjust(state, finite)
        scales.append(float(state.loss_scale))
    assert scales == [2.0**-30] * 3 + [2.0**-29] * 2
    state = rule.adjust(ols.set_loss_scale(state, 3.0), False)
    assert state.loss_scale == 2.0  # From above the floor it backs off to the floor.


@pytest.mark.parametrize("make", [ols.dynamic_loss_scale, ols.presets.jmp])
def test_a_first_scale_below_the_floor_backs_off_to_it_as_in_jmp(make):
    floor = "min_scale" if make is ols.dynamic_loss_scale else "min_loss_scale"
    assert scales_after(make(8.0, **{floor: 16.0}), [INF] * 2) == [16.0] * 2


@pytest.mark.slow
def test_bounds_of_the_headroom_rule_are_rounded_inward_to_powers_of_two():
    rule = ols.headroom_loss_scale(2.0**15, min_scale=3.0, max_scale=1000.0)
    trace = scales_after(rule, [2.0**-20] + [2.0**30] + [INF] * 20)
    assert (trace[0], trace[-1]) == (512, 4)
    # The cap wins where scheduled bounds have no power of two between them.
    rule = ols.headroom_loss_scale(min_scale=lambda step: 5.0, max_scale=7.0)
    assert scales_after(rule, [1.0]) == [4]


@of_both_rules
def test_a_schedule_cannot_move_the_scale_out_of_its_usable_range(make):
    values = jnp.asarray([math.nan, -1.0, 0.0, INF])
    rule = make(2.0, min_scale=values.__getitem__, max_scale=values.__getitem__)
    for magnitude in (1.0, INF):
        trace = scales_after(rule, [magnitude] * 4)
        assert all(2.0**-126 <= scale <= 2.0**126 for scale in trace)


@of_both_rules
def test_bounds_are_rounded_to_float32_in_x64_too(make):
    with enable_x64(True):
        cap = jnp.asarray(16.0, jnp.float64)
        rule = make(2.0**10, max_scale=lambda count: cap)
        scale = rule.adjust(rule.init(), True, 1.0).loss_scale
        assert (scale, scale.dtype) == (16, jnp.float32)
        rule = make(8.0, min_scale=8 * (1 + 2.0**-40), max_scale=16.0)
        state = rule.adjust(rule.init(), False, INF)
    assert state.loss_scale == 8


def test_a_schedule_must_return_one_number():
    message = "`min_scale` must be a schedule that gives"
    for value in (jnp.ones(2), (1.0, 2.0)):
        with pytest.raises(ValueError, match=message):
            ols.dynamic_loss_scale(min_scale=lambda step, value=value: value)


@pytest.mark.parametrize("bounds", [(5.0, 7.0), (2.0**-3 * 1.5, 2.0**-3 * 1.5)])
def test_fixed_bounds_without_a_power_of_two_between_them_are_refused(bounds):
    with pytest.raises(ValueError, match="must have a power of two between them"):
        ols.headroom_loss_scale(min_scale=bounds[0], max_scale=bounds[1])


@pytest.mark.parametrize(
    "bounds", [(4.0, 4.0), (4.0, 7.0), (5.0, 8.0), (2.0**-126,) * 2]
)
def test_fixed_bounds_may_touch_a_power_of_two(bounds):
    rule = ols.headroom_loss_scale(min_scale=bounds[0], max_scale=bounds[1])
    scale = rule.adjust(rule.init(), True, 1.0).loss_scale
    assert bounds[0] <= scale <= bounds[1]
