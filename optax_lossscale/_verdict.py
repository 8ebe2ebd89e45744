"""Judge the gradients of a step: whether it is applied, and what the rule learns."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._finite import is_finite, largest_magnitude
from optax_lossscale._rules import LossScale, count_step, hold
from optax_lossscale._state import LossScaleState, is_usable
from optax_lossscale._types import AxisName, PyTree


class Verdict(NamedTuple):
    """What becomes of a step.

    Attributes:
      is_applied: `bool[]`. False if the step is skipped.
      adjusted: The state of the loss scale after the step. Its `last_finite` is
        `is_applied`.
    """

    is_applied: jax.Array
    adjusted: LossScaleState


def judge(
    rule: LossScale,
    state: LossScaleState,
    was_usable: jax.Array,
    leaves: PyTree,
    divisor: jax.Array,
    axis_name: AxisName | None,
) -> Verdict:
    """Checks gradients as the rule asks, and adjusts the scale.

    The rule sets the scale and its own state. Whether the step is applied is decided
    and counted here, so that the state tells the truth under every rule.

    The leaves are still to be divided by `divisor`.
    """
    with jax.debug_infs(False):  # Here and below an infinity is a verdict and no fault.
        if rule.needs_grads_max:
            grads_max = largest_magnitude(leaves, divisor, axis_name)
            finite = jnp.isfinite(grads_max) & was_usable
            grads_max = jnp.where(was_usable, grads_max, jnp.inf)
            adjusted = rule.adjust(state, finite, grads_max)
        else:
            finite = was_usable
            if rule.skips:
                finite &= is_finite(leaves, divisor, axis_name)
            adjusted = rule.adjust(state, finite)
    # An unusable scale skips the step under every rule.
    is_applied = finite if rule.skips else was_usable
    counted = count_step(state, is_applied, adjusted.loss_scale, adjusted.rule_state)
    return Verdict(is_applied, counted)


def repair_scale(
    state: LossScaleState, rule: LossScale
) -> tuple[LossScaleState, jax.Array]:
    """Replaces an unusable scale by the initial one, and says if it was usable."""
    was_usable = is_usable(state.loss_scale)
    first_scale = rule.init().loss_scale
    loss_scale = jnp.where(was_usable, state.loss_scale, first_scale)
    return state._replace(loss_scale=loss_scale), was_usable


def reject_unless(
    accepted: jax.Array, verdict: Verdict, state: LossScaleState
) -> Verdict:
    """Skips a step although its gradients were finite, and leaves its scale alone."""
    is_rejected = verdict.is_applied & ~accepted
    held = hold(state, grads_finite=False)
    adjusted = optax.tree.where(is_rejected, held, verdict.adjusted)
    return Verdict(verdict.is_applied & accepted, adjusted)


def agree(
    name: str, verdict: jax.typing.ArrayLike, axis_name: AxisName | None
) -> jax.Array:
    """Whether a verdict from outside is True on every device."""
    return is_finite(as_leaf(name, verdict), None, axis_name)


def as_leaf(name: str, verdict: jax.typing.ArrayLike | None) -> jax.Array | None:
    """A verdict as a number: 0 for True, and infinity for False.

    So one check covers the gradients and the verdict.
    """
    if verdict is None:
        return None
    # Without this check a loss passed by mistake would count as True, even if NaN.
    if not jnp.issubdtype(getattr(verdict, "dtype", type(verdict)), jnp.bool_):
        meant = "loss < threshold" if name == "accept" else "jnp.isfinite(loss)"
        raise TypeError(
            f"`{name}` must be a bool, got {verdict!r}. (Did you mean `{meant}`?)"
        )
    if jnp.shape(verdict) != ():
        raise ValueError(
            f"`{name}` must be a scalar, got shape {jnp.shape(verdict)}. "
            "(Did you mean `all_finite(...)` or `jnp.all(...)`?)"
        )
    with jax.debug_infs(False):
        return jnp.where(verdict, 0.0, jnp.inf)
