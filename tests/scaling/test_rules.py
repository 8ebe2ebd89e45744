"""The rules by hand: dynamic, static, none; what each step counts; refused settings.

`test_histories.py` compares them with their definition after every history, and
`other_systems/test_presets.py` the presets with the real systems.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.history import states_after

RULES = {
    "dynamic": ols.dynamic_loss_scale(),
    "static": ols.static_loss_scale(8.0),
    "none": ols.no_loss_scale(),
    "headroom": ols.headroom_loss_scale(history=4, recent=2),
    "fairseq": ols.presets.fairseq(),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def scales(rule, history, state=None):
    """The scale before the first step and after each; + is a finite one."""
    state = rule.init() if state is None else state
    trace = [float(state.loss_scale)]
    for step in history:
        state = rule.adjust(state, step == "+", 1.0 if step == "+" else np.inf)
        trace.append(float(state.loss_scale))
    return trace


@pytest.mark.parametrize(
    ("settings", "history", "expected"),
    [
        # Flax's DynamicScale grows one step late.
        ({"growth_interval": 3}, "+++++++", [8, 8, 8, 16, 16, 16, 32, 32]),
        ({"growth_interval": 3}, "++-+++", [8, 8, 8, 4, 4, 4, 8]),
        ({"growth_interval": 1, "growth_factor": 4.0}, "++", [8, 32, 128]),
        ({"backoff_factor": 0.25}, "--", [8, 2, 0.5]),
        # jmp #18, tensorflow #38357: a floor of 1 left users stuck.
        ({}, "----", [8, 4, 2, 1, 0.5]),
        ({"min_scale": 3.0}, "---", [8, 4, 3, 3]),
        ({"max_scale": 20.0, "growth_interval": 1}, "+++", [8, 16, 20, 20]),
        # The first scale may lie outside the bounds.
        ({"min_scale": 16.0}, "+-", [8, 8, 16]),
        ({"max_scale": 2.0, "growth_interval": 1}, "-+", [8, 4, 2]),
        ({"hysteresis": 2}, "-+-+", [8, 8, 8, 8, 8]),
        ({"hysteresis": 2}, "--+--", [8, 8, 4, 4, 4, 2]),
        ({"hysteresis": 3}, "----", [8, 8, 8, 4, 2]),
    ],
)
def test_the_dynamic_rule_changes_the_scale_as_its_definition_says(
    settings, history, expected
):
    assert scales(ols.dynamic_loss_scale(8.0, **settings), history) == expected


@pytest.mark.parametrize(
    ("history", "expected"),
    [("-+-+-", [8, 8, 8, 4, 4, 2]), ("-++--", [8, 8, 8, 16, 16, 8])],
)
def test_hysteresis_may_be_refilled_only_when_the_scale_grows(history, expected):
    rule = ols.dynamic_loss_scale(
        8.0, hysteresis=2, hysteresis_refill="growth", growth_interval=2
    )
    assert scales(rule, history) == expected


def test_by_default_the_scale_is_that_of_the_documentation():
    rule = ols.dynamic_loss_scale()
    after = states_after(rule, [True] * 2000 + [False])
    expected = [2.0**15, 2.0**16, 2.0**15]
    assert after.loss_scale[1998:].tolist() == expected
    state = jax.tree.map(lambda leaf: leaf[1998], after)  # It grows in the next step.
    assert scales(rule, "+", ols.set_loss_scale(state, 2.0**23)) == [2.0**23, 2.0**24]
    assert scales(rule, "+", ols.set_loss_scale(state, 2.0**24)) == [2.0**24] * 2
    state = ols.set_loss_scale(state, 2.0**-23)
    assert scales(rule, "--", state) == [2.0**-23, 2.0**-24, 2.0**-24]


def test_a_restored_count_beyond_a_lower_interval_grows_the_scale():
    # torch and Flax compare with `==`, and never grow again.
    state = states_after(ols.dynamic_loss_scale(8.0), [True] * 10)
    state = jax.tree.map(lambda leaf: leaf[-1], state)
    assert scales(ols.dynamic_loss_scale(growth_interval=5), "+", state) == [8, 16]


@each_rule
def test_every_step_is_counted_and_all_types_are_kept(rule):
    first = rule.init()
    assert [leaf.dtype.name for leaf in first[:5]] == [
        "float32", "bool", "int32", "int32", "int32",
    ]  # fmt: skip
    assert [*map(int, first[1:5])] == [1, 0, 0, 0]
    leaves = jax.tree.leaves(first)
    assert not any(leaf.weak_type for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    adjust, state, counts = jax.jit(rule.adjust), first, []
    for finite in (True, False, False, True, False):
        args = jnp.asarray(finite), jnp.where(finite, 1.0, jnp.inf)
        eager, state = rule.adjust(state, *args), adjust(state, *args)
        assert_same_bits(eager, state)
        assert types(state) == types(first)
        counts.append([*map(int, state[1:5])])
    assert counts == [[1, 0, 0, 1], [0, 1, 1, 2], [0, 2, 2, 3], [1, 0, 2, 4],
                      [0, 1, 3, 5]]  # fmt: skip


def test_counters_stop_at_the_largest_int32():
    largest = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    names = ("step_count", "total_notfinite", "notfinite_count")
    state = ols.static_loss_scale(8.0).init()._replace(**dict.fromkeys(names, largest))
    state = ols.static_loss_scale(8.0).adjust(state, False)
    assert all(getattr(state, name) == largest for name in names)


def test_a_static_scale_stays_and_may_skip_nothing():
    assert scales(ols.static_loss_scale(128.0), "+--") == [128.0] * 4
    assert ols.static_loss_scale(128.0).skips
    assert not ols.static_loss_scale(128.0, skip_nonfinite=False).skips


def test_no_loss_scale_is_one_that_skips_nothing():
    rule = ols.no_loss_scale()
    assert scales(rule, "+-") == [1.0] * 3
    assert not rule.skips


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"init_scale": 0.0}, ValueError, "`init_scale` must be positive"),
        ({"init_scale": np.nan}, ValueError, "`init_scale` must be positive, finite"),
        ({"init_scale": "8"}, TypeError, "`init_scale` must be a number"),
        ({"max_scale": lambda step: 2.0**24}, TypeError, "`max_scale` must be a numb"),
        ({"init_scale": 2.0**127}, ValueError, r"to 2\*\*126, got .*flushed to zero"),
        ({"min_scale": 2.0**-127}, ValueError, r"`min_scale` .*from 2\*\*-126"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "Did you swap them?"),
        ({"growth_factor": 1.0}, ValueError, "`growth_factor` must be strictly betw"),
        ({"backoff_factor": 2.0}, ValueError, "`backoff_factor` must be strictly betw"),
        ({"growth_interval": 0}, ValueError, "`growth_interval` must be at least 1"),
        ({"growth_interval": 2.0}, TypeError, "`growth_interval` must be an integer"),
        ({"hysteresis": 0}, ValueError, "`hysteresis` must be at least 1"),
        ({"hysteresis_refill": "never"}, ValueError, '"finite" or "growth", got'),
    ],
)
def test_a_wrong_setting_is_refused_where_the_rule_is_made(settings, error, message):
    with pytest.raises(error, match=message):
        ols.dynamic_loss_scale(**settings)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            ols.dynamic_loss_scale(8.0),
            "dynamic_loss_scale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, "
            "growth_interval=2000, ",
        ),
        (ols.headroom_loss_scale(8.0), "headroom_loss_scale(init_scale=8.0, history="),
        (ols.static_loss_scale(8.0), "static_loss_scale(scale=8.0, skip_nonfinite=Tr"),
        (ols.no_loss_scale(), "no_loss_scale()"),
        (ols.presets.torch(init_scale=8.0), "presets.torch(init_scale=8.0, growth_fa"),
        (ols.LossScale(abs, max), "LossScale(init=<built-in function abs>, adjust="),
    ],
    ids=["dynamic", "headroom", "static", "none", "a preset", "one's own"],
)
def test_a_rule_shows_what_made_it_and_its_settings(rule, expected):
    assert repr(rule).startswith(expected)


def test_gradients_in_place_of_a_verdict_are_refused():
    # They would count as finite, whatever they are.
    rule = ols.dynamic_loss_scale()
    for grads in (jnp.ones(2), jnp.float32(1.0)):
        with pytest.raises(TypeError, match=r"must be a bool.*all_finite\(grads\)"):
            rule.adjust(rule.init(), grads)
