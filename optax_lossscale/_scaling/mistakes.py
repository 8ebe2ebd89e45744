"""Warnings and errors for common mistakes in wrapping an optimizer."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.states import LossScaledState, LossScaleState, Unscaled
from optax_lossscale._ground.tree import find_by_type, where_true
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.rules import LossScale, dynamic_loss_scale
from optax_lossscale._scaling.state import find_loss_scale_state


def warn_of_scaling(
    grads: PyTree,
    params: PyTree,
    state: LossScaleState,
    rule: LossScale,
    *,
    is_scaled: PyTree,
    is_unscaled: bool,
) -> None:
    """Warns of gradients that do not depend on the loss scale as they must.

    It sees only what was computed in the same trace.
    """
    if not isinstance(state.loss_scale, jax.core.Tracer):
        return
    try:
        from optax_lossscale._programs.dependence import scaling_of
    except ImportError:  # What JAX does not promise to keep is gone.
        return
    scaling: str | None = scaling_of(
        jax.tree.leaves(where_true(is_scaled, grads)),
        jax.tree.leaves(params),
        state.loss_scale,
    )
    if is_unscaled:
        scaling = "still scaled" if scaling == "scaled" else None
    # If the scale never changes, the loss may have been multiplied by a number.
    may_be_number = scaling in ("never scaled", "by another scale")
    if scaling in _WRONG_SCALING and not (may_be_number and _keeps_scale(rule)):
        warnings.warn(_WRONG_SCALING[scaling], stacklevel=4)


def _keeps_scale(rule: LossScale) -> bool:
    """Whether the program of a rule returns the very scale that it was given."""
    grads_max = (jnp.float32(1.0),) if rule.needs_grads_max else ()
    adjust = jax.make_jaxpr(lambda *args: rule.adjust(*args))
    program = adjust(rule.init(), jnp.asarray(True), *grads_max).jaxpr
    return program.outvars[0] is program.invars[0]


_INSTEAD = (
    "(Compute them with `scaled_value_and_grad(loss_fn, opt_state)`, or differentiate "
    "`scale(loss, opt_state)`, in the same step and with the state that is given to "
    "`update`.)"
)
_WRONG_SCALING = {
    "never scaled": (
        "`update` divides gradients by the loss scale, but these were computed without "
        "it, so they come out wrong: too small by the scale if they are unscaled, and "
        f"by the ratio of the scales if they have another one. {_INSTEAD}"
    ),
    "by another scale": (
        "`update` divides gradients by the loss scale, but these were scaled and "
        "unscaled by another one, so they come out too small. (Take out the other loss "
        f"scaling, such as a `DynamicScale`.) {_INSTEAD}"
    ),
    "unscaled": (
        "`update` divides gradients by the loss scale, but these are unscaled already, "
        "so they become too small. (Call `tx.update(..., grads_unscaled=True)`.)"
    ),
    "scaled twice": (
        "`update` divides gradients by the loss scale once, but these were multiplied "
        "by it twice, so they stay too large. (Call either `scale` or "
        "`scaled_value_and_grad`.)"
    ),
    "still scaled": (
        "`grads_unscaled=True` says that the loss scale was divided out of the "
        "gradients, but it was not, so they stay too large. (Call `unscale` first, or "
        "leave the argument out.)"
    ),
}


def warn_if_constant(state: PyTree) -> None:
    """Warns of a gradient function that was made once, outside the jitted step."""
    loss_scale_state = find_loss_scale_state(state)
    # A rule without a state of its own may keep the scale.
    if not jax.tree.leaves(loss_scale_state.rule_state):
        return
    try:
        from optax_lossscale._programs.dependence import is_constant_under_jit
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


def warn_of_outer_wrappers(state: PyTree) -> None:
    """Warns of wrappers of Optax that must be inside `loss_scaled`, not outside.

    The warning shows the line that called the caller.
    """
    # What a loss-scaled state holds is inside, and need not be looked through.
    for _, outer in find_by_type(state, (*_WRONG_OUTSIDE, LossScaledState)):
        if isinstance(outer, LossScaledState):
            continue
        inner = [state for _, state in find_by_type(outer, LossScaleState)]
        if any(not isinstance(state.rule_state, Unscaled) for state in inner):
            name, consequence = _WRONG_OUTSIDE[type(outer)]
            warnings.warn(
                f"`{name}` must not be outside `loss_scaled`: {consequence}",
                stacklevel=3,
            )


def warn_of_links_before(state: PyTree) -> None:
    """Warns of what is before `loss_scaled` in a chain, and sees scaled gradients.

    The warning shows the line that called the caller.
    """
    if any(not isinstance(each.rule_state, Unscaled) for each in _links_behind(state)):
        warnings.warn(
            "nothing must be before `loss_scaled` in an `optax.chain`: it would see "
            "scaled gradients, and a clip would clip by the scale. (Write "
            "`loss_scaled(optax.chain(...))`.)",
            stacklevel=3,
        )


def _links_behind(state: PyTree) -> list[LossScaleState]:
    """The states of loss scales in a chain, behind a clip or `optax.zero_nans`.

    Other links have states that users may hold beside that of an optimizer, in a tuple.
    """

    def is_chain(node: PyTree) -> bool:
        return type(node) is tuple

    found = list[LossScaleState]()
    for chain in filter(is_chain, jax.tree.leaves(state, is_leaf=is_chain)):
        is_behind = False
        for link in chain:
            inside = [each for _, each in find_by_type(link, LossScaleState)]
            found += inside if is_behind else _links_behind(link)
            is_behind |= isinstance(link, optax.EmptyState | optax.ZeroNansState)
    return found


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


def check_not_nested(name: str, inner_state: PyTree) -> None:
    if find_by_type(inner_state, LossScaleState):
        raise ValueError(
            f"`{name}` must not be loss-scaled itself: its gradients would be unscaled "
            "twice. (Call `loss_scaled` once, around the whole optimizer.)"
        )


def check_names(extra_args: dict[str, Any]) -> None:
    """Refuses a misspelt name, which most optimizers would ignore."""
    for name in extra_args:
        for meant in difflib.get_close_matches(name, _ARGUMENTS, cutoff=0.9):
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
