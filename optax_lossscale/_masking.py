"""Run an inner update so that a skipped step changes nothing; where_applied.

The gradients are masked before the update, so that the inner optimizer never sees a NaN
or an infinity. The results are masked after it, so that nothing of a skipped step
remains. Masks are selects and never `lax.cond`, whose branches diverge silently under
`shard_map` if devices disagree (https://github.com/jax-ml/jax/issues/40823).
"""

import cmath
import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from optax_lossscale._jaxprs import evaluate
from optax_lossscale._state import find_loss_scale_state, with_arrays
from optax_lossscale._tree import (
    dtype_of,
    is_floating,
    is_floating_array,
    is_numeric,
    is_wrapped,
    map_floating,
    unwrapped,
)
from optax_lossscale._types import PyTree


def mask_inputs(is_applied: jax.Array, tree: PyTree) -> PyTree:
    """Replaces every floating array by zeros if the step is skipped.

    A finite Python number stays the number that it is, for which an optimizer may ask
    by `if`. One that is not finite is masked as an array is.
    """
    return map_floating(_zeros_unless, tree, is_applied, is_mapped=_is_masked)


def _is_masked(leaf: object) -> bool:
    if isinstance(leaf, float | complex):
        return not cmath.isfinite(leaf)
    # A `jax.ShapeDtypeStruct` has no entries.
    return is_floating_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct)


@jax.jit  # Here and below, so that outside `jit` it is one dispatch.
def _zeros_unless(leaves: list[jax.Array], is_applied: jax.Array) -> list[jax.Array]:
    return [lax.select_n(is_applied, lax.full_like(leaf, 0), leaf) for leaf in leaves]


def mask_results(
    is_applied: jax.Array, updates: PyTree, new: PyTree, old: PyTree
) -> tuple[PyTree, PyTree]:
    """If the step is skipped, zeroes the updates and keeps the old state."""
    return mask_updates(is_applied, updates), mask_state(is_applied, new, old)


@jax.jit
def mask_updates(is_applied: jax.Array, updates: PyTree) -> PyTree:
    """If the step is skipped, zeroes updates, so that no bit of a parameter changes."""

    def select(update: jax.Array) -> jax.Array:
        # -0.0 + 0.0 is 0.0, but -0.0 + -0.0 is -0.0. Converted and not negated, because
        # float8 dtypes without a negative zero have NaN there.
        zero = complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
        nothing = lax.full_like(update, zero if is_floating(update) else 0)
        return lax.select_n(is_applied, nothing, update)

    return jax.tree.map(select, updates)


