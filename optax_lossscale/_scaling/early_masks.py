"""Mask arrays of an update as soon as they are computed, which saves copies on a CPU.

Nothing here changes a result: `run_masked` could mask the results of the whole update,
which is what it does outside `jit`. Under `jit`, XLA on CPU would then copy the state,
and an update of AdamW would take several times as long. On a GPU or a TPU it makes no
difference (`benchmarks/optimizations.py` has the figures).
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.masking import keep_old_unless, mask_results, zero_unless

# From gradients, state and parameters to updates and the new state.
Update: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def run_masked(
    is_applied: jax.Array, run: Update, grads: PyTree, old: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs an update and masks its results, without copying the state.

    Reference: `mask_results(is_applied, *run(grads, old, params), old)`.

    An optimizer computes its updates from its new moments. If the moments are masked
    only afterwards, the updates need the unmasked moments while the masked ones are
    written, and XLA on CPU copies the old moments for that. So under `jit` each moment
    is masked as soon as it is computed, and everything that follows reads the masked
    one. If the step is good this is the same value; if it is skipped, everything that
    follows is discarded anyway. The same is done with the updates.

    Args:
      is_applied: `bool[]`. False if the step is skipped.
      run: The update of an optimizer. It is traced by itself, so it must not leak a
        traced value.
      grads: The gradients.
      old: The state before the update.
      params: The parameters, or None.

    Returns:
      Updates and state, masked.
    """
    if _is_traced():
        return _run_masked_early(is_applied, run, grads, old, params)
    return mask_results(is_applied, *run(grads, old, params), old)


def _is_traced() -> bool:
    """Whether operations are staged into a program."""
    return isinstance(lax.full((), 0), jax.core.Tracer)


def _run_masked_early(
    is_applied: jax.Array, run: Update, grads: PyTree, old: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """`run_masked` under `jit`, with early masks.

    The reference is traced as a jitted function, which is called with its equations in
    another order. Evaluating them one by one would take almost as long as tracing them.
    The order of side effects must not change, so an update that has any is called as it
    is.
    """

    @jax.jit
    def update(
        is_applied: jax.Array, grads: PyTree, old: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        updates, new = run(grads, old, params)
        return zero_unless(is_applied, updates), keep_old_unless(is_applied, new, old)

    args = is_applied, grads, old, params
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)
    calls = closed.jaxpr.eqns
    # If `jax.jit` is disabled, or JAX writes down its call in another way.
    if [call.params.get("name") for call in calls] != ["update"]:
        return update(*args)
    (call,) = calls
    inner = call.params["jaxpr"]
    structure = jax.tree.structure(shapes)
    if not closed.effects:
        early = _masked_arrays(*jax.tree.unflatten(structure, inner.jaxpr.outvars))
        inner = inner.replace(jaxpr=_masked_early(inner.jaxpr, *early))
    call = call.replace(params=call.params | {"jaxpr": inner})
    program = closed.replace(jaxpr=closed.jaxpr.replace(eqns=[call]))
    outputs = core.jaxpr_as_fun(program)(*jax.tree.leaves(args))
    return jax.tree.unflatten(structure, outputs)


def _masked_arrays(updates: PyTree, new: PyTree) -> tuple[set[core.Var], set[core.Var]]:
    """The variables of the masked moments, and of the masked updates.

    Moments are arrays of the state that have the shape of an update. Masking the rest
    early saves nothing, and must not happen to a count: if a skipped first step left it
    at zero, a bias correction would divide by zero, and `jax_debug_nans` would raise.
    """
    shapes = {update.aval.shape for update in jax.tree.leaves(updates)} - {()}

    def arrays(tree: PyTree) -> set[core.Var]:
        return {
            variable
            for variable in jax.tree.leaves(tree)
            if variable.aval.shape in shapes
            and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
        }

    return arrays(new), arrays(updates)


def _masked_early(
    program: core.Jaxpr, moments: set[core.Var], updates: set[core.Var]
) -> core.Jaxpr:
    """Masks arrays right after they are computed, and lets the rest read those.

    Updates are masked early too, because `master_weights` computes its state from them.
    If both read the same masked array, XLA for TPU computes them in one kernel.
    """
    constants: list[core.JaxprEqn] = []
    computed: list[core.JaxprEqn] = []
    for equation in program.eqns:
        is_constant = all(isinstance(atom, core.Literal) for atom in equation.invars)
        (constants if is_constant else computed).append(equation)
    given = {*program.invars, *program.constvars}
    given |= {variable for equation in constants for variable in equation.outvars}
    selects = [each for each in computed if each.primitive is lax.select_n_p]
    masks: dict[core.Var, core.JaxprEqn] = {}
    for results in (moments, updates):
        for equation in selects:
            unmasked = _masked_by(equation, results, given)
            # An array that is returned twice has two masks. The second is moved; the
            # first stays where it is, and reads what the second has masked.
            if unmasked is not None:
                masks[unmasked] = equation
    moved = set(map(id, masks.values()))
    equations = [each for each in computed if id(each) not in moved]

    ordered = constants
    masked: dict[int, core.Var] = {}  # By identity, since a literal has no hash.
    for equation in equations:
        if any(id(atom) in masked for atom in equation.invars):
            invars = [masked.get(id(atom), atom) for atom in equation.invars]
            equation = equation.replace(invars=invars)
        ordered.append(equation)
        for variable in equation.outvars:
            if variable in masks:
                ordered.append(masks[variable])
                (masked[id(variable)],) = masks[variable].outvars
    return program.replace(eqns=ordered)


def _masked_by(
    equation: core.JaxprEqn, results: set[core.Var], given: set[core.Var]
) -> core.Var | None:
    """The variable that an equation masks, if it may do so as soon as that is known."""
    if equation.outvars[0] not in results:
        return None
    *others, new = equation.invars
    if isinstance(new, core.Literal) or new in given:
        return None
    are_given = all(isinstance(atom, core.Literal) or atom in given for atom in others)
    # Later equations rely on the type.
    has_same_type = new.aval == equation.outvars[0].aval
    return new if are_given and has_same_type else None
