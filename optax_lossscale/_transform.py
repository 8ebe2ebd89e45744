"""Loss scaling around any Optax optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._checks import as_optimizer, static_flag
from optax_lossscale._finite import AxisName, is_finite, largest_magnitude
from optax_lossscale._masking import (
    cast_like,
    mask_inputs,
    mask_results,
    run_masked,
)
from optax_lossscale._rules import (
    LossScale,
    dynamic_loss_scale,
    hold,
    no_loss_scale,
)
from optax_lossscale._state import (
    LossScaledState,
    PyTree,
    find_loss_scale_states,
    holds_masters,
    is_usable,
)
from optax_lossscale._tree import (
    Mask,
    check_structure,
    resolve_mask,
    unscale,
    where_true,
    wide_param,
)


def loss_scaled(
    inner: optax.GradientTransformation | optax.MultiSteps | None = None,
    loss_scale: LossScale | None = None,
    *,
    axis_name: AxisName | None = None,
    unscale_mask: Mask = None,
    check_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for gradients of a scaled loss.

    With scaled gradients `g`, loss scale `s` and inner state `m`, one step is

        g = unscale(g, s)
        finite = all_finite(g)
        u, m' = inner.update(finite ? g : 0, m)
        updates = finite ? u : 0
        m = finite ? m' : m
        s = adjust(s, finite)

    so a nonfinite step, anywhere, on any device, leaves the parameters and the
    whole inner state bitwise as they were: moments, counts, schedules (but XLA on CPU
    flushes subnormal parameters in any addition). A finite step does what the inner
    optimizer alone does with the unscaled gradients: bitwise op by op; under `jit` up
    to a few ulp, as XLA may contract multiply-adds differently. The state keeps its
    structure, dtypes and shardings, so `jit`, `lax.scan` and donation work as without
    it. What lives elsewhere, such as batch statistics, is yours to select, by
    `find_loss_scale_state(opt_state).last_finite`. A scale that is none, such as a zero
    or a NaN from a damaged checkpoint, is a skip too, whatever the rule, which then
    goes on from its first scale.

    Updates, and the gradients and parameters that the inner optimizer sees, are
    float32 or wider, whatever the dtype of the parameters, and so is its state: with
    float16 ones no dtype changes; make masks and labels by dtype outside.
    `optax.apply_updates` rounds to the parameters' dtypes, Equinox's does not.
    Functions that read the inner optimizer's state take `opt_state.inner_state`.

    What clips, decays or accumulates goes inside, where gradients are unscaled:
    `loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))`,
    `loss_scaled(optax.MultiSteps(...))`. Outside, one NaN would poison a
    `MultiSteps` for ever.

    Args:
      inner: The optimizer: anything with pure `init` and `update`. None is
        `optax.identity()`, which makes a link for `optax.chain`: gradients are
        unscaled, and zero on a bad step. A link cannot stop the optimizers after
        it from moving on a bad step (weight decay, momentum, counts), so it is not a
        skip: prefer to wrap.
      loss_scale: The rule. None is `dynamic_loss_scale()`. With a rule that does not
        skip, no gradient is checked; with `no_loss_scale()`, the program is the inner
        optimizer's own.
      axis_name: Name, or several, of the axes of `pmap` or `shard_map` over
        which all devices shall agree to skip; none under `jit` with sharded arrays.
        Only the verdict crosses devices; gradients are never reduced for you.
      unscale_mask: As Optax's masks, a pytree of bools that is a prefix of the
        gradients, or a function from them to one: True where leaves are scaled
        gradients. The others are neither unscaled nor checked; on a bad step their
        update is zero like all others.
      check_updates: Also skip a step whose gradients are finite but whose updates
        are not, and count it; the scale is left alone. Without effect where the rule
        does not skip.

    Returns:
      A `GradientTransformationExtraArgs` with a `LossScaledState`. Its `update` also
      takes `grads_finite`, a `bool[]`: an outside verdict, and-ed into its own, such
      as `jnp.isfinite(loss)`; without effect where the rule does not skip. Further
      extra arguments go to the inner optimizer (their floating leaves zero on a bad
      step); a gradient among them must be unscaled: `grad=unscale(grads, opt_state)`
      for a line search.

    Raises:
      TypeError: If `inner` is no optimizer, `loss_scale` no `LossScale`, or
        `check_updates` or `grads_finite` no bool.
      ValueError: From `init`, if `inner` is loss-scaled itself. From `update`, at trace
        time: if the state is not one of this kind of rule, the gradients' tree is not
        that of the parameters, or `grads_finite` is not a scalar.

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

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740); `torch.amp.GradScaler`;
      `optax.apply_if_finite`, from which it departs: nonfinite updates are never
      applied, however many there are in a row.
    """
    optimizer = as_optimizer("inner", optax.identity() if inner is None else inner)
    rule = _as_rule(loss_scale)
    rule_structure = jax.tree.structure(jax.eval_shape(rule.init))
    check_updates = static_flag("check_updates", check_updates)
    is_bare = rule == no_loss_scale()

    def init(params: optax.Params) -> LossScaledState:
        if is_bare:
            return LossScaledState(rule.init(), optimizer.init(params))
        inner_state = optimizer.init(jax.tree.map(wide_param, params))
        _check_not_nested("inner", inner_state)
        return LossScaledState(rule.init(), jax.tree.map(_strengthen, inner_state))

    def update(
        grads: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        grads_finite: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        _check_state(state, rule_structure)
        loss_scale_state, inner_state = state
        if is_bare:
            updates, state = optimizer.update(grads, inner_state, params, **extra_args)
            return updates, LossScaledState(loss_scale_state, state)

        if params is not None:
            fast = isinstance(params, optax.LookaheadParams)
            message = "`grads` must have the tree structure of `params`"
            check_structure(grads, params.fast if fast else params, message)
            if not holds_masters(inner_state):  # They are rounded to these dtypes.
                params = jax.tree.map(wide_param, params)
        mask = resolve_mask(unscale_mask, grads)
        leaves = (where_true(mask, grads), _as_leaf(grads_finite))
        is_sound = is_usable(loss_scale_state.loss_scale)
        loss_scale = jnp.where(
            is_sound, loss_scale_state.loss_scale, rule.init().loss_scale
        )
        loss_scale_state = loss_scale_state._replace(loss_scale=loss_scale)
        finite, *largest = _judge(rule, leaves, loss_scale, axis_name)
        finite &= is_sound
        largest = [jnp.where(is_sound, magnitude, jnp.inf) for magnitude in largest]
        adjusted = rule.adjust(loss_scale_state, finite, *largest)
        grads = unscale(grads, loss_scale_state, mask=mask)
        keep = finite if rule.skips else is_sound
        grads, extra_args = mask_inputs(keep, (grads, extra_args))

        def run() -> tuple[optax.Updates, optax.OptState]:
            updates, new = optimizer.update(grads, inner_state, params, **extra_args)
            return updates, cast_like(new, inner_state)

        if rule.skips and check_updates:
            updates, updated = run()
            updates_finite = is_finite(where_true(mask, updates), None, axis_name)
            held = hold(loss_scale_state, grads_finite=False)
            adjusted = optax.tree.where(finite & ~updates_finite, held, adjusted)
            finite &= updates_finite
            updates, updated = mask_results(finite, updates, updated, inner_state)
        else:
            updates, updated = run_masked(keep, run, inner_state)
        return updates, LossScaledState(adjusted, updated)

    return optax.GradientTransformationExtraArgs(init, update)


def adopt_inner_state(
    inner_state: optax.OptState, loss_scale: LossScale | None = None
) -> LossScaledState:
    """Makes the state of `loss_scaled(inner)` from one that was saved without it.

        adopt_inner_state(m, loss_scale) = LossScaledState(loss_scale.init(), m)

    The way back is `.inner_state`. What was saved of half-precision parameters is in
    half precision too: first give it the dtypes of a new one,

        new = loss_scaled(inner, loss_scale).init(params).inner_state
        inner_state = jax.tree.map(lambda m, n: m.astype(n.dtype), inner_state, new)

    Args:
      inner_state: State of the bare optimizer.
      loss_scale: The rule, the same as for `loss_scaled`. None is
        `dynamic_loss_scale()`.

    Returns:
      A `LossScaledState`, at the start of its rule.

    Raises:
      TypeError: If `loss_scale` is no `LossScale`.
      ValueError: If `inner_state` is loss-scaled itself.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> optimizer = optax.adam(1e-3)
      >>> saved = optimizer.init(jnp.ones(2))
      >>> ols.get_loss_scale(ols.adopt_inner_state(saved))
      Array(32768., dtype=float32)
    """
    _check_not_nested("inner_state", inner_state)
    return LossScaledState(_as_rule(loss_scale).init(), inner_state)


def _as_rule(loss_scale: LossScale | None) -> LossScale:
    rule = dynamic_loss_scale() if loss_scale is None else loss_scale
    if not isinstance(rule, LossScale):
        raise TypeError(
            f"`loss_scale` must be a LossScale, got {rule!r} of type "
            f"{type(rule).__name__}. (Did you mean `static_loss_scale(...)`?)"
        )
    return rule


def _strengthen(leaf: PyTree) -> PyTree:
    """A leaf of the first inner state, strongly typed as those of later ones are."""
    return leaf.astype(leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _check_not_nested(name: str, inner_state: PyTree) -> None:
    if find_loss_scale_states(inner_state):
        raise ValueError(
            f"`{name}` must not be loss-scaled itself: its gradients would be unscaled "
            "twice."
        )


def _check_state(state: LossScaledState, rule_structure: PyTree) -> None:
    is_state = isinstance(state, LossScaledState)
    if not is_state or jax.tree.structure(state.loss_scale_state) != rule_structure:
        raise ValueError(
            "`state` must be a LossScaledState of this optimizer's own rule, got "
            f"{state.loss_scale_state.rule_state if is_state else type(state)}. (One "
            "of another rule: `adopt_inner_state(state.inner_state, loss_scale)`.)"
        )


def _as_leaf(grads_finite: jax.typing.ArrayLike | None) -> jax.Array | None:
    """An outside verdict as one more leaf, so that it costs no reduction of its own."""
    if grads_finite is None:
        return None
    if not jnp.issubdtype(jnp.result_type(grads_finite), bool):  # NaN would be True.
        raise TypeError(
            f"`grads_finite` must be a bool, got {grads_finite!r}. (Did you mean "
            "`jnp.isfinite(loss)`?)"
        )
    if jnp.shape(grads_finite) != ():
        raise ValueError(
            f"`grads_finite` must be a scalar, got shape {jnp.shape(grads_finite)}. "
            "(Did you mean `all_finite(...)`?)"
        )
    return jnp.where(grads_finite, 0.0, jnp.inf)


def _judge(
    rule: LossScale, leaves: PyTree, loss_scale: jax.Array, axis_name: AxisName | None
) -> tuple[jax.Array, ...]:
    """What `rule.adjust` shall know of the gradients; first, whether all is finite."""
    if rule.needs_grads_max:
        grads_max = largest_magnitude(leaves, loss_scale, axis_name)
        return jnp.isfinite(grads_max), grads_max
    if rule.skips:
        return (is_finite(leaves, loss_scale, axis_name),)
    return (jnp.asarray(True),)
