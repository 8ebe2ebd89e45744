"""Warnings and errors for common mistakes in wrapping an optimizer.

Each warning shows the line that called the caller.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.parameters import parameters_of
from optax_lossscale._ground.states import (
    LossScaledState,
    LossScaleState,
    MasterWeightsState,
    NoLossScaleRuleState,
)
from optax_lossscale._ground.tree import (
    dtype_of,
    find_by_type,
    is_floating_array,
    is_wrapped,
)
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.rules import LossScale, dynamic_loss_scale
from optax_lossscale._scaling.state import find_loss_scale_state


def warn_of_scaling(grads: PyTree, params: PyTree, state: LossScaleState) -> None:
    """Warns if gradients were never scaled, or are unscaled already.

    It sees only what was computed in the same trace.
    """
    if not (isinstance(state.loss_scale, jax.core.Tracer) and _moves(state)):
        return
    try:
        from optax_lossscale._scaling.dependence import scaling_of
    except ImportError:  # What JAX does not promise to keep is gone.
        return
    leaves = jax.tree.leaves(grads), jax.tree.leaves(params)
    scaling = scaling_of(*leaves, state.loss_scale)
    if scaling is not None:
        warnings.warn(_WRONG_SCALING[scaling], stacklevel=3)


_WRONG_SCALING = {
    "never scaled": (
        "`update` divides gradients by the loss scale, but these were computed without "
        "it, so they come out too small. (Compute them with "
        "`scaled_value_and_grad(loss_fn, opt_state)`, or differentiate "
        "`scale(loss, opt_state)`, in the same step and with the state that is given "
        "to `update`. Beside `scaled_backward` with a number, write "
        "`loss_scaled(inner, static_loss_scale(1.0))`.)"
    ),
    "unscaled": (
        "`update` divides gradients by the loss scale, but these were divided by a "
        "scale already, so they come out too small. (After `unscale`, and beside "
        "`scaled_backward`, call `tx.update(..., grads_unscaled=True)`. Take out any "
        "other loss scaling, such as a `DynamicScale`.)"
    ),
}


def warn_if_constant(state: PyTree) -> None:
    """Warns of a gradient function that was made once, outside the jitted step."""
    loss_scale_state = find_loss_scale_state(state)
    if not _moves(loss_scale_state):
        return
    try:
        from optax_lossscale._scaling.dependence import is_constant_under_jit
    except ImportError:
        return
    if is_constant_under_jit(loss_scale_state.loss_scale):
        warnings.warn(
            "the loss scale is a constant of this jitted function, which goes on "
            "scaling by it when the state has changed. (Call "
            "`scaled_value_and_grad(loss_fn, opt_state)`, or `scaled_backward`, inside "
            "the step, with the state that is an argument of the step.)",
            stacklevel=3,
        )


def _moves(state: LossScaleState) -> bool:
    """Whether a rule is known to change the scale; one of your own may keep it."""
    kind = type(state.rule_state)
    return kind.__module__ == "optax_lossscale" and kind is not NoLossScaleRuleState


def warn_of_order(state: PyTree, *, may_clip: bool = False) -> None:
    """Warns of what is around or before `loss_scaled`, and belongs inside it.

    True gradients may be clipped before it.
    """
    for _, outer in find_by_type(state, (*_WRONG_OUTSIDE, LossScaledState)):
        # What a loss-scaled state holds is inside.
        if not isinstance(outer, LossScaledState) and _is_scaled(outer):
            name, consequence = _WRONG_OUTSIDE[type(outer)]
            warnings.warn(
                f"`{name}` must not be outside `loss_scaled`: {consequence}",
                stacklevel=3,
            )
    if not may_clip and _is_behind_clip(state):
        warnings.warn(
            "nothing must be before `loss_scaled` in an `optax.chain`: it would see "
            "scaled gradients, and a clip would clip by the scale. (Write "
            "`loss_scaled(optax.chain(...))`.)",
            stacklevel=3,
        )


_WRONG_OUTSIDE = {
    optax.MultiStepsState: (
        "optax.MultiSteps",
        "after one overflow, the sum that it accumulates stays NaN. (Write "
        "`loss_scaled(optax.MultiSteps(...))`.)",
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "it hides overflows, so the loss scale never backs off. (Leave it out: "
        "`loss_scaled` skips such steps itself.)",
    ),
}


def _is_behind_clip(state: PyTree) -> bool:
    """Whether a loss scale is in a chain, behind a clip or `optax.zero_nans`.

    Other links have states that users may hold beside that of an optimizer, in a tuple.
    """

    def is_chain(node: PyTree) -> bool:
        return type(node) is tuple

    for chain in filter(is_chain, jax.tree.leaves(state, is_leaf=is_chain)):
        is_behind = False
        for link in chain:
            if (is_behind and _is_scaled(link)) or _is_behind_clip(link):
                return True
            is_behind |= isinstance(link, optax.EmptyState | optax.ZeroNansState)
    return False


def _is_scaled(tree: PyTree) -> bool:
    """Whether a tree holds the state of a loss scale that is not always 1."""
    states = [state for _, state in find_by_type(tree, LossScaleState)]
    return any(
        not isinstance(state.rule_state, NoLossScaleRuleState) for state in states
    )


def check_dtypes(params: PyTree) -> None:
    """Refuses float8 parameters."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if is_floating_array(leaf)]
    if any(jnp.finfo(dtype_of(leaf)).bits < 16 for leaf in leaves):
        raise TypeError(
            "floating parameters must have at least 16 bits, got float8. (Keep float8 "
            "inside the model, and train wider parameters.)"
        )