@jax.jit
def mask_state(is_applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Keeps the old state if the step is skipped."""
    return jax.tree.map(lambda *arrays: _keep(is_applied, *arrays), new, old)


def _keep(is_applied: jax.Array, new: PyTree, old: PyTree) -> jax.Array:
    """One array of the new state if the step is applied, else of the old state."""
    sharding = jax.typeof(new).sharding
    if not sharding.mesh.empty and jax.typeof(old).sharding != sharding:
        # On an explicit mesh a select needs equal shardings. The result is sharded as
        # the bare optimizer's would be.
        old = jax.sharding.reshard(old, sharding)
    return jnp.where(is_applied, new, old)


def where_applied(state: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Keeps `new` if the last step was applied, and `old` if it was skipped.

        where(find_loss_scale_state(state).last_finite, new, old)

    Use it after `update`, for what a step changes outside the optimizer and a skipped
    step should not change, such as batch statistics or a target network.

    In NNX, `nnx.state` returns the live variables, so `old` must be a copy:

        old = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
        loss, grads = scaled_value_and_grad(loss_fn, optimizer)(model, x, y)
        optimizer.update(model, grads)
        new = nnx.state(model, nnx.BatchStat)
        nnx.update(model, where_applied(optimizer, new, old))

    Args:
      state: What `update` returned, or any pytree that holds exactly one
        `LossScaleState`.
      new: A pytree of arrays of any shape and dtype. Leaves that are no arrays are
        returned as they are.
      old: A pytree of the same structure and shapes.

    Returns:
      A pytree like `new`.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several (the message says how
        to pick one), if `new` and `old` differ in structure or shape, or if they share
        an `nnx.Variable`, whose old value is then lost.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scaled(optax.sgd(0.1))
      >>> mean, bad_mean = jnp.zeros(1), jnp.array([jnp.nan])
      >>> _, opt_state = tx.update(jnp.array([jnp.nan]), tx.init(mean))
      >>> ols.where_applied(opt_state, bad_mean, mean)
      Array([0.], dtype=float32)
    """
    is_applied = with_arrays(find_loss_scale_state(state)).last_finite
    if _variables(new) & _variables(old):
        raise ValueError(
            "`old` must be a copy, got variables that `new` holds too, so their old "
            "values are lost. (Before the step: `old = jax.tree.map(jnp.copy, "
            "nnx.state(model, nnx.BatchStat))`.)"
        )

    def select(new: PyTree, old: PyTree) -> PyTree:
        if not is_numeric(new):
            return new
        new, old = unwrapped(new), unwrapped(old)
        if old is None or jnp.shape(new) != jnp.shape(old):
            got = "None" if old is None else jnp.shape(old)
            raise ValueError(
                "`new` and `old` must have the same structure and shapes, got "
                f"{jnp.shape(new)} and {got}."
            )
        if (dtype := dtype_of(new)) is not None and dtype != dtype_of(old):
            old = jnp.asarray(old).astype(dtype)
        # A state may have an entry for each device or ensemble member.
        axes = range(is_applied.ndim, max(jnp.ndim(new), is_applied.ndim))
        return _keep(lax.expand_dims(is_applied, axes), new, old)

    return jax.tree.map(select, new, old)


def _variables(tree: PyTree) -> set[int]:
    """The identities of all wrapped arrays in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=is_wrapped)
    return {id(node) for node in nodes if is_wrapped(node)}


def cast_like(new: PyTree, old: PyTree) -> PyTree:
    """Casts every array of the new state to the dtype that it has in the old state."""

    def cast(new: PyTree, old: PyTree) -> PyTree:
        dtype = dtype_of(old)
        is_like = dtype is None or dtype == dtype_of(new)
        return new if is_like else jnp.asarray(new).astype(dtype)

    return jax.tree.map(cast, new, old)


def run_masked(
    is_applied: jax.Array, run: Callable[[], tuple[PyTree, PyTree]], old: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs an update and masks its results, without copying the state.

    Reference: `mask_results(is_applied, *run(), old)`.

    An optimizer computes its updates from its new moments. If the moments are masked
    only afterwards, the updates need the unmasked moments while the masked ones are
    written, and XLA on CPU copies the old moments for that. So under `jit` each moment
    is masked as soon as it is computed, and everything that follows reads the masked
    one. If the step is good this is the same value; if it is skipped, everything that
    follows is discarded anyway.

    Args:
      is_applied: `bool[]`. False if the step is skipped.
      run: The update: a function without arguments that returns the updates and the new
        state. It is traced by itself, so it must not leak a traced value.
      old: The state before the update.

    Returns:
      Updates and state, masked.
    """
    results = None
    if _is_traced():
        # If anything fails, the reference runs, and raises the optimizer's own errors.
        # That guards against changes of JAX's internals.
        with contextlib.suppress(Exception):
            results = _run_masked_early(is_applied, run, old)
    if results is None:
        results = mask_results(is_applied, *run(), old)
    return results


def _is_traced() -> bool:
    """Whether operations are staged into a program, as under `jit`."""
    return isinstance(lax.full((), 0), jax.core.Tracer)


def _run_masked_early(
    is_applied: jax.Array, run: Callable[[], tuple[PyTree, PyTree]], old: PyTree
) -> tuple[PyTree, PyTree] | None:
    """`run_masked`, equation by equation; None if the update has side effects."""
    closed, shapes = jax.make_jaxpr(run, return_shape=True)()
    program = closed.jaxpr
    if program.effects:
        return None
    updates, new = jax.tree.unflatten(jax.tree.structure(shapes), program.outvars)
    moments = _moments(updates, new, old)
    values: dict[Any, Any] = dict(zip(program.constvars, closed.consts, strict=True))
    masked: set[core.Var] = set()

    def read(atom: core.Var | core.Literal) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    def mask(variable: core.Var, value: Any) -> Any:
        before = moments.get(variable)
        if before is None or not _same_type(before, value):
            return value
        selected = lax.select_n(is_applied, before, value)
        if not _same_type(selected, value):  # Later equations rely on the type.
            return value
        masked.add(variable)
        return selected

    for equation in program.eqns:
        outputs = evaluate(equation, [read(atom) for atom in equation.invars])
        for variable, value in zip(equation.outvars, outputs, strict=True):
            values[variable] = mask(variable, value)

    def finish(atom: core.Var | core.Literal, old: jax.Array) -> PyTree:
        # A variable that fills two places of the state was masked with the old value of
        # one of them only, so the other place is masked here.
        is_variable = isinstance(atom, core.Var)
        is_masked = is_variable and atom in masked and moments[atom] is old
        return read(atom) if is_masked else mask_state(is_applied, read(atom), old)

    updates = mask_updates(is_applied, jax.tree.map(read, updates))
    return updates, jax.tree.map(finish, new, old)


def _moments(updates: PyTree, new: PyTree, old: PyTree) -> dict[core.Var, jax.Array]:
    """Maps the variable of each new moment to the old moment.

    Moments are arrays of the state that have the shape of an update. Masking the rest
    early saves nothing, and must not happen to a count: if a skipped first step left it
    at zero, a bias correction would divide by zero, and `jax_debug_nans` would raise.
    """
    shapes = {update.aval.shape for update in jax.tree.leaves(updates)} - {()}
    moments: dict[core.Var, jax.Array] = {}

    def note(atom: core.Var | core.Literal, old: jax.Array) -> None:
        is_moment = is_floating(old) and jnp.shape(old) in shapes
        if is_moment and isinstance(atom, core.Var):
            moments.setdefault(atom, old)

    jax.tree.map(note, new, old)
    return moments


def _same_type(one: jax.Array, other: jax.Array) -> bool:
    """Whether shape, dtype, sharding and varying axes are the same."""
    return bool(jax.typeof(one) == jax.typeof(other))
