"""PyTorch's rule, and a run carried across from there and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._checks import (
    check_count,
    check_factor,
    check_flag,
    check_scale,
)
from optax_lossscale._rules import DynamicRuleState, LossScale, no_loss_scale
from optax_lossscale._state import LossScaleState, find_loss_scale_state
from optax_lossscale._types import PyTree
from optax_lossscale.presets._rules import uncapped

_TRACKER = "_growth_tracker"
_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", _TRACKER}


def torch(
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScale:
    """PyTorch's `torch.amp.GradScaler`.

        finite step:     t = t + 1;  if t == growth_interval: s = s growth_factor, t = 0
        nonfinite step:  s = s backoff_factor;  t = 0

    Growth that float32 does not hold is refused, and the count starts again.

    Departure: PyTorch has no floor and reaches zero, after 166 nonfinite steps.

    Args:
      init_scale: First scale, from `2**-126` to `2**126`.
      growth_factor: Above 1.
      backoff_factor: Strictly between 0 and 1.
      growth_interval: Finite steps to the next growth, at least 1.
      enabled: False is `no_loss_scale()`, whatever else is set.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.torch(8.0, growth_interval=1)
      >>> rule.adjust(rule.init(), True).loss_scale
      Array(16., dtype=float32)
      >>> ols.presets.torch(enabled=False) == ols.no_loss_scale()
      True

    References:
      torch 2.13, `torch/amp/grad_scaler.py`,
      `aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp`.
    """
    if not check_flag("enabled", enabled):
        return no_loss_scale()
    return uncapped(
        init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )


def from_torch_state_dict(
    state_dict: Mapping[str, Any],
) -> tuple[LossScale, LossScaleState]:
    """Makes rule and state from what `torch.amp.GradScaler.state_dict()` returned.

        s = state_dict["scale"];  growth_count = state_dict["_growth_tracker"]

    The run goes on where PyTorch's left off: `rule.init()` is that state, so that
    `loss_scaled(optimizer, rule)` starts with it. (A tracker already beyond the
    interval grows at the next finite step; PyTorch, which tests `==`, would wait for
    an overflow.)

    Args:
      state_dict: The five entries `scale`, `growth_factor`, `backoff_factor`,
        `growth_interval` and `_growth_tracker`; numbers, or arrays of one.

    Returns:
      `(rule, state)`: `presets.torch` with those settings, which starts at that scale
      and count; and that first state. What PyTorch does not save starts at zero.

    Raises:
      ValueError: If a key is missing or unknown (it names them), or a value outside
        its range, such as a scale that has collapsed to zero.
      TypeError: If `state_dict` is no mapping, or a value of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule, state = ols.presets.from_torch_state_dict({
      ...     "scale": 1024.0,
      ...     "growth_factor": 2.0,
      ...     "backoff_factor": 0.5,
      ...     "growth_interval": 2000,
      ...     "_growth_tracker": 1999,
      ... })
      >>> rule.adjust(state, True).loss_scale
      Array(2048., dtype=float32)

    References:
      torch 2.13, `torch/amp/grad_scaler.py`.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"`state_dict` must be a mapping, got {state_dict!r}.")
    given = set(state_dict)
    if given != _KEYS:
        raise ValueError(
            "`state_dict` must be that of an enabled GradScaler, got missing keys "
            f"{sorted(_KEYS - given)} and unknown keys {sorted(given - _KEYS)}. "
            "(That of a disabled one is empty: use `no_loss_scale()`.)"
        )
    entries = {key: _as_number(key, value) for key, value in state_dict.items()}
    tracker = check_count(_TRACKER, entries.pop(_TRACKER), minimum=0)
    rule = torch(check_scale("scale", entries.pop("scale")), **entries)

    def init() -> LossScaleState:
        state = rule.init()
        rule_state = DynamicRuleState(
            growth_count=jnp.asarray(tracker, jnp.int32),
            hysteresis_count=state.rule_state.hysteresis_count,
        )
        return state._replace(rule_state=rule_state)

    return rule._replace(init=init), init()


def to_torch_state_dict(
    state: PyTree,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> dict[str, float | int]:
    """Makes what `torch.amp.GradScaler.load_state_dict` takes.

        {"scale": s, "_growth_tracker": growth_count, ...the settings}

    The state does not know its rule's settings: give them again where they are not
    PyTorch's defaults. PyTorch has no place for hysteresis and the counts of skips.

    Args:
      state: A `LossScaleState` of a rule that counts as PyTorch's does
        (`presets.torch`, `dynamic_loss_scale`), or any pytree that holds exactly one,
        such as an optimizer state. Concrete: this is for use outside `jit`.
      growth_factor: As the rule was made with; above 1.
      backoff_factor: Likewise; strictly between 0 and 1.
      growth_interval: Likewise, finite steps; at least 1.

    Returns:
      A dict of the five entries, Python numbers.

    Raises:
      ValueError: If `state` is of a rule that keeps no such count, or a setting is
        outside its range.
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
    if not isinstance(state.rule_state, DynamicRuleState):
        raise ValueError(
            "`state` must be that of a dynamic rule such as `presets.torch`, got "
            f"`rule_state` {state.rule_state!r}. (GradScaler has no other.)"
        )
    check_factor("growth_factor", growth_factor, 1.0, np.inf)
    check_factor("backoff_factor", backoff_factor, 0.0, 1.0)
    return {
        "scale": float(state.loss_scale),
        "growth_factor": float(growth_factor),
        "backoff_factor": float(backoff_factor),
        "growth_interval": check_count("growth_interval", growth_interval),
        _TRACKER: int(state.rule_state.growth_count),
    }


def _as_number(name: str, value: Any) -> Any:
    """The one number of an array or a tensor, anything else as it is."""
    if np.size(value) != 1:
        raise TypeError(f"`{name}` must be one number, got {value!r}.")
    return value.item() if hasattr(value, "item") else value