def warn_of_half_parameters(params: PyTree, inner_state: PyTree) -> None:
    """Warns of float16 parameters that no optimizer holds masters of."""
    dtypes = set(map(dtype_of, jax.tree.leaves(params)))
    has_masters = bool(find_by_type(inner_state, MasterWeightsState))
    if jnp.dtype(jnp.float16) in dtypes and not has_masters:
        warnings.warn(
            "some parameters are float16 and have no float32 masters, so most updates "
            "are rounded away. (Write `loss_scaled(master_weights(optimizer))`, or "
            "keep parameters in float32 and use `autocast`. Parameters that are frozen "
            "need not be given to the optimizer.)",
            stacklevel=3,
        )


def check_not_nested(name: str, inner_state: PyTree) -> None:
    """Refuses a loss-scaled optimizer inside another one."""
    if find_by_type(inner_state, LossScaleState):
        raise ValueError(
            f"`{name}` must not be loss-scaled itself: its gradients would be unscaled "
            "twice. (Call `loss_scaled` once, around the whole optimizer.)"
        )


def check_inner_state(inner_state: PyTree) -> None:
    """Refuses what is no state of an optimizer, or one that is loss-scaled itself."""
    check_not_nested("inner_state", inner_state)
    # The state of `optax.contrib.sam` has a field of this name.
    is_sam = isinstance(inner_state, optax.contrib.SAMState)
    if hasattr(inner_state, "opt_state") and not is_sam:
        raise TypeError(
            "`inner_state` must be the state of an optimizer, got a "
            f"{type(inner_state).__name__}. (Did you mean its `opt_state`?)"
        )
    if isinstance(inner_state, dict | list) and not find_by_type(inner_state, tuple):
        raise TypeError(
            "`inner_state` must be the state of an optimizer, got a "
            f"{type(inner_state).__name__} without NamedTuples. (A checkpoint was "
            "restored without a target: restore into a target, the state of the "
            "optimizer that was saved.)"
        )
    if any(map(is_wrapped, jax.tree.leaves(inner_state, is_leaf=is_wrapped))):
        raise TypeError(
            "`inner_state` must hold arrays, got NNX variables. (Write `optimizer = "
            "nnx.Optimizer(model, loss_scaled(inner), wrt=nnx.Param)`, and "
            "`optimizer.opt_state = optimizer.opt_state._replace(inner_state=...)`.)"
        )


def check_rule(loss_scale: LossScale | None) -> LossScale:
    """Returns the rule, the default one for None."""
    rule = dynamic_loss_scale() if loss_scale is None else loss_scale
    if not isinstance(rule, LossScale):
        name = getattr(rule, "__name__", "")
        is_preset = "presets" in getattr(rule, "__module__", "")
        call = f"{'presets.' if is_preset else ''}{name}()"
        hint = f"Did you mean `{call if name else 'static_loss_scale(...)'}`?"
        if hasattr(rule, "update"):
            hint = "Are the arguments swapped? Write `loss_scaled(optimizer, rule)`."
        raise TypeError(
            f"`loss_scale` must be a LossScale, got one of type {type(rule).__name__}. "
            f"({hint})"
        )
    return rule


def check_arguments(
    updates: PyTree, params: PyTree, extra_args: Mapping[str, object]
) -> None:
    """Refuses arguments of `update` that would be misunderstood in silence."""
    if isinstance(updates, tuple) and len(updates) == 2 and params is not None:
        structures = map(jax.tree.structure, (updates[1], parameters_of(params)))
        if len(set(structures)) == 1:
            raise ValueError(
                "`updates` must be the gradients, got a pair of which they are the "
                "second. (`scaled_value_and_grad` returns `(loss, grads)`: pass the "
                "gradients alone.)"
            )
    for name in extra_args:  # Optax passes them on, and most optimizers read none.
        meant = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.9)
        if meant:
            raise TypeError(
                f"`update` has no argument `{name}`. (Did you mean `{meant[0]}`?)"
            )


_ARGUMENTS = ("grads_finite", "accept", "grads_unscaled")


def check_state(state: PyTree, rule: LossScale, first: LossScaleState) -> None:
    """Refuses what is no state of `loss_scaled`, or one of another rule."""
    if not isinstance(state, LossScaledState):
        hint = (
            "Pass what `init` or the last `update` returned. If this is a checkpoint "
            "that was restored without a target, restore into a target. For a state "
            "saved without loss scaling: `adopt_inner_state(state, loss_scale)`."
        )
        if found := find_by_type(state, LossScaledState):
            hint = f"Did you mean `state{jax.tree_util.keystr(found[0][0])}`?"
        raise ValueError(
            "`state` must be a LossScaledState, got one of type "
            f"{type(state).__name__}. ({hint})"
        )
    got = state.loss_scale_state
    structures: list[Any] = [jax.tree.structure(tree) for tree in (got, first)]
    if structures[0] != structures[1]:
        kind = type(getattr(got, "rule_state", got)).__name__
        raise ValueError(
            f"`state` must be that of the rule {rule}, got that of "
            f"{_RULE_OF_STATE.get(kind, kind)}. (To change the rule: "
            "`adopt_inner_state(state.inner_state, loss_scale)`. If a checkpoint was "
            "restored without a target, restore into a target.)"
        )


_RULE_OF_STATE = {
    "DynamicRuleState": "dynamic_loss_scale or a preset",
    "FairseqRuleState": "presets.fairseq",
    "HeadroomRuleState": "headroom_loss_scale",
    "NoLossScaleRuleState": "no_loss_scale",
    "tuple": "static_loss_scale",
}
