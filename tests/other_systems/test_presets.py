"""Each system's rule under its own names: initial scales, refusals, special cases.

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

TINY = 2.0**-126


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
DYNAMIC = [name for name in FIRST if name != "mindspore_fixed"]


def scales(rule, history, state=None):
    """The scale after each step."""
    return states_after(rule, history, state).loss_scale.tolist()


@pytest.mark.parametrize("name", FIRST)
def test_the_initial_scale_is_that_of_the_system(name):
    # All names and defaults are in `tests/docs/test_api.py`, as each source has them.
    assert getattr(presets, name)().init().loss_scale == FIRST[name]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", FIRST)
def test_the_types_in_a_state_never_change(name, x64):
    rule = getattr(presets, name)()
    expected = types(rule.init())
    with enable_x64(x64):
        state = rule.init()
        assert types(state) == expected
        assert types(rule.adjust(state, True)) == expected
        assert types(jax.jit(rule.adjust)(state, False)) == expected


def test_the_longest_interval_of_flax_means_never():
    rule = presets.flax(8.0, growth_interval=2**31 - 1)
    assert rule.adjust(rule.init(), True).loss_scale == 8.0


INTERVALS = {
    "torch": "growth_interval",
    "keras": "dynamic_growth_steps",
    "tf_keras": "dynamic_growth_steps",
    "flax": "growth_interval",
    "jmp": "period",
    "megatron": "growth_interval",
}
TOPS = {"apex": 2.0**24}
# 1e-4 lies between 2**-14 and 2**-13.
FLOORS = {"fairseq": 2.0**-13}
FLOORS |= dict.fromkeys(["torch", "keras", "flax", "apex"], TINY)


@pytest.mark.parametrize("name", DYNAMIC)
def test_no_preset_reaches_zero_or_infinity(name):
    # Keras reaches zero after 142 nonfinite steps on JAX, and then NaN parameters; or
    # infinity, where it stays.
    rule = getattr(presets, name)(**{INTERVALS.get(name, "scale_window"): 1})
    every = scales(rule, [True] * 300 + [False] * 300)
    assert max(every) == every[299] == TOPS.get(name, 2.0**126)
    assert min(every) == every[-1] == FLOORS.get(name, 1.0)


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_finite_step_keeps_a_scale_that_was_set_below_the_floor(name):
    rule = getattr(presets, name)()
    state = ols.set_loss_scale(rule.init(), 2.0**-100)
    assert rule.adjust(state, True).loss_scale == 2.0**-100


def test_torch_refuses_growth_that_float32_does_not_hold():
    # As in torch's test_grad_scale_will_not_overflow: growth by 2**16 from 2**120
    # would be infinite, so the scale stays as it is, and the count restarts.
    rule = presets.torch(2.0**120, growth_factor=2.0**16, growth_interval=3)
    states = states_after(rule, [True] * 4)
    assert states.loss_scale.tolist() == [2.0**120] * 4
    assert states.rule_state.growth_count.tolist() == [1, 2, 0, 1]


def test_fairseq_holds_the_value_before_its_minimum_and_goes_on_skipping():
    # There fairseq restores the scale and raises FloatingPointError.
    rule = presets.fairseq(1.0, min_loss_scale=0.25)
    assert scales(rule, [False] * 4) == [0.5, 0.5, 0.5, 0.5]
    state = jax.tree.map(lambda x: x[-1], states_after(rule, [False] * 60))
    with pytest.raises(ols.LossScaleStalledError, match="60 of 60"):
        ols.raise_if_stalled(state)


def test_fixed_rules_that_never_skip_let_nan_through():
    assert presets.mindspore_fixed().skips
    for rule in (
        presets.mindspore_fixed(1024.0, drop_overflow_update=False),
        presets.tf_keras(dynamic=False, initial_scale=1024.0),
    ):
        tx = ols.loss_scaled(None, rule)
        updates, state = tx.update(jnp.asarray([jnp.nan, 1024.0]), tx.init(jnp.ones(2)))
        assert np.isnan(updates[0])
        assert updates[1] == 1.0
        assert ols.loss_scale_metrics(state)["total_notfinite"] == 0


@pytest.mark.parametrize("floor", [0.0, None])
@pytest.mark.parametrize(
    ("name", "setting"),
    [("flax", "minimum_scale"), ("apex", "min_loss_scale"), ("fairseq", "threshold")],
)
def test_a_floor_of_zero_or_none_means_that_there_is_no_floor(name, setting, floor):
    settings = {"min_loss_scale": 0.0} if name == "fairseq" else {}
    rule = getattr(presets, name)(TINY * 4, **settings, **{setting: floor})
    assert scales(rule, [False] * 3) == [TINY * 2, TINY, TINY]


WRONG_VALUE = [
    ("torch", {"init_scale": 0.0}, "`init_scale` must be positive"),
    ("torch", {"init_scale": 1e38}, "`init_scale` must be positive"),
    ("torch", {"growth_factor": 0.5}, "`growth_factor`"),
    ("torch", {"backoff_factor": 0.0}, "`backoff_factor`"),
    ("torch", {"growth_interval": 0}, "`growth_interval` must be at least 1 and below"),
    ("keras", {"initial_scale": -1.0}, "`initial_scale` must be positive"),
    ("keras", {"dynamic_growth_steps": 0}, "`dynamic_growth_steps` must be at least 1"),
    ("tf_keras", {"initial_scale": np.inf}, "`initial_scale` must be positive"),
    (
        "tf_keras",
        {"dynamic": False},
        "`initial_scale` must be given with `dynamic=False`, got None",
    ),
    (
        "tf_keras",
        {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3},
        "`dynamic_growth_steps` must be None with `dynamic=False`, got 3",
    ),
    ("mindspore_fixed", {"loss_scale": 0}, "`loss_scale` must be positive"),
    ("mindspore_dynamic", {"scale_factor": 1}, "`scale_factor` must be strictly"),
    ("mindspore_dynamic", {"scale_window": -1}, "`scale_window` must be at least 1"),
    ("flax", {"scale": np.nan}, "`scale` must be positive"),
    ("flax", {"minimum_scale": -1.0}, "`minimum_scale` must be positive"),
    ("jmp", {"period": 0}, "`period` must be at least 1"),
    ("jmp", {"factor": 0.5}, "`factor` must be strictly"),
    ("apex", {"max_loss_scale": np.inf}, "`max_loss_scale` must be positive"),
    (
        "apex",
        {"min_loss_scale": 4.0, "max_loss_scale": 2.0},
        "`min_loss_scale` must be at most",
    ),
    ("megatron", {"hysteresis": 0}, "`hysteresis` must be at least 1"),
    ("deepspeed", {"delayed_shift": 0}, "`delayed_shift` must be at least 1"),
    ("fairseq", {"tolerance": 1.5}, "`tolerance` must be finite, at least 0 and at"),
    ("fairseq", {"threshold": -1.0}, "`threshold` must be positive"),
    ("fairseq", {"min_loss_scale": np.nan}, "`min_loss_scale` must be finite, at"),
]


WRONG_KIND = [
    ("torch", {"enabled": 1}),
    ("torch", {"growth_interval": 2.0}),
    ("keras", {"initial_scale": "8"}),
    ("tf_keras", {"dynamic": None}),
    ("mindspore_fixed", {"drop_overflow_update": 0}),
    ("flax", {"minimum_scale": False}),
    ("deepspeed", {"consecutive_hysteresis": "yes"}),
    ("fairseq", {"tolerance": None}),
]
REFUSED = [(ValueError, *case) for case in WRONG_VALUE]
REFUSED += [(TypeError, *case, f"`{next(iter(case[1]))}` must") for case in WRONG_KIND]


@pytest.mark.parametrize(("error", "name", "settings", "message"), REFUSED)
def test_errors_name_settings_as_the_system_does(error, name, settings, message):
    with pytest.raises(error, match=message):
        getattr(presets, name)(**settings)


@pytest.mark.parametrize("factor", [3, 1.7])
@pytest.mark.parametrize("name", ["jmp", "mindspore_dynamic", "fairseq"])
def test_backoff_divides_by_the_factor_as_the_system_does(name, factor):
    # The product with a reciprocal differs: 5 / 3 from 5 * (1 / 3), by one ulp.
    setting = "factor" if name == "jmp" else "scale_factor"
    rule = getattr(presets, name)(**{setting: factor})
    for adjust in (rule.adjust, jax.jit(rule.adjust)):
        for start in np.float32([5.0, 25.0, 1000.1, 32768.0]):
            state = rule.init()._replace(loss_scale=jnp.asarray(start))
            assert adjust(state, False).loss_scale == start / np.float32(factor)
