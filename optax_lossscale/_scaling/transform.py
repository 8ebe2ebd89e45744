"""Loss scaling around any Optax optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.checks import (
    check_bool,
    check_count,
    check_flag,
    check_optimizer,
)
from optax_lossscale._ground.parameters import gradients_of, parameters_of, with_zeros
from optax_lossscale._ground.states import LossScaledState, LossScaleState
from optax_lossscale._ground.tree import (
    flags_of,
    is_absent,
    is_float8,
    is_wrapped,
    strengthen,
    where_true,
)
from optax_lossscale._ground.types import AxisName, Mask, PyTree
from optax_lossscale._scaling.early_masks import run_masked
from optax_lossscale._scaling.finite import is_finite
from optax_lossscale._scaling.masking import cast_like, mask_inputs, mask_results
from optax_lossscale._scaling.mistakes import (
    check_names,
    check_not_nested,
    check_rule,
    check_state,
    warn_of_scaling,
)
from optax_lossscale._scaling.rules import (
    LossScale,
    count_step,
    is_no_loss_scale,
)
from optax_lossscale._scaling.scale import divide_out
from optax_lossscale._scaling.state import as_array
from optax_lossscale._scaling.telemetry import with_stall_warning
from optax_lossscale._scaling.trainable import check_params, init_inner, wide_params
from optax_lossscale._scaling.verdict import (
    Step,
    Verdict,
    judge,
    reject_unless,
    repair_scale,
)


def loss_scaled(
    inner: optax.GradientTransformation | optax.MultiSteps | None = None,
    loss_scale: LossScale | None = None,
    *,
    axis_name: AxisName | None = None,
    unscale_mask: Mask = None,
    check_updates: bool = False,
    warn_after: int | None = None,
    grads_unscaled: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes the gradients of a scaled loss.

    Use `tx = loss_scaled(optimizer)` in place of the optimizer, and give `tx.update`
    the gradients of `scaled_value_and_grad`. With scaled gradients `g`, loss scale `s`
    and inner state `m`, a step is

        g = unscale(g, s);  finite = all_finite(g)
        u, m' = inner.update(finite ? g : 0, m)
        updates, m = finite ? (u, m') : (0, m);  s = adjust(s, finite)

    A skipped step changes no bit of parameters and inner state, and prints nothing, so
    call `raise_if_stalled(opt_state)` now and then. State elsewhere, such as batch
    statistics, is not protected: keep it with `where_applied`. Clipping, weight decay
    and accumulation go inside: see `docs/guides/accumulation_and_clipping.md`. The
    gradients, parameters and moments inside, and the updates, are float32 or wider.

    Args:
      inner: The optimizer. None makes a link for `optax.chain`, which zeroes the
        gradients of a bad step, but the links after it still decay weights and count.
      loss_scale: The rule. None is `dynamic_loss_scale()`.
      axis_name: The axis of `pmap`, `vmap` or `shard_map`, or a tuple of axes, whose
        devices skip a step together. Without it their parameters may drift apart. Leave
        it out under `jit` with sharded arrays. Gradients are never reduced.
      unscale_mask: A pytree of bools that is a prefix of the gradients, or a function
        that makes one from them. Where it is False, nothing is unscaled or checked.
      check_updates: Whether nonfinite updates skip a step too; the scale then stays.
      warn_after: Warn on the host when this many steps in a row were skipped, at least
        1. It costs a callback, so the program cannot be exported. Python shows a
        warning of the same text once, unless `warnings.simplefilter` says otherwise.
        None never warns.
      grads_unscaled: The default of the argument of `update` with this name.

    Returns:
      A `GradientTransformationExtraArgs` with a `LossScaledState`. Its `update` passes
      extra arguments on to `inner`, which needs true gradients in them, such as
      `grad=unscale(grads, opt_state)` for a line search, and has three of its own:

      * `grads_finite`, `bool[]`, such as `jnp.isfinite(loss)`: False means an overflow.
      * `accept`, `bool[]`, such as `loss < 3 * usual_loss`: False skips the step under
        every rule. The scale stays, unless the gradients overflow too.
      * `grads_unscaled`: True if you have called `unscale` on the gradients. A clip by
        value hides an infinity: check before it, and pass the result as `grads_finite`.

    Raises:
      TypeError: If an argument is of the wrong kind, or one of `update` is misspelt.
      ValueError: If `inner` is loss-scaled itself, or the state is of another rule.

    Warns:
      UserWarning: From `update`, if the same jitted function scaled the gradients
        wrongly. (Outside `jit`, and across two jitted functions, this is not seen.)

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx, params = ols.loss_scaled(optax.sgd(0.5)), jnp.ones(2)
      >>> opt_state = tx.init(params)
      >>> grads = ols.scaled_grad(lambda x: (x**2).sum(), opt_state)(params)
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> optax.apply_updates(params, updates)
      Array([0., 0.], dtype=float32)

    References:
      Micikevicius et al. (https://arxiv.org/abs/1710.03740); `torch.amp.GradScaler`.
    """
    if warn_after is not None:
        check_count("warn_after", warn_after)
    rule = check_rule(loss_scale)
    settings = _Settings(
        optimizer=check_optimizer(
            "inner", optax.identity() if inner is None else inner
        ),
        rule=rule,
        first_state=jax.eval_shape(rule.init),
        axis_name=axis_name,
        unscale_mask=unscale_mask,
        check_updates=check_flag("check_updates", check_updates),
        warn_after=warn_after,
        is_link=inner is None,
        is_bare=is_no_loss_scale(rule),
    )
    are_unscaled = check_flag("grads_unscaled", grads_unscaled)

    def init(params: optax.Params) -> LossScaledState:
        params = parameters_of(params)
        if settings.is_bare:
            inner_state = settings.optimizer.init(params)
        else:
            inner_state = init_inner(settings.optimizer, params)
            check_not_nested("inner", inner_state)
            inner_state = jax.tree.map(strengthen, inner_state)
        return LossScaledState(rule.init(), inner_state)

    def update(
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        grads_finite: jax.typing.ArrayLike | None = None,
        accept: jax.typing.ArrayLike | None = None,
        grads_unscaled: bool = are_unscaled,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        step = read(
            settings,
            updates,
            state,
            params,
            grads_finite=grads_finite,
            accept=accept,
            grads_unscaled=grads_unscaled,
            extra_args=extra_args,
        )
        verdict = judge(rule, step, axis_name, is_bare=settings.is_bare)
        return apply(settings, step, verdict)

    return optax.GradientTransformationExtraArgs(init, update)


class _Settings(NamedTuple):
    """The arguments of `loss_scaled`, checked.

    `is_link` says that there is no inner optimizer, but others may follow, and
    `is_bare` that the rule is `no_loss_scale`. This is asked once, because Equinox may
    copy the functions of a rule.
    """

    optimizer: optax.GradientTransformationExtraArgs
    rule: LossScale
    first_state: LossScaleState
    axis_name: AxisName | None
    unscale_mask: Mask
    check_updates: bool
    warn_after: int | None
    is_link: bool
    is_bare: bool


def read(
    settings: _Settings,
    grads: optax.Updates,
    state: LossScaledState,
    params: optax.Params | None,
    *,
    grads_finite: jax.typing.ArrayLike | None,
    accept: jax.typing.ArrayLike | None,
    grads_unscaled: bool,
    extra_args: dict[str, Any],
) -> Step:
    """Checks what `update` is given, and restores the state of the loss scale."""
    rule, first_state = settings.rule, settings.first_state
    check_state(state, first_state)
    check_names(extra_args)
    is_unscaled = check_flag("grads_unscaled", grads_unscaled)
    loss_scale_state = _restore(state.loss_scale_state, first_state)
    check_params(params, grads)
    inner_params = parameters_of(params)
    if settings.is_bare:  # Nothing is a scaled gradient, and nothing is cast.
        was_usable, is_scaled = jnp.asarray(True), False
    else:
        loss_scale_state, was_usable = repair_scale(loss_scale_state, rule)
        is_scaled = flags_of(settings.unscale_mask, grads)
        inner_params = wide_params(inner_params, state.inner_state)
        warn_of_scaling(
            grads,
            params,
            state.loss_scale_state,
            rule,
            is_scaled=is_scaled,
            is_unscaled=is_unscaled,
        )
    scale = loss_scale_state.loss_scale
    return Step(
        grads=gradients_of(inner_params, grads),
        is_scaled=is_scaled,
        divisor=jnp.ones_like(scale) if is_unscaled else scale,
        loss_scale_state=loss_scale_state,
        was_usable=was_usable,
        inner_state=state.inner_state,
        params=inner_params,
        original_params=params,
        grads_finite=check_bool("grads_finite", grads_finite),
        accept=check_bool("accept", accept),
        extra_args=extra_args,
    )


def apply(
    settings: _Settings, step: Step, verdict: Verdict | None
) -> tuple[optax.Updates, LossScaledState]:
    """Runs the inner optimizer, and discards what it returns if the step is skipped."""
    update, inner_state = settings.optimizer.update, step.inner_state
    if verdict is None:  # As if the inner optimizer stood alone.
        updates, new = update(step.grads, inner_state, step.params, **step.extra_args)
        updates = with_zeros(updates, step.original_params)
        return updates, LossScaledState(step.loss_scale_state, new)
    grads = divide_out(step.grads, step.divisor, step.is_scaled)
    # Positive zeros would be shared with those that a scatter in the backward pass
    # starts from, and XLA would store them.
    grads = mask_inputs(verdict.is_applied, grads, negative_zeros=True)
    extra_args = mask_inputs(verdict.is_applied, step.extra_args)

    def run() -> tuple[optax.Updates, optax.OptState]:
        updates, new = update(grads, inner_state, step.params, **extra_args)
        if settings.is_bare:
            return updates, new
        if not settings.is_link:  # The optimizers after a link need all the bits.
            updates = _round_for_float8(updates, step.original_params)
        return updates, cast_like(new, inner_state)

    if settings.check_updates and settings.rule.skips:
        updates, new = run()
        is_pair = isinstance(updates, optax.LookaheadParams)  # Of two such trees.
        parts = updates if is_pair else (updates,)
        checked = [where_true(step.is_scaled, part) for part in parts]
        updates_finite = is_finite(checked, None, settings.axis_name)
        verdict = reject_unless(updates_finite, verdict, step.loss_scale_state)
        updates, new = mask_results(verdict.is_applied, updates, new, inner_state)
    else:
        updates, new = run_masked(verdict.is_applied, run, inner_state)
    updates = with_zeros(updates, step.original_params)
    loss_scale_state = count_step(step.loss_scale_state, *verdict)
    if settings.warn_after is not None:
        loss_scale_state = with_stall_warning(loss_scale_state, settings.warn_after)
    return updates, LossScaledState(loss_scale_state, new)


def _round_for_float8(
    updates: optax.Updates, params: optax.Params | None
) -> optax.Updates:
    """Rounds updates of float8 parameters, to which JAX does not add float32."""
    if not any(is_float8(param) for param in jax.tree.leaves(params)):
        return updates

    def round_update(update: PyTree, param: PyTree) -> PyTree:
        is_rounded = is_float8(param) and not is_absent(update)
        return jnp.asarray(update).astype(param.dtype) if is_rounded else update

    return jax.tree.map(round_update, updates, params, is_leaf=is_absent)


def adopt_inner_state(
    inner_state: optax.OptState, loss_scale: LossScale | None = None
) -> LossScaledState:
    """Makes the state of `loss_scaled(inner)` from a state of `inner` alone.

    Use it to continue a run that was saved without loss scaling. To drop loss scaling
    again, keep `opt_state.inner_state`.

        adopt_inner_state(m, loss_scale) = LossScaledState(loss_scale.init(), m)

    First restore what was saved into a target of `inner` alone, and adopt it then.
    `flax.training.checkpoints` restores it into a loss-scaled target without an error,
    with moments and counts of zero. A whole `TrainState` and an `nnx.Optimizer` become

        state.replace(tx=tx, opt_state=adopt_inner_state(state.opt_state))
        optimizer.opt_state = optimizer.opt_state._replace(inner_state=old.opt_state)

    where `tx` is loss-scaled, `optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)`,
    and `old` is the restored optimizer.

    If the parameters are in half precision, so is a state that was saved without loss
    scaling. First cast it to the dtypes that `loss_scaled` uses:

        new = loss_scaled(inner, loss_scale).init(params).inner_state
        inner_state = jax.tree.map(lambda m, n: m.astype(n.dtype), inner_state, new)

    Args:
      inner_state: State of the inner optimizer.
      loss_scale: The rule that `loss_scaled` is given. None is `dynamic_loss_scale()`.

    Returns:
      A `LossScaledState` with the rule's first scale.

    Raises:
      TypeError: If `loss_scale` is not a `LossScale`, or `inner_state` is a whole
        `TrainState` or belongs to an `nnx.Optimizer`.
      ValueError: If `inner_state` is loss-scaled itself.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> optimizer = optax.adam(1e-3)
      >>> saved = optimizer.init(jnp.ones(2))
      >>> ols.get_loss_scale(ols.adopt_inner_state(saved))
      Array(32768., dtype=float32)
    """
    check_not_nested("inner_state", inner_state)
    is_sam = isinstance(inner_state, optax.contrib.SAMState)  # It has a field so named.
    if hasattr(inner_state, "opt_state") and not is_sam:
        raise TypeError(
            "`inner_state` must be the state of an optimizer, got a "
            f"{type(inner_state).__name__}. (Did you mean its `opt_state`?)"
        )
    if any(map(is_wrapped, jax.tree.leaves(inner_state, is_leaf=is_wrapped))):
        raise TypeError(
            "`inner_state` must hold arrays, got NNX variables. (Write `optimizer = "
            "nnx.Optimizer(model, loss_scaled(inner), wrt=nnx.Param)`, and "
            "`optimizer.opt_state = optimizer.opt_state._replace(inner_state=...)`.)"
        )
    return LossScaledState(check_rule(loss_scale).init(), inner_state)


def _restore(state: LossScaleState, first: LossScaleState) -> LossScaleState:
    """Makes arrays, in the dtypes of the first state, of what a checkpoint restored."""

    def restore(new: jax.ShapeDtypeStruct, old: PyTree) -> jax.Array:
        array = as_array(old, new.dtype)
        # If only sizes differ, the rule knows better what to say.
        if array.ndim != new.ndim:
            raise ValueError(
                "every array in the state of a loss scale must have as many axes as at "
                f"first, got shape {array.shape} instead of {new.shape}. (If it holds "
                "an entry for each device or ensemble member, call `update` under "
                "`vmap`, `pmap` or `shard_map`.)"
            )
        return array

    restored: LossScaleState = jax.tree.map(restore, first, state)
    return restored
