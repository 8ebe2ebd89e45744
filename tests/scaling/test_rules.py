"""The dynamic rule, the static rule and no loss scale; and refused settings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits

PRESETS = [name for name in ols.presets.__all__ if "state_dict" not in name]


def scales(rule, history):
    """The scale before the first step and after each."""
    state = rule.init()
    trace = [float(state.loss_scale)]
    for finite in history:
        state = rule.adjust(state, finite)
        trace.append(float(state.loss_scale))
    return trace


def test_the_scale_grows_exactly_on_the_last_finite_step_of_the_interval():
    # Flax's DynamicScale grows one step late.
    rule = ols.dynamic_loss_scale(8.0, growth_interval=3)
    assert scales(rule, [True] * 7) == [8, 8, 8, 16, 16, 16, 32, 32]


@pytest.mark.parametrize("damaged", [-(2**31), -5, 2**31 - 1])
def test_damaged_counts_do_not_keep_the_scale_from_changing(damaged):
    rule = ols.dynamic_loss_scale(8.0, growth_interval=3, hysteresis=2)
    state = rule.init()
    count = jnp.asarray(damaged, jnp.int32)
    state = state._replace(rule_state=type(state.rule_state)(count, count))
    for _ in range(2):
        state = rule.adjust(state, False)
    backed_off = state.loss_scale
    assert backed_off < 8.0
    state = state._replace(rule_state=state.rule_state._replace(growth_count=count))
    for _ in range(2 * 3):
        state = rule.adjust(state, True)
    assert state.loss_scale > backed_off


def test_by_default_the_scale_grows_on_the_2000th_finite_step_and_has_a_low_floor():
    rule = ols.dynamic_loss_scale(8.0)
    state = rule.init()
    count = state.rule_state._replace(growth_count=jnp.asarray(1998, jnp.int32))
    before = rule.adjust(state._replace(rule_state=count), True)
    assert (before.loss_scale, rule.adjust(before, True).loss_scale) == (8, 16)
    # jmp #18, tensorflow #38357: a floor of 1 left users stuck.
    assert scales(ols.dynamic_loss_scale(1.0), [False])[-1] == 0.5


def test_a_nonfinite_step_backs_off_and_restarts_the_count():
    rule = ols.dynamic_loss_scale(8.0, growth_interval=3)
    assert scales(rule, [True, True, False, True, True, True]) == [8, 8, 8, 4, 4, 4, 8]


@pytest.mark.parametrize(
    ("refill", "history", "expected"),
    [
        ("finite", "-+-+", [8, 8, 8, 8, 8]),
        ("finite", "--+--", [8, 8, 4, 4, 4, 2]),
        ("growth", "-+-+-", [8, 8, 8, 4, 4, 2]),
        ("growth", "-++--", [8, 8, 8, 16, 16, 8]),
    ],
)
def test_hysteresis_counts_nonfinite_steps_until_it_is_refilled(
    refill, history, expected
):
    refill = "".join(refill)  # Another object, as one that is read from a file.
    rule = ols.dynamic_loss_scale(
        8.0, hysteresis=2, hysteresis_refill=refill, growth_interval=2
    )
    assert scales(rule, [step == "+" for step in history]) == expected


@pytest.mark.parametrize(("steps", "lowered"), [(10, 5), (50, 10)])
def test_the_scale_grows_when_a_restored_count_exceeds_a_lowered_interval(
    steps, lowered
):
    # torch and Flax compare with `==`, and never grow again.
    old = ols.dynamic_loss_scale(8.0, growth_interval=100)
    state = old.init()
    for _ in range(steps):
        state = old.adjust(state, True)
    new = ols.dynamic_loss_scale(growth_interval=lowered)
    assert new.adjust(state, True).loss_scale == 16


def test_adjust_of_the_static_rule_keeps_a_rule_state_of_ones_own():
    rule, own = ols.static_loss_scale(8.0), (jnp.int32(3), "text")
    state = rule.adjust(rule.init()._replace(rule_state=own), False)
    assert state.rule_state == own
    assert (state.loss_scale, state.step_count) == (8.0, 1)


def test_the_scale_never_exceeds_the_largest_scale_with_a_normal_reciprocal():
    rule = ols.dynamic_loss_scale(2.0**125, growth_interval=1, max_scale=2.0**126)
    assert scales(rule, [True] * 3)[1:] == [2.0**126] * 3


RULES = [ols.dynamic_loss_scale, ols.headroom_loss_scale, ols.static_loss_scale]


@pytest.mark.parametrize("make", RULES)
def test_the_verdict_can_be_a_number_and_nan_is_false(make):
    rule = make(8.0)
    for number in (0, np.int32(1), np.float32(1.0), np.nan):
        expected = rule.adjust(rule.init(), bool(number == 1), 1.0)
        assert_same_bits(rule.adjust(rule.init(), number, 1.0), expected)


MAKE = [
    *RULES[:2],
    functools.partial(ols.static_loss_scale, 8.0),
    *(getattr(ols.presets, name) for name in PRESETS),
]


@pytest.mark.parametrize("make", MAKE, ids=lambda make: repr(make()).split("(")[0])
def test_before_the_first_step_none_was_skipped(make):
    state = make().init()
    assert state.last_finite
    counts = state.step_count, state.notfinite_count, state.total_notfinite
    assert counts == (0, 0, 0)


@pytest.mark.parametrize("make", MAKE, ids=lambda make: repr(make()).split("(")[0])
def test_gradients_in_place_of_a_verdict_are_refused(make):
    # They would count as finite, whatever they are.
    rule = make()
    nan = jnp.asarray(jnp.nan)
    for grads in ({"w": nan}, jnp.stack([nan, 1.0]), jnp.stack([nan]), None):
        with pytest.raises(
            TypeError, match=r"`grads_finite` must be one bool.*all_fin"
        ):
            rule.adjust(rule.init(), grads, 1.0)
    with pytest.raises(TypeError, match="must be one bool") as caught:
        rule.adjust(rule.init(), {str(i): nan for i in range(100)}, 1.0)
    assert len(str(caught.value)) < 200


def test_an_optimizer_state_in_place_of_its_loss_scale_state_is_refused():
    rule = ols.dynamic_loss_scale()
    opt_state = ols.LossScaledState(rule.init(), ())
    with pytest.raises(TypeError, match=r"mean `find_loss_scale_state\(opt_state\)`"):
        rule.adjust(opt_state, True)


def test_the_counters_stop_at_the_largest_int32():
    largest = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    rule = ols.dynamic_loss_scale(8.0, hysteresis=3)
    counts = dict.fromkeys(
        ["step_count", "total_notfinite", "notfinite_count"], largest
    )
    state = rule.adjust(rule.init()._replace(**counts), False)
    assert all(getattr(state, name) == largest for name in counts)


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_a_stacked_state_takes_a_verdict_for_each_member(asarray):
    rule = ols.dynamic_loss_scale(8.0)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), rule.init())
    states = rule.adjust(states, asarray([True, False]))
    assert states.loss_scale.tolist() == [8.0, 4.0]


def test_each_member_of_a_stacked_state_has_its_own_counts_and_bounds():
    cap = lambda step: jnp.where(step < 100, 2.0**10, 2.0)  # noqa: E731
    rule = ols.dynamic_loss_scale(8.0, growth_interval=2, max_scale=cap)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), rule.init())
    for verdict in ([True, False], [True, True]):
        states = rule.adjust(states, jnp.asarray(verdict))
    assert states.loss_scale.tolist() == [16.0, 4.0]
    states = states._replace(step_count=jnp.asarray([2, 100]))
    after = rule.adjust(states, True)
    assert after.loss_scale.tolist() == [16.0, 2.0]
    shapes = [leaf.shape for leaf in jax.tree.leaves(after)]
    assert shapes == [leaf.shape for leaf in jax.tree.leaves(states)]


def test_a_long_interval_is_counted_to_its_end():
    rule = ols.dynamic_loss_scale(8.0, growth_interval=1_000_000)
    state = rule.init()
    counts = state.rule_state._replace(growth_count=jnp.int32(999_998))
    state = rule.adjust(state._replace(rule_state=counts), True)
    assert (state.loss_scale, rule.adjust(state, True).loss_scale) == (8.0, 16.0)


@pytest.mark.parametrize(("skips", "counts"), [(True, (2, 2, 3)), (False, (0, 0, 3))])
def test_a_static_scale_counts_skipped_steps_only_if_it_skips(skips, counts):
    rule = ols.static_loss_scale(128.0, skip_nonfinite=skips)
    assert scales(rule, [True, False, False]) == [128.0] * 4
    state = rule.init()
    for finite in [True, False, False]:
        state = rule.adjust(state, finite)
    assert state.rule_state == ()
    seen = state.notfinite_count, state.total_notfinite, state.step_count
    assert tuple(map(int, seen)) == counts
    assert rule.skips == skips != state.last_finite


def test_no_loss_scale_is_a_scale_of_one_that_skips_nothing():
    rule = ols.no_loss_scale()
    assert scales(rule, [True, False]) == [1.0] * 3
    assert rule.skips is False
    assert rule == ols.no_loss_scale()
    assert rule != ols.static_loss_scale(1.0, skip_nonfinite=False)


def test_no_loss_scale_can_be_made_to_skip():
    tx = ols.loss_scaled(optax.sgd(1.0), ols.no_loss_scale()._replace(skips=True))
    updates, _ = tx.update(jnp.asarray([jnp.nan]), tx.init(jnp.ones(1)), jnp.ones(1))
    assert updates.tolist() == [0.0]


BETWEEN = "must be strictly between"
WRONG_VALUES = [
    ({"init_scale": 0.0}, r"`init_scale` must be positive, finite.*got 0.0"),
    ({"init_scale": -1.0}, r"`init_scale` must be positive"),
    ({"init_scale": np.nan}, r"`init_scale` must be positive, finite"),
    ({"init_scale": 2.0**127}, r"`init_scale` .* to 2\*\*126, got .*flushed to zero"),
    ({"min_scale": 2.0**-127}, r"`min_scale` .*from 2\*\*-126"),
    ({"max_scale": np.inf}, r"`max_scale` must be positive, finite"),
    ({"max_scale": 2.0**126 * 1.01}, r"`max_scale` .* to 2\*\*126"),
    ({"min_scale": 4.0, "max_scale": 2.0}, r"at most `max_scale`, got 4.0 .* you swap"),
    ({"growth_factor": 1.0}, r"between 1 and inf in float32, got 1.0\.$"),
    ({"growth_factor": 1 + 1e-9}, f"`growth_factor` {BETWEEN} 1 and inf"),
    ({"growth_factor": 1e39}, f"`growth_factor` {BETWEEN} 1 and inf"),
    ({"backoff_factor": 0.0}, f"`backoff_factor` {BETWEEN} 0 and 1"),
    ({"backoff_factor": 2.0**-127}, r"`backoff_factor` must be at least 2\*\*-126, g"),
    ({"backoff_factor": 1e-40}, r"XLA flushes smaller numbers to zero"),
    ({"growth_interval": 0}, r"`growth_interval` must be at least 1.*got 0"),
    ({"growth_interval": 2**31}, r"`growth_interval` .* below 2\*\*31, got 2147483648"),
    ({"hysteresis": 0}, r"`hysteresis` must be at least 1 and below 2\*\*31, got 0"),
    ({"hysteresis_refill": "never"}, r'"finite" or "growth", got \'never\''),
    ({"hysteresis_refill": "grow"}, r'"finite" or "growth", got \'grow\''),
]
WRONG_TYPES = [
    ({"init_scale": "2**15"}, r"`init_scale` must be a number, got '2\*\*15' of"),
    ({"init_scale": np.ones(2)}, r"`init_scale` must be one number, got shape"),
    ({"max_scale": None}, r"`max_scale` must be a number, got None of type None"),
    ({"growth_factor": True}, r"`growth_factor` must be a number, got True"),
    ({"growth_interval": 2.0}, r"`growth_interval` must be an integer, got 2.0 of"),
    ({"hysteresis": True}, r"`hysteresis` must be an integer, got True of type b"),
]


@pytest.mark.parametrize(
    ("error", "settings", "message"),
    [
        *((ValueError, *case) for case in WRONG_VALUES),
        *((TypeError, *case) for case in WRONG_TYPES),
    ],
)
def test_the_dynamic_rule_refuses_a_wrong_setting(error, settings, message):
    with pytest.raises(error, match=message):
        ols.dynamic_loss_scale(**settings)


@pytest.mark.parametrize("value", [0.0, -8.0, np.nan, np.inf, 2.0**127])
def test_the_static_rule_refuses_an_unusable_scale(value):
    with pytest.raises(ValueError, match=r"`scale` must be positive, finite"):
        ols.static_loss_scale(value)


LARGE = ols.dynamic_loss_scale(2**100, max_scale=2**126, growth_interval=1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (LARGE, [2.0**100, 2.0**101]),
        (ols.dynamic_loss_scale(growth_interval=2**31 - 1), [2**15] * 2),
        (ols.dynamic_loss_scale(np.float32(8), growth_interval=np.int64(1)), [8, 16]),
        (ols.static_loss_scale(2.0**-126), [2.0**-126] * 2),
        (ols.static_loss_scale(2.0**126), [2.0**126] * 2),
    ],
)
def test_settings_can_be_numbers_of_any_kind_to_the_end_of_their_range(rule, expected):
    assert scales(rule, [True]) == expected


STATIC = ols.static_loss_scale(8.0)
SHOWN = [
    (
        ols.dynamic_loss_scale(8.0, growth_interval=100),
        "dynamic_loss_scale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, "
        "growth_interval=100, min_scale=5.960464477539063e-08, max_scale=16777216.0, "
        "hysteresis=1, hysteresis_refill='finite')",
    ),
    (
        ols.presets.mindspore_dynamic(4.0, scale_window=3000),
        "presets.mindspore_dynamic(init_loss_scale=4.0, scale_factor=2, "
        "scale_window=3000)",
    ),
    (ols.presets.torch(enabled=False), "no_loss_scale()"),
    (
        ols.headroom_loss_scale(8.0),
        "headroom_loss_scale(init_scale=8.0, history=2400, recent=64, "
        "margin_bits=0.75, min_scale=5.960464477539063e-08, max_scale=16777216.0, "
        "dtype=float16)",
    ),
    (
        ols.LossScale(abs, max, skips=False),  # One's own.
        "LossScale(init=<built-in function abs>, adjust=<built-in function max>, "
        "skips=False, needs_grads_max=False)",
    ),
]


@pytest.mark.parametrize(("rule", "expected"), SHOWN)
def test_a_rule_shows_its_settings(rule, expected):
    assert repr(rule) == expected


@pytest.mark.parametrize(
    "rule",
    [
        ols.LossScale(STATIC.init, ols.dynamic_loss_scale().adjust),
        STATIC._replace(skips=False),
    ],
)
def test_a_rule_of_your_own_shows_its_fields_and_no_settings(rule):
    assert rule.settings == {}
    assert repr(rule).startswith("LossScale(init=")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ols.static_loss_scale(True), "`scale` must be a number, got True"),
        (lambda: ols.static_loss_scale("8"), "`scale` must be a number, got '8'"),
        (
            lambda: ols.static_loss_scale(8.0, skip_nonfinite=None),
            "`skip_nonfinite` must be True or False, got None",
        ),
        (
            lambda: jax.jit(lambda scale: ols.static_loss_scale(scale).init())(8.0),
            "`scale` must be a concrete number",
        ),
    ],
)
def test_the_static_rule_refuses_what_is_no_number_or_flag(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("make", MAKE)
def test_the_settings_of_a_rule_make_the_same_rule_again_and_cannot_change_it(make):
    rule = make()
    settings = rule.settings
    again = getattr(make, "func", make)(**settings)
    assert repr(again) == repr(rule)
    assert_same_bits(again.init(), rule.init())
    settings.clear()
    assert rule.settings == again.settings
