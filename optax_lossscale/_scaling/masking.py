"""Masks, so that a skipped step changes nothing; where_applied.

The gradients are masked before the update, so that the inner optimizer never sees a NaN
or an infinity. The results are masked after it, so that nothing of a skipped step
remains. Masks are selects and never `lax.cond`, whose branches diverge silently under
`shard_map` if devices disagree (https://github.com/jax-ml/jax/issues/40823).
"""

import cmath
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import PyTreeDef

from optax_lossscale._ground.nnx import states_of, updated
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.tree import (
    dtype_of,
    find_by_type,
    is_floating,
    is_floating_array,
    is_numeric,
    map_floating,
    unwrapped,
    wrapped_in,
)
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.state import find_loss_scale_state, with_arrays


def mask_inputs(
    is_applied: jax.Array, tree: PyTree, *, negative_zeros: bool = False
) -> PyTree:
    """Replaces every floating array by zeros if the step is skipped.

    A finite Python number stays the number that it is, for which an optimizer may ask
    by `if`. One that is not finite is masked as an array is.
    """
    zeros_unless = partial(_zeros_unless, negative=negative_zeros)
    return map_floating(zeros_unless, tree, is_applied, is_mapped=_is_masked)


def _is_masked(leaf: object) -> bool:
    if isinstance(leaf, float | complex):
        return not cmath.isfinite(leaf)
    # A `jax.ShapeDtypeStruct` has no entries.
    return is_floating_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct)


# Jitted, here and below, so that outside `jit` it is one dispatch.
@partial(jax.jit, static_argnames="negative")
def _zeros_unless(
    leaves: list[jax.Array], is_applied: jax.Array, *, negative: bool
) -> list[jax.Array]:
    zero = -0.0 if negative else 0.0
    return [
        lax.select_n(is_applied, lax.full_like(leaf, zero), leaf) for leaf in leaves
    ]


@jax.jit
def mask_results(
    is_applied: jax.Array, updates: PyTree, new: PyTree, old: PyTree
) -> tuple[PyTree, PyTree]:
    """If the step is skipped, zeroes the updates and keeps the old state."""
    return mask_updates(is_applied, updates), mask_state(is_applied, new, old)


def mask_updates(is_applied: jax.Array, updates: PyTree) -> PyTree:
    """If the step is skipped, zeroes updates, so that no bit of a parameter changes."""

    def select(update: jax.Array) -> jax.Array:
        # -0.0 + 0.0 is 0.0, but -0.0 + -0.0 is -0.0. Converted and not negated, because
        # float8 dtypes without a negative zero have NaN there.
        zero = complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
        nothing = lax.full_like(update, zero)
        return lax.select_n(is_applied, nothing, update)

    # Each has a zero of its own. XLA would shard one zero for all arrays of a shape in
    # one way, and move it to those that are sharded in another.
    return jax.tree.map(select, updates)


