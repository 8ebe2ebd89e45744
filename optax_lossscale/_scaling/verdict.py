"""Judge a step: is it applied, and how does the loss scale change?"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.tree import where_true
from optax_lossscale._ground.types import AxisName, PyTree
from optax_lossscale._scaling.finite import is_finite, largest_magnitude, on_all_devices
from optax_lossscale._scaling.rules import LossScale
from optax_lossscale._scaling.state import is_usable


class Step(NamedTuple):
    """What `update` was given, checked and restored.

    Attributes:
      grads: The gradients, as they were given.
      is_scaled: For each part of `grads` whether it is a scaled gradient, which is to
        be checked, and to be divided by `divisor`. A prefix of `grads`.
      divisor: `f32[]`. The loss scale, or 1 if the gradients are unscaled already.
      loss_scale_state: The state of the loss scale, with a usable scale.
      was_usable: `bool[]`. Whether the scale was usable as it was given.
      inner_state: The state of the inner optimizer.
      params: The parameters, as the inner optimizer is to see them.
      original_params: The parameters, as they were given.
      grads_finite: `bool[]` or None. False: the gradients count as nonfinite.
      accept: `bool[]` or None. False: the step is skipped, and the scale stays.
      extra_args: Further arguments of the inner optimizer.
    """

    grads: optax.Updates
    is_scaled: PyTree
    divisor: jax.Array
    loss_scale_state: LossScaleState
    was_usable: jax.Array
    inner_state: optax.OptState
    params: optax.Params | None
    original_params: optax.Params | None
    grads_finite: jax.Array | None
    accept: jax.Array | None
    extra_args: dict[str, Any]


class Verdict(NamedTuple):
    """What becomes of a step.

    Attributes:
      is_applied: `bool[]`. False if the step is skipped.
      loss_scale: `f32[]`. The next scale.
      rule_state: The next state of the rule.
    """

    is_applied: jax.Array
    loss_scale: jax.Array
    rule_state: PyTree


def judge(
    rule: LossScale, step: Step, axis_name: AxisName | None, *, is_bare: bool
) -> Verdict | None:
    """Checks gradients as the rule asks, and has it change the scale.

    Whether the step is applied is decided here and not by the rule, so that the state
    tells the truth under every rule. An unusable scale skips the step under every rule
    that has one. None means that nothing may skip the step.
    """
    old = step.loss_scale_state
    accepted = None
    if step.accept is not None:
        accepted = on_all_devices(step.accept, axis_name)
    if is_bare:  # Under `no_loss_scale`.
        unchanged = old.loss_scale, old.rule_state
        return None if accepted is None else Verdict(accepted, *unchanged)
    if not rule.skips:  # Nothing else would tell the other devices.
        was_usable = on_all_devices(step.was_usable, axis_name)
        step = step._replace(was_usable=was_usable)
    with jax.debug_infs(False):  # Here an infinity is an answer and no fault.
        finite, grads_max = _look_at_grads(rule, step, axis_name)
        new = rule.adjust(old, finite, *grads_max)  # Its counts are not used.
    is_applied = finite if rule.skips else step.was_usable
    verdict = Verdict(is_applied, new.loss_scale, new.rule_state)
    return verdict if accepted is None else reject_unless(accepted, verdict, old)


def _look_at_grads(
    rule: LossScale, step: Step, axis_name: AxisName | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Whether the gradients are finite, and the largest of them if the rule needs it.

    All devices get the same answer, for which one number crosses devices.
    """
    grads, flag = where_true(step.is_scaled, step.grads), step.was_usable
    if step.grads_finite is not None:
        flag &= step.grads_finite
    if rule.needs_grads_max:
        grads_max = largest_magnitude(grads, step.divisor, axis_name, grads_finite=flag)
        return jnp.isfinite(grads_max), (grads_max,)
    if not rule.skips:
        return step.was_usable, ()
    return is_finite(grads, step.divisor, axis_name, grads_finite=flag), ()


def reject_unless(
    accepted: jax.Array, verdict: Verdict, old: LossScaleState
) -> Verdict:
    """Skips a step although its gradients were finite, and leaves its scale alone."""
    is_rejected = verdict.is_applied & ~accepted
    loss_scale, rule_state = optax.tree.where(
        is_rejected,
        (old.loss_scale, old.rule_state),
        (verdict.loss_scale, verdict.rule_state),
    )
    return Verdict(verdict.is_applied & accepted, loss_scale, rule_state)


def repair_scale(
    state: LossScaleState, rule: LossScale
) -> tuple[LossScaleState, jax.Array]:
    """Replaces an unusable scale by the initial one, and says if it was usable."""
    was_usable = is_usable(state.loss_scale)
    first_scale = rule.init().loss_scale
    loss_scale = jnp.where(was_usable, state.loss_scale, first_scale)
    return state._replace(loss_scale=loss_scale), was_usable
