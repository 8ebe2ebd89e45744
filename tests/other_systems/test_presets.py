"""Each preset follows its system, step by step, under the system's own names.

Promised in the docstrings of `ols.presets`. `data/README.md` says how the trajectories
of the real systems were recorded.
"""

import json
import pathlib

import numpy as np
import pytest

from helpers.cases import slow_except
from helpers.history import states_after
from optax_lossscale import presets

DATA = pathlib.Path(__file__).parent / "data"
SYSTEMS = {
    "apex": presets.apex,
    "deepspeed": presets.deepspeed,
    "fairseq": presets.fairseq,
    "flax": presets.flax,
    "jmp": presets.jmp,
    "keras": presets.keras,
    "megatron": presets.megatron,
    "mindspore": presets.mindspore_dynamic,
    "tf_keras": presets.tf_keras,
    "torch": presets.torch,
}
TRACES = {
    system: json.loads((DATA / f"{system}_scale.json").read_text())["traces"]
    for system in SYSTEMS
}
KINDS = ["bursty", "rare", "start_inf", "all_inf", "all_finite", "interval_edge"]
KINDS += ["grow_to_max", "alternate"]
# Options of the recording that are not settings of the rule.
NO_SETTING = {"apex": ["loss_scale"], "deepspeed": ["raise_error_at_min_scale"]}
# What was recorded, if not `scale`: MindSpore has three implementations.
SCALES = {"mindspore": ["manager_scale", "amp_scale", "cell_scale"]}
# The system's counter of finite steps, where it counts as `growth_count` does.
COUNTERS = {"apex": "unskipped", "megatron": "growth_tracker"}
COUNTERS |= {"mindspore": "amp_counter"}
COUNTERS |= dict.fromkeys(["flax", "jmp", "keras", "tf_keras", "torch"], "counter")


def assert_follows(system, trace):
    """Scales, and counts of finite steps, while they are usable in float32."""
    config = dict(trace["config"])
    for name in NO_SETTING.get(system, []):
        del config[name]
    states = states_after(SYSTEMS[system](**config), trace["finite"])
    for key in SCALES.get(system, ["scale"]):
        real = np.asarray([float(scale) for scale in trace[key]])
        inside = (real > 2.0**-126) & (real < 2.0**126)
        steps = len(real) if inside.all() else int(np.argmin(inside))
        assert steps >= 5
        real = np.float32(real[:steps])
        # Equal if the factors are powers of two, else within an ulp for each change.
        factors = [value for name, value in config.items() if "factor" in name]
        is_exact = all(np.frexp(factor)[0] == 0.5 for factor in factors)
        changes = np.cumsum(np.diff(real, prepend=real[:1]) != 0) + 1
        allowed = 0 if is_exact else changes * np.spacing(real)
        apart = np.abs(np.asarray(states.loss_scale)[:steps] - real)
        assert np.all(apart <= allowed), (system, trace["kind"], config)
    if system in COUNTERS:
        count = states.rule_state.growth_count[:steps].tolist()
        assert count == trace[COUNTERS[system]][:steps], (system, trace["kind"])


@pytest.mark.parametrize("kind", slow_except({"bursty", "grow_to_max"}, KINDS))
def test_every_preset_follows_its_system_through_a_history(kind):
    for system, traces in TRACES.items():
        for trace in traces:
            if trace["kind"] == kind:
                assert_follows(system, trace)


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


def test_each_preset_starts_at_the_scale_of_its_system_and_shows_its_call():
    # All names and defaults are in `tests/docs/test_api.py`, as each source has them.
    for name, first in FIRST.items():
        rule = getattr(presets, name)()
        assert rule.init().loss_scale == first
        assert repr(rule).startswith(f"presets.{name}(")
        assert repr(eval(repr(rule))) == repr(rule)
    assert presets.apex(8.0, max_loss_scale=4.0).init().loss_scale == 4.0
    shown = "presets.jmp(loss_scale=8, period=2000, factor=4, min_loss_scale=1.0)"
    assert repr(presets.jmp(8, factor=4)) == shown


