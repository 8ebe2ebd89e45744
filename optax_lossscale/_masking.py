"""Run an inner update so that a bad step changes nothing.

Selects before the update, so that the inner optimizer never sees a NaN or an
infinity; selects of what comes out of it, so that nothing of what it did remains.
Always selects, never `lax.cond`: under `shard_map` its branches diverge silently when
devices disagree (https://github.com/jax-ml/jax/issues/40823).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util

from optax_lossscale._state import PyTree
from optax_lossscale._tree import is_floating, map_floating


def mask_inputs(finite: jax.Array, tree: PyTree) -> PyTree:
    """Replaces every floating leaf by zeros on a bad step."""
    return map_floating(_zeros_unless, tree, finite)


@jax.jit  # Here and below: one call where it is not part of a program.
def _zeros_unless(leaves: list[jax.Array], finite: jax.Array) -> list[jax.Array]:
    return [lax.select_n(finite, lax.full_like(leaf, 0), leaf) for leaf in leaves]


def mask_results(
    finite: jax.Array, updates: PyTree, new: PyTree, old: PyTree
) -> tuple[PyTree, PyTree]:
    """On a bad step, replaces updates by zeros and the new state by the old one."""
    return mask_updates(finite, updates), mask_state(finite, new, old)


@jax.jit
def mask_updates(finite: jax.Array, updates: PyTree) -> PyTree:
    """Replaces updates on a bad step by zeros that leave every bit of a parameter."""

    def select(update: jax.Array) -> jax.Array:
        nothing = lax.full_like(update, 0)
        if is_floating(update):
            nothing = -nothing  # A parameter of -0.0 plus 0.0 would be 0.0.
        return lax.select_n(finite, nothing, update)

    return jax.tree.map(select, updates)


@jax.jit
def mask_state(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Keeps the old state on a bad step."""

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        sharding = jax.typeof(new).sharding
        if not sharding.mesh.empty and jax.typeof(old).sharding != sharding:
            # On an explicit mesh a select wants both alike. The new one is as the
            # bare optimizer leaves it.
            old = jax.sharding.reshard(old, sharding)
        return jnp.where(finite, new, old)

    return jax.tree.map(select, new, old)


def cast_like(new: PyTree, old: PyTree) -> PyTree:
    """Gives every array of the new state the dtype that it has in the old one."""

    def cast(new: PyTree, old: PyTree) -> PyTree:
        dtype = getattr(old, "dtype", None)
        return new if dtype is None or dtype == new.dtype else new.astype(dtype)

    return jax.tree.map(cast, new, old)


def run_masked(
    finite: jax.Array, run: Callable[[], tuple[PyTree, PyTree]], old: PyTree
) -> tuple[PyTree, PyTree]:
    """`mask_results` of an update that is still to be run, without copying the state.

    Updates are computed from the new state. If that is masked only once they are, they
    read the unmasked one, which XLA computes once more from the old, and so has to copy
    the old before it writes the masked over it: on a CPU, moments twice over. Under
    `jit` each array of the state is therefore masked in flight: where it is computed,
    so that whatever follows reads the masked one. On a good step that is the same, and
    of a bad one nothing is kept.

    Args:
      finite: `bool[]`.
      run: The update: takes nothing, returns updates and the new state. It is traced
        by itself, so it must not hand a traced value out in any other way.
      old: The state before.

    Returns:
      Updates and state, masked.
    """
    is_staged = isinstance(lax.full((), 0), jax.core.Tracer)  # As all is under jit.
    try:
        results = _run_in_flight(finite, run, old) if is_staged else None
    except Exception:  # How JAX writes programs down is its own affair, and may change.
        results = None
    return results or mask_results(finite, *run(), old)


def _run_in_flight(
    finite: jax.Array, run: Callable[[], tuple[PyTree, PyTree]], old: PyTree
) -> tuple[PyTree, PyTree] | None:
    structure = None

    def run_flat() -> list[PyTree]:
        nonlocal structure
        leaves, structure = jax.tree.flatten(run())
        return leaves

    closed = jax.make_jaxpr(run_flat)()
    program = closed.jaxpr
    if program.effects:
        return None  # What prints, or writes elsewhere, is run as it is.
    updates, new = jax.tree.unflatten(structure, program.outvars)
    shapes = {update.aval.shape for update in jax.tree.leaves(updates)}
    to_mask: dict[int, jax.Array] = {}

    def note(result: core.Var, old: jax.Array) -> None:
        # Only moments are worth it. Counts, and whatever else is small, are left for
        # the end: where a count stays at zero, a bias correction divides by zero.
        if is_floating(old) and jnp.shape(old) in shapes - {()}:
            to_mask.setdefault(id(result), old)

    jax.tree.map(note, new, old)
    values: dict[Any, Any] = dict(zip(program.constvars, closed.consts, strict=True))
    masked: dict[int, jax.Array] = {}

    def read(atom: core.Var | core.Literal) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in program.eqns:
        outputs = evaluate(equation, [read(atom) for atom in equation.invars])
        for variable, value in zip(equation.outvars, outputs, strict=True):
            values[variable] = value
            before = to_mask.get(id(variable))
            if before is not None and _alike(before, value):
                selected = lax.select_n(finite, before, value)
                # The next equations are written for one of the same kind.
                if _alike(selected, value):
                    values[variable] = selected
                    masked[id(variable)] = before

    def mask_rest(result: core.Var, old: jax.Array) -> PyTree:
        # A variable may be in two places of the state, and is masked for the first.
        is_masked = masked.get(id(result)) is old
        return read(result) if is_masked else mask_state(finite, read(result), old)

    updates = mask_updates(finite, jax.tree.map(read, updates))
    return updates, jax.tree.map(mask_rest, new, old)


def _alike(one: jax.Array, other: jax.Array) -> bool:
    """Whether shape, dtype, sharding and the axes that they vary over are the same."""
    return bool(jax.typeof(one) == jax.typeof(other))


def evaluate(
    equation: core.JaxprEqn,
    inputs: Sequence[Any],
    params: dict[str, Any] | None = None,
) -> Sequence[Any]:
    """The outputs of one equation of a traced program, under its own names."""
    params = equation.params if params is None else params
    bind_params = equation.primitive.get_bind_params(params)
    # In JAX 0.7 the functions of a call come apart from its other parameters.
    functions, bind_params = (
        bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    )
    with context_of(equation):
        outputs = equation.primitive.bind(*functions, *inputs, **bind_params)
    return outputs if equation.primitive.multiple_results else [outputs]


@contextlib.contextmanager
def context_of(equation: core.JaxprEqn) -> Iterator[None]:
    """What an equation was written under: its names, its mesh, its settings."""
    source = equation.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with (
        source_info_util.user_context(source.traceback, name_stack=names),
        equation.ctx.manager,
    ):
        yield
