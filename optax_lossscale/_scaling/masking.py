"""Keep what lives outside the optimizer unchanged when a step is skipped."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._ground.nnx import states_of, update_in_place
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.tree import find_by_type, is_numeric, is_wrapped
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.state import find_loss_scale_state


def where_applied(state: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Keeps `new` if the last step was applied, and `old` if it was skipped.

        where(find_loss_scale_state(state).last_finite, new, old)

    Use it after `update`, for what a step changes outside the optimizer and a skipped
    step should not change, such as batch statistics, a target network or an average of
    the parameters.

    An NNX model is changed in place, so `old` must be a copy from before the step:

        old = nnx.clone(model)
        loss, grads = scaled_value_and_grad(loss_fn, optimizer)(model, x, y)
        optimizer.update(model, grads)
        where_applied(optimizer, model, old)

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/batch_statistics_and_dropout.html

    Args:
      state: What `update` returned, or any pytree that holds exactly one
        `LossScaleState`.
      new: A pytree of arrays of any shape and dtype. Leaves that are neither arrays nor
        numbers are returned as they are. NNX modules and variables in it are changed in
        place: after a skipped step they have their old values again.
      old: A pytree of the same structure and shapes.

    Returns:
      A pytree like `new`, with the same NNX modules.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several (the message says how
        to pick one), if `new` holds one, if `new` and `old` differ in structure,
        or if they share an `nnx.Variable`, whose old value is then lost.
      TypeError: If `new` and `old` differ in shape.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scaled(optax.sgd(0.1))
      >>> mean, bad_mean = jnp.zeros(1), jnp.array([jnp.nan])
      >>> _, opt_state = tx.update(jnp.array([jnp.nan]), tx.init(mean))
      >>> ols.where_applied(opt_state, bad_mean, mean)
      Array([0.], dtype=float32)
    """
    applied = find_loss_scale_state(state).last_finite
    if find_by_type(new, LossScaleState):
        raise ValueError(
            "`new` must not hold the loss scale, which has to change when a step is "
            "skipped. (Pass only what lives outside the optimizer, such as "
            "`train_state.batch_stats`.)"
        )

    new_states, old_states = states_of(new), states_of(old)
    if _variables_in(new_states) & _variables_in(old_states):
        raise ValueError(
            "`new` and `old` must not share an `nnx.Variable`, whose old value is "
            "lost. (Make `old` before the step, with `nnx.clone`.)"
        )

    def select(new: PyTree, old: PyTree) -> PyTree:
        return keep_old_unless(applied, new, old) if is_numeric(new) else new

    return update_in_place(new, jax.tree.map(select, new_states, old_states))


def _variables_in(tree: PyTree) -> set[int]:
    """The identities of all wrapped arrays."""
    nodes = jax.tree.leaves(tree, is_leaf=is_wrapped)
    return {id(node) for node in nodes if is_wrapped(node)}


@jax.jit  # So that outside `jit` it is one dispatch.
def mask_results(
    applied: jax.Array, updates: PyTree, new: PyTree, old: PyTree
) -> tuple[PyTree, PyTree]:
    """If the step is skipped, zeroes the updates and keeps the old state."""
    return zero_unless(applied, updates), keep_old_unless(applied, new, old)


def zero_unless(applied: jax.Array, updates: PyTree) -> PyTree:
    """If the step is skipped, -0.0, so that no bit of a parameter changes."""
    zeros: dict[Any, jax.Array] = {}  # One of each type, since tracing takes time.

    def select(update: jax.Array) -> jax.Array:
        kind = jax.typeof(update)
        if kind not in zeros:
            zero = complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
            zeros[kind] = lax.full_like(update, zero)
        return lax.select_n(applied, zeros[kind], update)

    return jax.tree.map(select, updates)


def keep_old_unless(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """If the step is skipped, the old state, in the dtypes of the new one."""

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        new, old = jnp.asarray(new), jnp.asarray(old)
        old = old if old.dtype == new.dtype else old.astype(new.dtype)
        return lax.select_n(applied, old, new)

    return jax.tree.map(select, new, old)