SMALLEST = 2.0**-126
INTERVALS = {"torch": "growth_interval", "flax": "growth_interval", "jmp": "period"}
INTERVALS |= {"megatron": "growth_interval", "keras": "dynamic_growth_steps"}
INTERVALS |= {"tf_keras": "dynamic_growth_steps"}
FLOORS = {"tf_keras": 1.0, "mindspore": 1.0, "jmp": 1.0}
FLOORS |= {"megatron": 1.0, "deepspeed": 1.0}
FLOORS["fairseq"] = 2.0**-13  # 1e-4 lies between 2**-14 and 2**-13.


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_preset_reaches_zero_or_infinity(name):
    # Keras reaches zero after 142 nonfinite steps on JAX, and then NaN parameters; or
    # infinity, where it stays. jmp loses its floor under `jit` (its pull request 44).
    rule = SYSTEMS[name](**{INTERVALS.get(name, "scale_window"): 1})
    scales = states_after(rule, [True] * 300 + [False] * 300).loss_scale.tolist()
    assert max(scales) == scales[299] == (2.0**24 if name == "apex" else 2.0**126)
    assert min(scales) == scales[-1] == FLOORS.get(name, SMALLEST)


@pytest.mark.parametrize("floor", [0.0, None])
def test_a_floor_of_zero_or_none_means_that_there_is_no_floor(floor):
    for rule in (
        presets.flax(SMALLEST * 4, minimum_scale=floor),
        presets.apex(SMALLEST * 4, min_loss_scale=floor),
        presets.fairseq(SMALLEST * 4, min_loss_scale=0.0, threshold=floor),
    ):
        scales = states_after(rule, [False] * 3).loss_scale.tolist()
        assert scales == [SMALLEST * 2, SMALLEST, SMALLEST]


def test_the_longest_interval_of_flax_means_never():
    rule = presets.flax(8.0, growth_interval=2**31 - 1)
    assert rule.adjust(rule.init(), True).loss_scale == 8.0


def test_fairseq_holds_the_value_before_its_minimum():
    # There fairseq restores the scale and raises FloatingPointError.
    rule = presets.fairseq(1.0, min_loss_scale=0.25)
    assert states_after(rule, [False] * 4).loss_scale.tolist() == [0.5] * 4


def test_fairseq_remembers_tolerated_overflows_when_the_scale_grows():
    rule = presets.fairseq(8.0, scale_window=3, tolerance=0.5)
    # One overflow in three steps is tolerated; then two in the three since the growth.
    history = [True, True, False, True, True, True, True, True, False]
    scales = states_after(rule, history).loss_scale.tolist()
    assert scales == [8.0] * 5 + [16.0] * 3 + [8.0]


def test_fixed_rules_can_be_told_never_to_skip():
    assert not presets.mindspore_fixed(1024.0, drop_overflow_update=False).skips
    assert not presets.tf_keras(dynamic=False, initial_scale=1024.0).skips


def test_a_disabled_scaler_of_torch_scales_nothing():
    rule = presets.torch(enabled=False)
    assert (rule.init().loss_scale, rule.skips) == (1.0, False)


REFUSED = [
    (ValueError, "torch", {"growth_factor": 0.5}, "`growth_factor` must be strictly"),
    (ValueError, "keras", {"initial_scale": -1.0}, "`initial_scale` must be positive"),
    (ValueError, "tf_keras", {"dynamic": False}, "`initial_scale` must be given"),
    (ValueError, "jmp", {"period": 0}, "`period` must be at least 1"),
    (ValueError, "flax", {"minimum_scale": -1.0}, "`minimum_scale` must be finite"),
    (ValueError, "megatron", {"hysteresis": 0}, "`hysteresis` must be at least 1"),
    (TypeError, "torch", {"growth_interval": 2.0}, "`growth_interval` must be an int"),
    (TypeError, "deepspeed", {"consecutive_hysteresis": "yes"}, "`consecutive_hyster"),
]


@pytest.mark.parametrize(("error", "name", "settings", "message"), REFUSED)
def test_errors_name_settings_as_the_system_does(error, name, settings, message):
    with pytest.raises(error, match=message):
        getattr(presets, name)(**settings)
