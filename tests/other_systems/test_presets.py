"""Each system's rule under its own names: first scales, bounds, refusals, `repr`.

That it changes the scale as its system does is in `test_recorded_trajectories.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import types
from helpers.compat import enable_x64
from helpers.history import states_after
from optax_lossscale import presets

SMALLEST = 2.0**-126
FIRST = {
    "torch": 2.0**16,
    "keras": 2.0**15,
    "tf_keras": 2.0**15,
    "mindspore_fixed": 128.0,
    "mindspore_dynamic": 2.0**24,
    "flax": 2.0**16,
    "jmp": 2.0**15,
    "apex": 2.0**16,
    "megatron": 2.0**32,
    "deepspeed": 2.0**32,
    "fairseq": 2.0**15,
}
EACH = pytest.mark.parametrize("name", FIRST)


def scales(rule, history):
    """The scale after each step."""
    return states_after(rule, history).loss_scale.tolist()


@EACH
def test_the_initial_scale_is_that_of_the_system(name):
    # All names and defaults are in `tests/docs/test_api.py`, as each source has them.
    assert getattr(presets, name)().init().loss_scale == FIRST[name]


@EACH
def test_the_types_in_a_state_never_change(name):
    rule = getattr(presets, name)()
    expected = types(rule.init())
    for x64 in (False, True):
        with enable_x64(x64):
            state = rule.init()
            assert types(state) == expected
            assert types(rule.adjust(state, True)) == expected
            assert types(jax.jit(rule.adjust)(state, False)) == expected


# The interval, and the largest and smallest scale, where they are not the usual ones.
INTERVALS = {
    "torch": "growth_interval",
    "keras": "dynamic_growth_steps",
    "tf_keras": "dynamic_growth_steps",
    "flax": "growth_interval",
    "jmp": "period",
    "megatron": "growth_interval",
}
LARGEST = {"apex": 2.0**24}
FLOORS = {"tf_keras": 1.0, "mindspore_dynamic": 1.0, "jmp": 1.0}
FLOORS |= {"megatron": 1.0, "deepspeed": 1.0}
# 1e-4 lies between 2**-14 and 2**-13.
FLOORS["fairseq"] = 2.0**-13


@pytest.mark.parametrize("name", [name for name in FIRST if name != "mindspore_fixed"])
def test_no_preset_reaches_zero_or_infinity(name):
    # Keras reaches zero after 142 nonfinite steps on JAX, and then NaN parameters; or
    # infinity, where it stays.
    rule = getattr(presets, name)(**{INTERVALS.get(name, "scale_window"): 1})
    every = scales(rule, [True] * 300 + [False] * 300)
    assert max(every) == every[299] == LARGEST.get(name, 2.0**126)
    assert min(every) == every[-1] == FLOORS.get(name, SMALLEST)


@pytest.mark.parametrize("floor", [0.0, None])
@pytest.mark.parametrize(
    ("name", "setting"),
    [("flax", "minimum_scale"), ("apex", "min_loss_scale"), ("fairseq", "threshold")],
)
def test_a_floor_of_zero_or_none_means_that_there_is_no_floor(name, setting, floor):
    settings = {"min_loss_scale": 0.0} if name == "fairseq" else {}
    rule = getattr(presets, name)(SMALLEST * 4, **settings, **{setting: floor})
    assert scales(rule, [False] * 3) == [SMALLEST * 2, SMALLEST, SMALLEST]


def test_the_longest_interval_of_flax_means_never():
    rule = presets.flax(8.0, growth_interval=2**31 - 1)
    assert rule.adjust(rule.init(), True).loss_scale == 8.0


def test_fairseq_holds_the_value_before_its_minimum_and_goes_on_skipping():
    # There fairseq restores the scale and raises FloatingPointError.
    rule = presets.fairseq(1.0, min_loss_scale=0.25)
    assert scales(rule, [False] * 4) == [0.5, 0.5, 0.5, 0.5]
    state = jax.tree.map(lambda x: x[-1], states_after(rule, [False] * 60))
    with pytest.raises(ols.LossScaleStalledError, match="60 of 60"):
        ols.raise_if_stalled(state)


def test_the_counts_of_fairseq_do_not_wrap_around():
    rule = presets.fairseq(8.0, tolerance=1.0, scale_window=2**31 - 1)
    most, state = 2**31 - 1, rule.init()

    def after_a_finite_step(*counts):
        counts = jnp.asarray(counts, jnp.int32)
        counts = type(state.rule_state)(*counts)
        return rule.adjust(state._replace(rule_state=counts), True).rule_state

    assert after_a_finite_step(most - 9, most, 5) == (most - 8, most, 5)
    assert after_a_finite_step(most - 1, most, 5) == (0, 0, 5)  # The scale grows.


@pytest.mark.parametrize(
    "rule",
    [
        presets.mindspore_fixed(1024.0, drop_overflow_update=False),
        presets.tf_keras(dynamic=False, initial_scale=1024.0),
    ],
    ids=["mindspore", "tf_keras"],
)
def test_fixed_rules_that_never_skip_let_nan_through(rule):
    tx = ols.loss_scaled(None, rule)
    updates, state = tx.update(jnp.asarray([jnp.nan, 1024.0]), tx.init(jnp.ones(2)))
    np.testing.assert_array_equal(updates, [np.nan, 1.0])
    assert ols.loss_scale_metrics(state)["total_notfinite"] == 0


WRONG_VALUES = [
    ("torch", {"init_scale": 0.0}, "`init_scale` must be positive"),
    ("torch", {"growth_factor": 0.5}, "`growth_factor` must be strictly"),
    ("keras", {"initial_scale": -1.0}, "`initial_scale` must be positive"),
    ("keras", {"dynamic_growth_steps": 0}, "`dynamic_growth_steps` must be at least 1"),
    ("tf_keras", {"initial_scale": np.inf}, "`initial_scale` must be positive"),
    ("tf_keras", {"dynamic": False}, "with `dynamic=False`, `initial_scale` must be"),
    ("mindspore_fixed", {"loss_scale": 0}, "`loss_scale` must be positive"),
    ("mindspore_dynamic", {"scale_factor": 1}, "`scale_factor` must be strictly"),
    ("mindspore_dynamic", {"scale_window": -1}, "`scale_window` must be at least 1"),
    ("flax", {"scale": np.nan}, "`scale` must be positive"),
    ("flax", {"growth_interval": 0}, "`growth_interval` must be at least 1"),
    ("flax", {"minimum_scale": -1.0}, "`minimum_scale` must be finite, at least"),
    ("jmp", {"period": 0}, "`period` must be at least 1"),
    ("jmp", {"factor": 0.5}, "`factor` must be strictly"),
    ("apex", {"max_loss_scale": np.inf}, "`max_loss_scale` must be positive"),
    (
        "apex",
        {"min_loss_scale": 4.0, "max_loss_scale": 2.0},
        "`min_loss_scale` must be finite, .* at most 2, got 4",
    ),
    ("megatron", {"hysteresis": 0}, "`hysteresis` must be at least 1"),
    ("deepspeed", {"delayed_shift": 0}, "`delayed_shift` must be at least 1"),
    ("fairseq", {"tolerance": 1.5}, "`tolerance` must be finite, at least 0 and at"),
    ("fairseq", {"min_loss_scale": np.nan}, "`min_loss_scale` must be finite, at"),
]
WRONG_KINDS = [
    ("torch", {"enabled": 1}),
    ("torch", {"growth_interval": 2.0}),
    ("keras", {"initial_scale": "8"}),
    ("tf_keras", {"dynamic": None}),
    ("mindspore_fixed", {"drop_overflow_update": 0}),
    ("deepspeed", {"consecutive_hysteresis": "yes"}),
    ("fairseq", {"tolerance": None}),
]
REFUSED = [(ValueError, *case) for case in WRONG_VALUES]
REFUSED += [(TypeError, *case, f"`{next(iter(case[1]))}` must") for case in WRONG_KINDS]


@pytest.mark.parametrize(("error", "name", "settings", "message"), REFUSED)
def test_errors_name_settings_as_the_system_does(error, name, settings, message):
    with pytest.raises(error, match=message):
        getattr(presets, name)(**settings)


@EACH
def test_the_repr_of_a_rule_is_the_call_that_makes_it(name):
    rule = getattr(presets, name)()
    assert repr(rule).startswith(f"presets.{name}(")
    assert repr(eval(repr(rule))) == repr(rule)


def test_the_repr_shows_settings_by_the_names_of_the_system():
    shown = repr(presets.jmp(8, factor=4))
    assert (
        shown == "presets.jmp(loss_scale=8, period=2000, factor=4, min_loss_scale=1.0)"
    )
