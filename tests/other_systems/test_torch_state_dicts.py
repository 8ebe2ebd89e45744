"""Reading and writing state dicts of PyTorch's GradScaler."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.history import states_after
from optax_lossscale import presets

SETTINGS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
STATE_DICT = {"scale": 1024.0, **SETTINGS, "_growth_tracker": 2}


def test_a_run_of_torch_continues_here_with_its_growth_tracker():
    rule, state = presets.from_torch_state_dict(STATE_DICT)
    history = [True, True, True, True, False]
    scales = states_after(rule, history, state).loss_scale.tolist()
    assert scales == [4096.0] * 3 + [16384.0, 4096.0]


def test_a_tracker_beyond_the_interval_lets_the_scale_grow_at_once():
    # In PyTorch, which compares by `==`, it would not grow before an overflow.
    rule, state = presets.from_torch_state_dict(STATE_DICT | {"_growth_tracker": 9})
    assert rule.adjust(state, True).loss_scale == 4096.0


def test_a_run_goes_to_torch_and_back_unchanged():
    _, state = presets.from_torch_state_dict(STATE_DICT)
    state_dict = presets.to_torch_state_dict(state, **SETTINGS)
    assert state_dict == STATE_DICT
    assert {type(value) for value in state_dict.values()} == {float, int}


def test_an_optimizer_with_a_loaded_rule_continues_there_and_is_saved_again():
    rule, state = presets.from_torch_state_dict(STATE_DICT)
    tx = ols.loss_scaled(None, rule)
    opt_state = tx.init(jnp.ones(1))
    assert_same_bits(ols.find_loss_scale_state(opt_state), state)
    _, opt_state = tx.update(ols.scale(jnp.ones(1), opt_state), opt_state)
    state_dict = presets.to_torch_state_dict(opt_state)
    assert (state_dict["scale"], state_dict["_growth_tracker"]) == (4096.0, 0)


def test_a_loaded_rule_shows_its_settings():
    rule, _ = presets.from_torch_state_dict(STATE_DICT)
    assert repr(rule).startswith("presets.torch(init_scale=1024.0, growth_factor=4.0, ")


class Tensor:
    """As a tensor of PyTorch, it can be read as an array."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


@pytest.mark.parametrize("array", [np.asarray, Tensor])
def test_a_state_dict_can_hold_arrays(array):
    arrays = {key: array(value) for key, value in STATE_DICT.items()}
    _, state = presets.from_torch_state_dict(arrays)
    assert (state.loss_scale, state.rule_state.growth_count) == (1024.0, 2)


def test_the_empty_dict_of_a_disabled_scaler_goes_to_torch_and_back():
    rule, state = presets.from_torch_state_dict({})
    assert rule.init() == ols.no_loss_scale().init()
    assert presets.to_torch_state_dict(state) == {}


def test_missing_and_unknown_keys_of_a_state_dict_are_named():
    wrong = {**STATE_DICT, "extra": 1}
    del wrong["scale"]
    with pytest.raises(ValueError, match=r"missing keys \['scale'\].*\['extra'\]"):
        presets.from_torch_state_dict(wrong)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("scale", 0.0, ValueError),
        ("scale", None, TypeError),
        ("_growth_tracker", -1, ValueError),
        ("growth_factor", 1, ValueError),
    ],
)
def test_a_wrong_entry_of_a_state_dict_is_refused_by_name(key, value, error):
    with pytest.raises(error, match=f"`{key}` must be"):
        presets.from_torch_state_dict({**STATE_DICT, key: value})


def test_a_state_dict_can_only_be_made_from_the_state_of_a_dynamic_rule():
    with pytest.raises(ValueError, match="`state` must be that of a dynamic rule"):
        presets.to_torch_state_dict(ols.headroom_loss_scale().init())


def test_a_state_dict_with_a_wrong_setting_is_not_made():
    state = presets.torch().init()
    with pytest.raises(ValueError, match="`growth_interval` must be at least 1"):
        presets.to_torch_state_dict(state, growth_interval=0)
