"""Runs every preset and its system for 100,000 steps, and compares all scales.

The systems are those of `helpers.systems`, in plain Python, which must follow the
recorded trajectories of the real ones. Whether a step overflows is random, and depends
on the scale, as in training. Other steps are nonfinite whatever the scale, and their
share changes every 5,000 steps. So the scale goes up and down through many octaves.
"""

import json
import pathlib

import numpy as np
import pytest

import optax_lossscale as ols
from helpers import systems
from helpers.history import assert_scales_agree, states_after

STEPS = 100_000
SEGMENT = 5_000
SEED = 0
BAD_BATCHES = [0.0, 0.5, 1.0, 3.0, 10.0]  # In as many steps as it takes to grow.
SIZES = [-14.0, 4.0, -6.0, 0.0]  # Bits of the gradients.
LOWEST = 2.0**-8  # Below it steps are finite, because some systems have no floor.
LARGEST = 65504.0  # Of float16.
DATA = pathlib.Path(__file__).parent / "data"


SYSTEMS = {
    "torch": (ols.presets.torch, systems.torch),
    "keras": (ols.presets.keras, systems.keras),
    "tf_keras": (ols.presets.tf_keras, systems.tf_keras),
    "mindspore": (ols.presets.mindspore_dynamic, systems.mindspore_scaler),
    "mindspore, manager": (ols.presets.mindspore_dynamic, systems.mindspore_manager),
    "mindspore, cell": (ols.presets.mindspore_dynamic, systems.mindspore_cell),
    "apex": (ols.presets.apex, systems.apex),
    "megatron": (ols.presets.megatron, systems.megatron),
    "deepspeed": (ols.presets.deepspeed, systems.deepspeed),
    "fairseq": (ols.presets.fairseq, systems.fairseq),
    "flax": (ols.presets.flax, systems.flax),
    "jmp": (ols.presets.jmp, systems.jmp),
}
NO_SETTING = {"enabled", "dynamic", "loss_scale", "raise_error_at_min_scale"}
RECORDED = {
    "mindspore": "amp_scale",
    "mindspore, manager": "manager_scale",
    "mindspore, cell": "cell_scale",
}


def settings_of(name, given):
    """Settings of a system, which has others than its preset."""
    ignored = NO_SETTING - ({"loss_scale"} if name == "jmp" else set())
    return {key: value for key, value in given.items() if key not in ignored}


def replayed(finite):
    return lambda step, scale: bool(finite[step])


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_in_plain_python_follows_the_recorded_trajectories(name):
    text = (DATA / f"{name.partition(',')[0]}_scale.json").read_text()
    for trace in json.loads(text)["traces"]:
        recorded = [float(scale) for scale in trace[RECORDED.get(name, "scale")]]
        finite = trace["finite"]
        system = SYSTEMS[name][1](**settings_of(name, trace["config"]))
        # Some leave the range of float32.
        with np.errstate(over="ignore", under="ignore"):
            _, ours, _ = systems.follow(system, len(finite), replayed(finite))
            steps = min(len(ours), len(recorded))
            ours, recorded = np.float32(ours[:steps]), np.float32(recorded[:steps])
        assert steps >= 5
        np.testing.assert_array_equal(ours, recorded)


# The settings that are not those of the system.
RUNS = [
    ("torch", {}),
    ("torch", {"growth_interval": 20}),
    ("torch", {"growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.7}),
    ("keras", {}),
    ("keras", {"dynamic_growth_steps": 5}),
    ("tf_keras", {}),
    ("tf_keras", {"dynamic_growth_steps": 3}),
    *(
        (name, settings)
        for name in ("mindspore", "mindspore, manager", "mindspore, cell")
        for settings in (
            {},
            {"scale_window": 10},
            {"scale_window": 2, "scale_factor": 3},
        )
    ),
    ("apex", {}),
    ("apex", {"scale_window": 5, "min_loss_scale": 16.0, "max_loss_scale": 2.0**20}),
    ("megatron", {}),
    ("megatron", {"growth_interval": 10, "hysteresis": 3}),
    (
        "megatron",
        {"growth_interval": 4, "growth_factor": 1.7, "backoff_factor": 0.8},
    ),
    ("deepspeed", {}),
    ("deepspeed", {"scale_window": 5, "delayed_shift": 3}),
    (
        "deepspeed",
        {"scale_window": 5, "delayed_shift": 2, "consecutive_hysteresis": True},
    ),
    ("fairseq", {}),
    ("fairseq", {"scale_window": 20, "tolerance": 0.05, "threshold": 1.0}),
    ("fairseq", {"scale_window": 6, "tolerance": 0.3, "scale_factor": 4.0}),
    ("flax", {}),
    ("flax", {"growth_interval": 20, "minimum_scale": 4.0}),
    ("flax", {"growth_interval": 1, "growth_factor": 1.5, "backoff_factor": 0.7}),
    ("jmp", {}),
    ("jmp", {"period": 10, "factor": 4, "min_loss_scale": 0.25}),
    ("jmp", {"period": 3, "factor": 3}),
]


INTERVALS = ["growth_interval", "dynamic_growth_steps", "scale_window", "period"]


def verdicts_of_training(seed, interval):
    """From a step and a loss scale to a random verdict."""
    rng = np.random.default_rng(seed)
    shares = np.minimum(np.asarray(BAD_BATCHES) / interval, 0.5)
    shares = np.resize(np.repeat(shares, SEGMENT), STEPS)
    is_bad = (rng.random(STEPS) < shares).tolist()
    # The size of gradients jumps from segment to segment, by many bits.
    sizes = np.resize(np.repeat(SIZES, SEGMENT), STEPS) + rng.uniform(0.0, 4.0, STEPS)
    limits = (LARGEST / 2.0**sizes).tolist()

    def verdict(step, scale):
        return scale < LOWEST or (not is_bad[step] and scale <= limits[step])

    return verdict


@pytest.mark.parametrize(("name", "changes"), RUNS)
def test_a_preset_has_the_scales_of_its_system_for_100_000_steps(name, changes):
    make, system = SYSTEMS[name]
    rule = make(**changes)
    settings = settings_of(name, rule.settings)
    interval = next(settings[key] for key in INTERVALS if key in settings)
    verdicts, real, counts = systems.follow(
        system(**settings), STEPS, verdicts_of_training(SEED, interval)
    )
    assert len(verdicts) == STEPS
    assert verdicts.count(False) > 40
    states = states_after(rule, verdicts)
    assert np.count_nonzero(np.diff(np.float32(real))) > 19
    assert_scales_agree(np.asarray(states.loss_scale), real, settings)
    if counts[0] is not None:
        assert states.rule_state.growth_count.tolist() == counts
