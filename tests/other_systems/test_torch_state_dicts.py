"""Runs go from PyTorch's GradScaler to this package and back by its state dict.

Promised in docs/migration/pytorch.md, "Continue a run".
"""

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


class Tensor:
    """As a tensor of PyTorch, it can be read as an array."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


def test_a_run_goes_to_torch_and_back_unchanged():
    tensors = {key: Tensor(value) for key, value in STATE_DICT.items()}
    _, state = presets.from_torch_state_dict(tensors)
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


def test_the_empty_dict_of_a_disabled_scaler_goes_to_torch_and_back():
    rule, state = presets.from_torch_state_dict({})
    assert rule.init() == ols.no_loss_scale().init()
    assert presets.to_torch_state_dict(state) == {}


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        ({"scale": 1.0, "extra": 1}, r"missing keys \['_growth_t.*\['extra'\]"),
        # A scale that has collapsed.
        (STATE_DICT | {"scale": 0.0}, "`scale` must be positive"),
    ],
    ids=["keys", "scale"],
)
def test_a_state_dict_that_is_not_of_a_scaler_or_has_no_scale_is_refused(
    state_dict, message
):
    with pytest.raises(ValueError, match=message):
        presets.from_torch_state_dict(state_dict)


def test_a_state_dict_can_only_be_made_from_the_state_of_a_dynamic_rule():
    with pytest.raises(ValueError, match="`state` must be that of a dynamic rule"):
        presets.to_torch_state_dict(ols.headroom_loss_scale().init())
