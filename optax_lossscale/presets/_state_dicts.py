"""Conversion from and to the state dict of PyTorch's `GradScaler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._ground.checks import check_count, check_scale
from optax_lossscale._ground.states import LossScaleState, NoLossScaleRuleState
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.rules import DynamicRuleState, LossScale
from optax_lossscale._scaling.state import find_loss_scale_state
from optax_lossscale.presets._systems import torch

_TRACKER = "_growth_tracker"
_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", _TRACKER}


def from_torch_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[LossScale, LossScaleState]:
    """Makes a rule and its state from a `torch.amp.GradScaler.state_dict()`.

    Use it to continue a run that was started in PyTorch: `rule.init()` returns the
    restored state, so `loss_scaled(optimizer, rule)` starts from it.

        s = state_dict["scale"];  growth_count = state_dict["_growth_tracker"]

    If the tracker is already beyond the interval, the scale grows on the next finite
    step. (In PyTorch it would not grow before an overflow resets the tracker.)

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/pytorch.html

    Args:
      state_dict: The five entries of PyTorch, each a number or an array with one entry.
        It is empty for a scaler with `enabled=False`.

    Returns:
      `presets.torch` with the saved settings, and its state. Counts of steps, which
      PyTorch does not save, are zero. For an empty dict the rule is `no_loss_scale()`.

    Raises:
      ValueError: If a key is missing or unknown, or a value is outside its range, such
        as a scale that has collapsed to zero.
      TypeError: If a value is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule, state = ols.presets.from_torch_state_dict({
      ...     "scale": 1024.0,
      ...     "growth_factor": 2.0,
      ...     "backoff_factor": 0.5,
      ...     "growth_interval": 2000,
      ...     "_growth_tracker": 1999,
      ... })
      >>> rule.adjust(state, grads_finite=True).loss_scale
      Array(2048., dtype=float32)

    References:
      torch 2.13, `torch/amp/grad_scaler.py`.
    """
    given = set(state_dict)
    if not given:
        rule = torch(enabled=False)
        return rule, rule.init()
    if given != _KEYS:
        raise ValueError(
            "`state_dict` must come from a GradScaler, got missing keys "
            f"{sorted(_KEYS - given)} and unknown keys {sorted(given - _KEYS)}."
        )
    entries = {key: np.asarray(value).item() for key, value in state_dict.items()}
    tracker = check_count(_TRACKER, entries.pop(_TRACKER), minimum=0)
    rule = torch(check_scale("scale", entries.pop("scale")), **entries)

    def init() -> LossScaleState:
        first = rule.init()
        count = jnp.asarray(tracker, jnp.int32)
        return first._replace(rule_state=first.rule_state._replace(growth_count=count))

    return rule._replace(init=init), init()


def to_torch_state_dict(
    state: PyTree,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> dict[str, float | int]:
    """Makes a dict for `torch.amp.GradScaler.load_state_dict`.

    Use it outside `jit`, to continue a run in PyTorch. A state does not hold the
    settings of its rule, so pass them again if they differ from PyTorch's defaults.

        {"scale": s, "_growth_tracker": growth_count, ...the settings}

    The hysteresis and the counts of skipped steps are dropped.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/pytorch.html

    Args:
      state: A `LossScaleState` of a rule that counts as PyTorch does (`presets.torch`,
        `dynamic_loss_scale`) or of `no_loss_scale()`, or any pytree that holds exactly
        one, such as an optimizer state. Its arrays must be concrete.
      growth_factor: As in `presets.torch`.
      backoff_factor: As in `presets.torch`.
      growth_interval: As in `presets.torch`.

    Returns:
      The five entries of PyTorch, as Python numbers; none for `no_loss_scale()`.

    Raises:
      ValueError: If `state` holds no `LossScaleState` or several, if its rule does not
        keep such a count, or if a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> state = ols.presets.torch().init()
      >>> state_dict = ols.presets.to_torch_state_dict(state)
      >>> state_dict["scale"], state_dict["_growth_tracker"]
      (65536.0, 0)

    References:
      torch 2.13, `torch/amp/grad_scaler.py`.
    """
    state = find_loss_scale_state(state)
    if isinstance(state.rule_state, NoLossScaleRuleState):
        return {}
    if not isinstance(state.rule_state, DynamicRuleState):
        raise ValueError(
            "`state` must be that of a dynamic rule such as `presets.torch`, got "
            f"`rule_state` {state.rule_state!r}. (GradScaler has no other rule.)"
        )
    torch(1.0, growth_factor, backoff_factor, growth_interval)  # Checks the settings.
    return {
        "scale": float(state.loss_scale),
        "growth_factor": float(growth_factor),
        "backoff_factor": float(backoff_factor),
        "growth_interval": int(growth_interval),
        _TRACKER: int(state.rule_state.growth_count),
    }
