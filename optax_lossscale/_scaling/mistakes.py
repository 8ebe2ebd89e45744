"""Warnings and errors for common mistakes in wrapping an optimizer."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

import jax

from optax_lossscale._ground.states import LossScaledState, LossScaleState
from optax_lossscale._ground.tree import find_by_type, where_true
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.rules import LossScale, dynamic_loss_scale


def warn_if_unscaled(
    grads: PyTree, params: PyTree, state: LossScaleState, is_scaled: PyTree
) -> None:
    """Warns of derivatives computed from the parameters, but not from the loss scale.

    It sees only what was computed in the same trace.
    """
    if not isinstance(state.loss_scale, jax.core.Tracer):
        return
    try:
        from optax_lossscale._programs.dependence import are_gradients_without
    except ImportError:  # What JAX does not promise to keep is gone.
        return
    scaled = jax.tree.leaves(where_true(is_scaled, grads))
    if are_gradients_without(scaled, jax.tree.leaves(params), state.loss_scale):
        warnings.warn(
            "`update` divides gradients by the loss scale, but these were computed "
            "without it, so they become too small. (Compute them with "
            "`scaled_value_and_grad(loss_fn, opt_state)`, or differentiate "
            "`scale(loss, opt_state)`.)",
            stacklevel=4,
        )


def check_not_nested(name: str, inner_state: PyTree) -> None:
    if find_by_type(inner_state, LossScaleState):
        raise ValueError(
            f"`{name}` must not be loss-scaled itself: its gradients would be unscaled "
            "twice. (Call `loss_scaled` once, around the whole optimizer.)"
        )


def check_names(extra_args: dict[str, Any]) -> None:
    """Refuses a misspelt name, which most optimizers would ignore."""
    for name in extra_args:
        for meant in difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.9):
            raise TypeError(
                f"`update` has no argument `{name}`. (Did you mean `{meant}`?)"
            )


_ARGUMENTS = ("grads_finite", "accept", "grads_unscaled")


def check_rule(loss_scale: LossScale | None) -> LossScale:
    rule = dynamic_loss_scale() if loss_scale is None else loss_scale
    if not isinstance(rule, LossScale):
        name = getattr(rule, "__name__", "")
        is_preset = "presets." in getattr(rule, "__module__", "")
        name = f"presets.{name}" if is_preset else name
        call = f"{name}()" if name.replace(".", "").isidentifier() else "loss_scale()"
        meant = call if callable(rule) else "static_loss_scale(...)"
        raise TypeError(
            f"`loss_scale` must be a LossScale, got {rule!r} of type "
            f"{type(rule).__name__}. (Did you mean `{meant}`?)"
        )
    return rule


def check_state(state: LossScaledState, first: LossScaleState) -> None:
    is_state = isinstance(state, LossScaledState)
    if is_state and _has_structure(state.loss_scale_state, first):
        return
    if is_state:
        got = state.loss_scale_state.rule_state
        hint = "To change the rule: `adopt_inner_state(state.inner_state, loss_scale)`."
    elif found := find_by_type(state, LossScaledState):
        got = type(state)
        places = [f"`state{jax.tree_util.keystr(path)}`" for path, _ in found]
        hint = f"Did you mean {' or '.join(places)}?"
    else:
        got = type(state)
        hint = (
            "Pass what `init` or the last `update` returned. For a state saved "
            "without loss scaling: `adopt_inner_state(state, loss_scale)`."
        )
    raise ValueError(
        "`state` must be a LossScaledState of this optimizer's own rule, got "
        f"{got}. ({hint})"
    )


def _has_structure(state: PyTree, first: LossScaleState) -> bool:
    """Whether a state has the structure of the first one; leaves may be lists."""
    try:
        jax.tree.map(lambda *_: None, first, state)
    except ValueError:
        return False
    return True
