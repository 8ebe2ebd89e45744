"""Reading and writing state dicts of PyTorch's GradScaler."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.history import states_after
from optax_lossscale import presets

STATE_DICT = {
    "scale": 1024.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
    "_growth_tracker": 2,
}


def test_a_run_of_torch_continues_here_with_its_growth_tracker():
    rule, state = presets.from_torch_state_dict(STATE_DICT)
    history = [True, True, True, True, False]
    scales = states_after(rule, history, state).loss_scale.tolist()
    assert scales == [4096.0] * 3 + [16384.0, 4096.0]


def test_a_run_goes_to_torch_and_back_unchanged():
    state = presets.from_torch_state_dict(STATE_DICT)[1]
    settings = {
        key: STATE_DICT[key]
        for key in ("growth_factor", "backoff_factor", "growth_interval")
    }
    state_dict = presets.to_torch_state_dict(state, **settings)
    assert state_dict == STATE_DICT
    assert {type(value) for value in state_dict.values()} == {float, int}


class Tensor:
    """As in torch, `size` is a method."""

    def __init__(self, value):
        self.value = value

    def size(self):
        return ()

    def item(self):
        return self.value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


@pytest.mark.parametrize("array", [np.asarray, Tensor])
def test_a_state_dict_can_hold_arrays(array):
    arrays = {key: array(value) for key, value in STATE_DICT.items()}
    state = presets.from_torch_state_dict(arrays)[1]
    assert (state.loss_scale, state.rule_state.growth_count) == (1024.0, 2)


def test_missing_and_unknown_keys_of_a_state_dict_are_named():
    wrong = {**STATE_DICT, "extra": 1}
    del wrong["scale"]
    with pytest.raises(ValueError, match=r"missing keys \['scale'\].*\['extra'\]"):
        presets.from_torch_state_dict(wrong)


def test_the_empty_dict_of_a_disabled_scaler_goes_to_torch_and_back():
    rule, state = presets.from_torch_state_dict({})
    assert rule == presets.torch(enabled=False)
    assert presets.to_torch_state_dict(state) == {}
    opt_state = ols.loss_scaled(None, rule).init(jnp.ones(1))
    assert presets.to_torch_state_dict(opt_state) == {}


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("scale", 0.0, ValueError),
        ("scale", np.inf, ValueError),
        ("_growth_tracker", -1, ValueError),
        ("growth_factor", 1, ValueError),
        ("scale", None, TypeError),
        ("scale", np.ones(2), TypeError),
    ],
)
def test_a_wrong_entry_of_a_state_dict_is_refused_by_name(key, value, error):
    with pytest.raises(error, match=f"`{key}` must be"):
        presets.from_torch_state_dict({**STATE_DICT, key: value})


def test_what_is_no_state_dict_is_refused():
    with pytest.raises(TypeError, match="`state_dict` must be a mapping"):
        presets.from_torch_state_dict([1, 2])


@pytest.mark.parametrize("rule", [ols.static_loss_scale(8.0), presets.deepspeed()])
def test_a_state_dict_can_only_be_made_from_the_state_of_a_dynamic_rule(rule):
    with pytest.raises(ValueError, match="`state` must be that of a dynamic rule"):
        presets.to_torch_state_dict(rule.init())


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("growth_factor", 1.0, ValueError),
        ("backoff_factor", 1.0, ValueError),
        ("growth_interval", 0, ValueError),
        ("growth_interval", 2.5, TypeError),
    ],
)
def test_a_state_dict_with_a_wrong_setting_is_not_made(setting, value, error):
    state = presets.torch().init()
    with pytest.raises(error, match=f"`{setting}` must be"):
        presets.to_torch_state_dict(state, **{setting: value})


def test_an_optimizer_with_a_loaded_rule_continues_there_and_is_saved_again():
    rule, state = presets.from_torch_state_dict(STATE_DICT)
    tx = ols.loss_scaled(None, rule)
    opt_state = tx.init(jnp.ones(1))
    assert_same_bits(ols.find_loss_scale_state(opt_state), state)
    _, opt_state = tx.update(ols.scale(jnp.ones(1), opt_state), opt_state)
    state_dict = presets.to_torch_state_dict(opt_state)
    assert (state_dict["scale"], state_dict["_growth_tracker"]) == (4096.0, 0)
