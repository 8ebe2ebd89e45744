"""Objects of `flax.nnx`, which a function may change in place."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from optax_lossscale._ground.types import PyTree

# Flax is never imported here: without it there are no such objects.


def flax_nnx() -> Any:
    """The module `flax.nnx`, or None if nobody has imported it."""
    return sys.modules.get("flax.nnx")


def is_nnx(node: object) -> bool:
    """Whether a node is a module or a state."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(
        node, (getattr(nnx, "Pytree", nnx.Module), nnx.State, nnx.Variable)
    )


def is_state(node: object) -> bool:
    """Whether a node is a state, from which `nnx.merge` makes modules."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(node, nnx.State)


def is_variable(node: object) -> bool:
    """Whether a node is a variable, which wraps an array."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(node, nnx.Variable)


def is_module(node: object) -> bool:
    """Whether a node is an object that a call may change in place."""
    return is_nnx(node) and not is_state(node)


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """Leaves and structure of a tree, with modules and states as leaves."""
    if flax_nnx() is None:
        return jax.tree.flatten(tree)
    seen: dict[type, bool] = {}  # Flax's own `isinstance` is slow.

    def is_leaf(node: Any) -> bool:
        if type(node) not in seen:
            seen[type(node)] = is_nnx(node)
        return seen[type(node)]

    return jax.tree.flatten(tree, is_leaf=is_leaf)


def leaves_of(tree: PyTree) -> list[Any]:
    """The leaves of a tree, with modules and states as leaves."""
    return flatten(tree)[0]


def modules_of(tree: PyTree) -> list[Any]:
    """All modules in a tree, apart from the variables of states."""
    leaves = leaves_of(tree)
    one_of_each = {type(leaf): leaf for leaf in leaves}  # To test each takes long.
    kinds = {kind for kind, leaf in one_of_each.items() if is_module(leaf)}
    return [leaf for leaf in leaves if type(leaf) in kinds]


def map_leaves(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """The tree with `function(leaf)` in place of each of `leaves_of(tree)`."""
    return jax.tree.map(function, tree, is_leaf=is_nnx)


def states_of(tree: PyTree) -> PyTree:
    """The tree with the state of each module in its place, which shares its variables.

    Variables that stand alone are left as they are.
    """

    def state_of(leaf: Any) -> Any:
        has_state = is_module(leaf) and not is_variable(leaf)
        return flax_nnx().state(leaf) if has_state else leaf

    return map_leaves(state_of, tree)


def updated(tree: PyTree, states: PyTree) -> PyTree:
    """The tree with `states` in it, modules and variables changed in place."""

    def update(node: PyTree, state: PyTree) -> PyTree:
        if not is_module(node):
            return state
        flax_nnx().update(node, state)
        return node

    return jax.tree.map(update, tree, states, is_leaf=is_nnx)


@contextlib.contextmanager
def explain_changes() -> Iterator[None]:
    """Says what to do where Flax refuses to change a module, in place of Flax's error.

    Flax lets a module be changed only by what was given it as an argument.
    """
    errors: Any = sys.modules.get("flax.errors")
    refused = () if errors is None else errors.TraceContextError
    try:
        yield
    except refused as error:
        raise ValueError(
            "A module of `flax.nnx` would be changed where it is not an argument, say "
            "its batch statistics or its dropout count, and the change would be lost. "
            "Pass the module as an argument: `ols.autocast(lambda model, x: ...)"
            "(model, x)`, and in the same way to each transformation around it, such "
            "as `nnx.jit` or `nnx.grad`."
        ) from error


def wrt_of(state: PyTree) -> Any:
    """The variables that an `nnx.Optimizer` trains; `nnx.Param` for any other state."""
    nnx = flax_nnx()
    if nnx is None:
        return None
    wrt = state.wrt if isinstance(state, nnx.Optimizer) else nnx.Param
    return tuple(wrt) if isinstance(wrt, list) else wrt


def value_and_grad_of_modules(
    fun: Callable[..., Any], argnums: Any, wrt: Any, args: PyTree, **nnx_kwargs: Any
) -> Callable[..., Any]:
    """`nnx.value_and_grad` with respect to the variables that `wrt` selects.

    It may select more, from which `nnx.Optimizer.update` picks.
    """
    nnx = flax_nnx()

    def select(argnum: Any) -> Any:
        if isinstance(argnum, nnx.DiffState):
            return argnum
        argnum = argnum + len(args) if argnum < 0 else argnum
        if wrt is nnx.Param:  # As by default.
            return argnum
        is_alike = argnum >= len(args) or _selects_alike(args[argnum], wrt)
        return nnx.DiffState(argnum, wrt if is_alike else nnx.Param)

    is_one = not isinstance(argnums, tuple)
    selected = select(argnums) if is_one else tuple(map(select, argnums))
    transformed: Callable[..., Any]
    try:
        transformed = nnx.value_and_grad(fun, argnums=selected, **nnx_kwargs)
    except ValueError:  # Without graphs NNX selects nothing.
        transformed = nnx.value_and_grad(fun, argnums=argnums, **nnx_kwargs)
    return transformed


def _selects_alike(arg: PyTree, wrt: Any) -> bool:
    """Whether a filter selects the same of an argument and of each module in it.

    A filter may look at paths, and NNX shows it those from each module on.
    """
    nnx = flax_nnx()
    if is_module(arg):
        return True
    selected = [nnx.state(m, wrt) for m in modules_of(arg) if not is_variable(m)]
    only_modules = map_leaves(lambda leaf: leaf if is_module(leaf) else None, arg)
    whole = nnx.state(only_modules, wrt)
    return len(jax.tree.leaves(selected)) == len(jax.tree.leaves(whole))


def split_state(
    state: PyTree, wrt: Any
) -> tuple[PyTree | None, Callable[[PyTree | None], PyTree]]:
    """The variables of a state that `wrt` selects, and a function that adds the rest.

    None if it selects nothing.
    """
    nnx = flax_nnx()
    trained, rest = nnx.split_state(state, wrt, ...)

    def merge(trained: PyTree) -> PyTree:
        # Flax lets a function change only variables that were made in its own trace.
        fixed = jax.tree.map(lambda leaf: leaf, rest)
        return fixed if trained is None else nnx.merge_state(trained, fixed)

    return trained if jax.tree.leaves(trained) else None, merge
