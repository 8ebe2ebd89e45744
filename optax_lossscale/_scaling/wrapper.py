"""Loss scaling around any Optax optimizer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale._ground.checks import (
    check_flag,
    check_optimizer,
    check_verdict,
)
from optax_lossscale._ground.parameters import gradients_of, parameters_of, with_zeros
from optax_lossscale._ground.states import (
    LossScaledState,
    MasterWeightsState,
    NoLossScaleRuleState,
)
from optax_lossscale._ground.tree import (
    find_by_type,
    flags_of,
    keep_marked,
    strengthen,
    widen,
)
from optax_lossscale._ground.types import AxisName, Mask
from optax_lossscale._scaling.early_masks import run_masked
from optax_lossscale._scaling.finite import (
    is_finite,
    largest_magnitude,
    on_all_devices,
)
from optax_lossscale._scaling.masking import mask_results, zero_unless
from optax_lossscale._scaling.mistakes import (
    check_arguments,
    check_dtypes,
    check_inner_state,
    check_not_nested,
    check_rule,
    check_state,
    warn_of_half_parameters,
    warn_of_scaling,
)
from optax_lossscale._scaling.rules import LossScale, count_step
from optax_lossscale._scaling.scale import unscale_marked


def loss_scaled(
    inner: optax.GradientTransformation | optax.MultiSteps | None = None,
    loss_scale: LossScale | None = None,
    *,
    axis_name: AxisName | None = None,
    unscale_mask: Mask = None,
    check_updates: bool = False,
    grads_unscaled: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it takes the gradients of a scaled loss.

    Use `tx = loss_scaled(optimizer)` in place of the optimizer, and give `tx.update`
    the gradients of `scaled_value_and_grad`. With scaled gradients `g`, loss scale `s`
    and inner state `m`, a step is

        g = unscale(g, s);  finite = all_finite(g)
        u, m' = inner.update(finite ? g : 0, m)
        updates, m = finite ? (u, m') : (0, m);  s = adjust(s, finite)

    A skipped step changes no bit of parameters and inner state. It prints nothing, so
    call `raise_if_stalled(opt_state)` now and then. State elsewhere, such as batch
    statistics, is not protected: keep it with `where_applied`. Clipping, weight decay
    and accumulation go inside. The gradients, parameters and moments inside, and the
    updates, are float32 or wider (under `no_loss_scale`, as they are without this
    wrapper).

    Guide: https://optax-lossscale.github.io/optax_lossscale/quick_start.html

    Args:
      inner: The optimizer. (None makes a link for `optax.chain`, which only zeroes the
        gradients of a bad step: the links after it still decay weights and count.)
      loss_scale: The rule. None is `dynamic_loss_scale()`.
      axis_name: The axis of `pmap`, `vmap` or `shard_map`, or a tuple of axes, whose
        devices skip a step together. Without it their parameters may drift apart. Leave
        it out under `jit` with sharded arrays. Gradients are never reduced.
      unscale_mask: A pytree of bools that is a prefix of the gradients, or a function
        that makes one from them. Where it is False, nothing is unscaled or checked.
      check_updates: Whether nonfinite updates skip a step too; the scale then stays.
        (A rule that never skips does so neither for these nor for `grads_finite`.)
      grads_unscaled: The default of the argument of `update` with this name.

    Returns:
      A `GradientTransformationExtraArgs` with a `LossScaledState`. Its `update` passes
      extra arguments on to `inner`. If they hold gradients, these must be the true
      ones, such as `grad=unscale(grads, opt_state)` for a line search. It has three
      more:

      * `grads_finite`, `bool[]`, such as `jnp.isfinite(loss)`: beside the check, False
        means an overflow, too.
      * `accept`, `bool[]`, such as `loss < 3 * usual_loss`: False skips the step under
        every rule. The scale stays, unless the gradients overflow too.
      * `grads_unscaled`: True if you have called `unscale` on the gradients. A clip by
        value hides an infinity: check before it, and pass the result as `grads_finite`.

    Raises:
      TypeError: If an argument is of the wrong kind, or one of `update` is misspelt.
      ValueError: If `inner` is loss-scaled itself, or the state is of another rule.

    Warns:
      UserWarning: From `init`, if parameters in float16 have no masters. From `update`,
        if the same jitted function computed the gradients without the scale, or has
        unscaled them already. (It notices neither outside `jit`, nor across two
        jitted functions, nor under rules that may keep the scale, nor if the gradients
        depend on a float scalar that may be the scale, such as a weight of the loss.)

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
    rule = check_rule(loss_scale)
    optimizer = check_optimizer("inner", optax.identity() if inner is None else inner)
    checks_updates = check_flag("check_updates", check_updates) and rule.skips
    are_unscaled = check_flag("grads_unscaled", grads_unscaled)
    expected = jax.eval_shape(rule.init)
    is_bare = isinstance(expected.rule_state, NoLossScaleRuleState)

    def init(params: optax.Params) -> LossScaledState:
        check_dtypes(params)
        inner_params = parameters_of(params)
        if not is_bare:
            inner_params = jax.tree.map(widen, inner_params)
        inner_state = jax.tree.map(strengthen, optimizer.init(inner_params))
        check_not_nested("inner", inner_state)
        if inner is not None:  # Else the optimizer is another link of the chain.
            warn_of_half_parameters(params, inner_state)
        return LossScaledState(rule.init(), inner_state)

    def update(
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        grads_finite: ArrayLike | None = None,
        accept: ArrayLike | None = None,
        grads_unscaled: bool = are_unscaled,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        check_state(state, rule, expected)
        check_arguments(updates, params, extra_args)
        old, old_inner = state

        # Unscale. Under `no_loss_scale` nothing is scaled, and nothing is checked.
        grads = gradients_of(updates)
        scaled_mask = False if is_bare else flags_of(unscale_mask, updates)
        if not check_flag("grads_unscaled", grads_unscaled):
            warn_of_scaling(keep_marked(scaled_mask, grads), params, old)
        divisor = jnp.float32(1) if grads_unscaled else old.loss_scale
        grads = unscale_marked(grads, divisor, scaled_mask)

        # Check, and adjust the scale.
        told_finite = check_verdict("grads_finite", grads_finite, "jnp.isfinite(loss)")
        checked = keep_marked(scaled_mask, grads)
        if rule.needs_grads_max:
            grads_max = largest_magnitude(checked, axis_name, told_finite)
            finite = jnp.isfinite(grads_max)
            new = rule.adjust(old, finite, grads_max)
        else:
            finite = jnp.asarray(True)
            if rule.skips:
                finite = is_finite(checked, axis_name, told_finite)
            new = rule.adjust(old, finite)
        accepted = check_verdict("accept", accept, "loss < threshold")
        if accept is not None:
            accepted = on_all_devices(accepted, axis_name)
        applied = accepted & finite if rule.skips else accepted

        # Update. On a bad step the gradients are zeros, so that no NaN is seen, and the
        # results are masked. (`lax.cond` would diverge between devices, jax #40823.)
        may_skip = rule.skips or accept is not None
        if may_skip:
            grads = jax.jit(zero_unless)(applied, grads)  # One dispatch outside `jit`.
        inner_params = parameters_of(params)
        # `master_weights` must see which parameters are in half precision.
        if not (is_bare or find_by_type(old_inner, MasterWeightsState)):
            inner_params = jax.tree.map(widen, inner_params)
        run = functools.partial(optimizer.update, **extra_args)
        if checks_updates:
            # The verdict on the updates comes too late to mask anything early.
            new_updates, new_inner = run(grads, old_inner, inner_params)
            accepted &= is_finite(keep_marked(scaled_mask, new_updates), axis_name)
            applied &= accepted
            results = mask_results(applied, new_updates, new_inner, old_inner)
        elif may_skip:
            results = run_masked(applied, run, grads, old_inner, inner_params)
        else:
            results = run(grads, old_inner, inner_params)
        new_updates, new_inner = results

        # Count, which a rule of your own need not do. A rejected step keeps the scale,
        # unless it overflowed too.
        loss_scale, rule_state = optax.tree.where(
            accepted | ~finite,
            (new.loss_scale, new.rule_state),
            (old.loss_scale, old.rule_state),
        )
        counted = count_step(old, applied, loss_scale, rule_state)
        return with_zeros(new_updates, params), LossScaledState(counted, new_inner)

    return optax.GradientTransformationExtraArgs(init, update)


def adopt_inner_state(
    inner_state: optax.OptState, loss_scale: LossScale | None = None
) -> LossScaledState:
    """Makes the state of `loss_scaled(inner)` from a state of `inner` alone.

    Use it to continue a run that was saved without loss scaling. To drop loss scaling
    again, keep `opt_state.inner_state`.

        adopt_inner_state(m, loss_scale) = LossScaledState(loss_scale.init(), m)

    First restore what was saved into a target of `inner` alone, and adopt it then.
    `flax.training.checkpoints` restores it into a loss-scaled target without an error,
    with moments and counts of zero.

    If the parameters are in half precision, so is a state that was saved without loss
    scaling. First cast it to the dtypes that `loss_scaled` uses:

        new = loss_scaled(inner, loss_scale).init(params).inner_state
        inner_state = jax.tree.map(lambda m, n: m.astype(n.dtype), inner_state, new)

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/checkpoints.html

    Args:
      inner_state: State of the inner optimizer.
      loss_scale: The rule that `loss_scaled` is given. None is `dynamic_loss_scale()`.

    Returns:
      A `LossScaledState` with the rule's expected scale.

    Raises:
      TypeError: If `loss_scale` is not a `LossScale`, or `inner_state` is a whole
        `TrainState`, belongs to an `nnx.Optimizer`, or was restored without a target.
      ValueError: If `inner_state` is loss-scaled itself.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> optimizer = optax.adam(1e-3)
      >>> saved = optimizer.init(jnp.ones(2))
      >>> ols.get_loss_scale(ols.adopt_inner_state(saved))
      Array(32768., dtype=float32)
    """
    check_inner_state(inner_state)
    return LossScaledState(check_rule(loss_scale).init(), inner_state)