def mask_state(is_applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Keeps the old state if the step is skipped."""

    def keep(new: jax.Array, old: PyTree) -> jax.Array:
        if _becomes_floating(new, old):
            old = jnp.asarray(old).astype(new.dtype)
        return _keep(is_applied, new, old)

    return jax.tree.map(keep, new, _with_added(new, old))


def _becomes_floating(new: PyTree, old: PyTree) -> bool:
    """Whether an update makes a floating array of bools or integers.

    `optax.measure_with_ema` does so with what it averages, which a cast back would
    round.
    """
    return is_floating(new) and not is_floating(old)


def _with_added(new: PyTree, old: PyTree) -> PyTree:
    """The old state, with zeros for what only the new state holds.

    `optax.monitor` holds no measurements before its first update.
    """
    structure: PyTreeDef = jax.tree.structure(new)
    if structure == jax.tree.structure(old):
        return old
    leaves = jax.tree_util.tree_leaves_with_path(old)
    known = dict(leaves)
    if len(known) < len(leaves):  # A node of your own gives all its leaves one key.
        raise ValueError(
            "the state of `inner` must keep its structure, got another one, whose "
            "arrays have no paths of their own."
        )
    added = jax.tree_util.tree_map_with_path(
        lambda path, leaf: known.pop(path) if path in known else jnp.zeros_like(leaf),
        new,
    )
    if known:
        lost = ", ".join(jax.tree_util.keystr(path) for path in known)
        raise ValueError(
            "the state of `inner` must hold after each update what it held before, got "
            f"one without {lost}."
        )
    return added


def _keep(is_applied: jax.Array, new: PyTree, old: PyTree) -> jax.Array:
    """One array of the new state if the step is applied, else of the old state."""
    kind = jax.typeof(new)
    if jax.typeof(old) == kind and jnp.ndim(is_applied) == 0:
        return lax.select_n(is_applied, old, new)
    if not kind.sharding.mesh.empty:
        # On an explicit mesh a select needs equal shardings. The result is sharded as
        # the bare optimizer's would be.
        old = jax.sharding.reshard(old, kind.sharding)
    return jnp.where(is_applied, new, old)


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

    Args:
      state: What `update` returned, or any pytree that holds exactly one
        `LossScaleState`.
      new: A pytree of arrays of any shape and dtype. Leaves that are not arrays
        are returned as they are. NNX modules and variables in it are changed in place:
        after a skipped step they have their old values again.
      old: A pytree of the same structure and shapes.

    Returns:
      A pytree like `new`, with the same NNX modules.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several (the message says how
        to pick one), if `new` holds one, if `new` and `old` differ in structure or
        shape, or if they share an `nnx.Variable`, whose old value is then lost.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scaled(optax.sgd(0.1))
      >>> mean, bad_mean = jnp.zeros(1), jnp.array([jnp.nan])
      >>> _, opt_state = tx.update(jnp.array([jnp.nan]), tx.init(mean))
      >>> ols.where_applied(opt_state, bad_mean, mean)
      Array([0.], dtype=float32)
    """
    is_applied = with_arrays(find_loss_scale_state(state)).last_finite
    if find_by_type(new, LossScaleState):
        raise ValueError(
            "`new` must not hold the loss scale, which has to change when a step is "
            "skipped. (Pass only what lives outside the optimizer, such as "
            "`train_state.batch_stats`.)"
        )
    states = states_of(new), states_of(old)
    if set.intersection(*map(wrapped_in, states)):
        raise ValueError(
            "`old` must be a copy, got variables that `new` holds too, so their old "
            "values are lost. (Before the step: `old = nnx.clone(model)`, or of a "
            "state `old = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))`.)"
        )

    def select(new: PyTree, old: PyTree) -> PyTree:
        if not is_numeric(new):
            return new
        new, old = unwrapped(new), unwrapped(old)
        if old is None or jnp.shape(new) != jnp.shape(old):
            got = "None" if old is None else jnp.shape(old)
            raise ValueError(f"{jnp.shape(new)} and {got}.")
        if jnp.shape(new)[: is_applied.ndim] != is_applied.shape:
            members = f"a state of {is_applied.shape} members"
            raise ValueError(f"{jnp.shape(new)}, not led by {members}.")
        if (dtype := dtype_of(new)) is not None and dtype != dtype_of(old):
            old = jnp.asarray(old).astype(dtype)
        # A state may have an entry for each device or ensemble member.
        axes = range(is_applied.ndim, jnp.ndim(new))
        return _keep(lax.expand_dims(is_applied, axes), new, old)

    try:
        selected = jax.tree.map(select, *states)
    except ValueError as error:
        raise ValueError(
            f"`new` and `old` must have the same structure and shapes, got {error} "
            "(To `new=model` belongs `old=nnx.clone(model)`. What `sow` has added is "
            "removed by `nnx.pop(model, nnx.Intermediate)`.)"
        ) from error
    return updated(new, selected)


def cast_like(new: PyTree, old: PyTree) -> PyTree:
    """Casts every array of the new state to the dtype that it has in the old state."""

    def cast(new: PyTree, old: PyTree) -> PyTree:
        dtype = dtype_of(old)
        is_like = dtype is None or dtype == dtype_of(new)
        is_like |= _becomes_floating(new, old)
        return new if is_like else jnp.asarray(new).astype(dtype)

    return jax.tree.map(cast, new, _with_added(new, old))
