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

    With scaled gradients `g`, loss scale `s` and inner state `m`, one step is

        g = unscale(g, s)
        finite = all_finite(g)
        u, m' = inner.update(finite ? g : 0, m)
        updates = finite ? u : 0
        m = finite ? m' : m
        s = adjust(s, finite)

    **Skipped steps.** A nonfinite gradient anywhere, on any device, leaves the
    parameters and the whole inner state bit-for-bit unchanged: moments, counts and
    schedules. (But on a CPU `apply_updates` flushes subnormal parameters.) State that
    lives elsewhere, such as batch statistics, is not protected: keep it
    with `where_applied(opt_state, new, old)`. The state tells under every rule, in
    `last_finite`, whether the last step was applied. An unusable scale (zero or NaN,
    say from a damaged checkpoint) skips the step under every rule that has one. The
    rule then goes on as after an overflow at its initial scale.

    Nothing is printed when a step is skipped. So call `raise_if_stalled(opt_state)` now
    and then, for example after each epoch.

    **Finite steps** give what the inner optimizer alone gives for the unscaled
    gradients: bit for bit outside `jit`, and up to a few ulp under `jit`, where XLA may
    contract multiply-adds differently. The state keeps its structure, dtypes and
    shardings, so `jit`, `lax.scan` and donation work as they do without the wrapper.

    **Dtypes.** The inner optimizer sees gradients and parameters in float32 or wider,
    whatever their own dtypes, and its state and the updates are float32 or wider too.
    If a mask or a label of the inner optimizer depends on the dtypes of the parameters,
    compute it from the original parameters and pass the result.
    `optax.apply_updates` rounds to the dtypes of the parameters; Equinox's
    `apply_updates` does not. Neither can add float32 to float8, so if `params` are
    passed, the updates of float8 parameters are rounded to their dtype. (With
    `inner=None` they are not, because they are gradients for further optimizers.)

    **Held fixed** are integers, bools, keys, strings and functions among the
    parameters, and Python floats in a module. The inner optimizer does not see them.
    Their updates are zeros if `optax.apply_updates` can add them, and None otherwise.

    **What goes inside.** Clipping, weight decay and accumulation need unscaled
    gradients, so wrap them too:

        loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
        loss_scaled(optax.MultiSteps(optax.adamw(1e-3), 4))

    A `MultiSteps` outside would keep a NaN forever. Nor should anything be outside that
    skips bad steps by itself, such as `optax.apply_if_finite`: it would hide them from
    the rule, so the scale would not back off. Functions that read the
    state of the inner optimizer take `opt_state.inner_state`. A state holds a learning
    rate only if the optimizer was made by `optax.inject_hyperparams`; for any other,
    `optax.tree.get(opt_state, "learning_rate")` returns None.

    Args:
      inner: The optimizer: anything with pure functions `init` and `update`. None is
        `optax.identity()`, which makes a link for `optax.chain`: it unscales the
        gradients, and zeroes them on a bad step. A link does not skip the step: the
        optimizers after it still run, and so do their weight decay, momentum and
        counts. Prefer to wrap the optimizer.
      loss_scale: The rule. None is `dynamic_loss_scale()`. With a rule that does not
        skip, nonfinite gradients reach the optimizer. With `no_loss_scale()`, the
        program is that of the inner optimizer alone.
      axis_name: The axis of `pmap`, `vmap` or `shard_map`, or a tuple of axes, over
        which devices share the verdict: if one of them has a nonfinite gradient, all
        skip the step. Leave it out under `jit` with sharded arrays. Only the verdict
        crosses devices. Gradients are never reduced for you.
      unscale_mask: Marks the scaled gradients, in the form of Optax's masks: a pytree
        of bools that is a prefix of the gradients, or a function that makes one from
        them. Leaves marked False are neither unscaled nor checked. On a bad step their
        updates are zero, like all others.
      check_updates: Whether to skip also a step whose gradients are finite but whose
        updates are not. The step is counted as skipped, and the scale stays as it is.
        Updates of leaves that `unscale_mask` marks False are not checked. It has no
        effect with a rule that does not skip.
      warn_after: In the step in which this many steps in a row have been skipped, at
        least 1, show a warning on the host, also from inside `lax.scan`. (`pmap` and
        `shard_map` give one for each device.) None never warns. It costs a callback in
        the compiled program, which cannot be exported then. `raise_if_stalled` costs
        nothing.
      grads_unscaled: What `update` takes for its argument of this name if it is not
        given. True is for gradients of `scaled_backward`, or of a trainer.

    Returns:
      A `GradientTransformationExtraArgs` with a `LossScaledState`. Its `update` has
      three more arguments, each by name only:

      * `grads_finite`, `bool[]`, such as `jnp.isfinite(loss)`: False means an overflow
        that the gradients do not show. The step is skipped and the scale backs off.
        (Without effect if the rule does not skip.)
      * `accept`, `bool[]`, such as `loss < 3 * usual_loss`: False means a batch that is
        not wanted. The step is skipped and counted, under every rule. The scale stays
        as it is, unless the gradients overflow too. (With `no_loss_scale()`, pass it in
        every step or in none: a step without it leaves the counts and `last_finite` as
        they were.)
      * `grads_unscaled`, True or False: whether you have called `unscale` on the
        gradients already, for example to clip them outside. They are checked and
        masked, and not unscaled again. A clip by value hides an infinity, so check
        before you clip, and pass the result as `grads_finite`.

      A Flax `TrainState` passes none of them on: call `train_state.tx.update` yourself.
      Further extra arguments go to the inner optimizer. Floating arrays among them are
      zero on a bad step, and so is a Python number that is NaN or infinite; any other
      number or object is passed on as it is. A gradient among them must be unscaled:
      `grad=unscale(grads, opt_state)` for a line search.

    Raises:
      TypeError: If `inner` is not an optimizer, `loss_scale` is not a `LossScale`, or
        `check_updates`, `grads_finite`, `accept` or `grads_unscaled` is not a bool.
        From `update`, if the name of one of these three is misspelt.
      ValueError: From `init`, if `inner` is loss-scaled itself. From `update`, while
        tracing, if the state belongs to another kind of rule, the gradients do not
        have the tree structure of the parameters, or `grads_finite` or `accept` is not
        a scalar.

    Warns:
      UserWarning: From `update`, while tracing, if the same jitted function computed
        the gradients without the loss scale of this state, multiplied by it twice, or
        has divided it out already, or has not where `grads_unscaled=True` says so.
        (Outside `jit`, and across two jitted functions, this is not seen.)
      RuntimeWarning: On the host, as `warn_after` says.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scaled(optax.sgd(0.5))
      >>> params = jnp.ones(2)
      >>> opt_state = tx.init(params)
      >>> grads = ols.scaled_grad(lambda x: (x**2).sum(), opt_state)(params)
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> optax.apply_updates(params, updates)
      Array([0., 0.], dtype=float32)
      >>> updates, opt_state = tx.update(grads * jnp.inf, opt_state, params)
      >>> bool((updates == 0).all()), float(ols.get_loss_scale(opt_state))
      (True, 16384.0)

      As with PyTorch's `unscale_`, clip the gradients between two calls:

      >>> grads = ols.unscale(jnp.array([3.0, 4.0]) * 16384, opt_state)
      >>> grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
      >>> updates, opt_state = tx.update(grads, opt_state, params, grads_unscaled=True)
      >>> updates
      Array([-0.3, -0.4], dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740); `torch.amp.GradScaler`;
      `optax.apply_if_finite`, from which it departs: nonfinite gradients never reach
      the optimizer, however many there are in a row.
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
        if is_no_loss_scale(rule):
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
        checked = where_true(step.is_scaled, updates)
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
    if hasattr(inner_state, "opt_state"):
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
