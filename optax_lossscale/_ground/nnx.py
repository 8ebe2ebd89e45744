"""Objects of `flax.nnx`, which a function may change in place."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_lossscale._ground.types import PyTree

# Flax is never imported here: without it there are no such objects.


def flax_nnx() -> Any:
    """The module `flax.nnx`, or None if nobody has imported it."""
    return sys.modules.get("flax.nnx")


def is_nnx(node: object) -> bool:
    """Whether a node is a module, a variable or a state."""
    kind: Any = type(node)
    return _is_nnx_type(kind)


@functools.cache  # Flax's own `issubclass` is slow.
def _is_nnx_type(kind: Any) -> bool:
    nnx = flax_nnx()
    return nnx is not None and issubclass(kind, (nnx.Pytree, nnx.State, nnx.Variable))


def is_state(node: object) -> bool:
    """Whether a node is a state, from which `nnx.merge` makes modules."""
    return is_nnx(node) and isinstance(node, flax_nnx().State)


def is_variable(node: object) -> bool:
    """Whether a node is a variable, which wraps an array."""
    return is_nnx(node) and isinstance(node, flax_nnx().Variable)


def is_module(node: object) -> bool:
    """Whether a node is an object that a call may change in place."""
    return is_nnx(node) and not is_state(node)


def flatten(tree: PyTree) -> tuple[list[Any], Any]:
    """Leaves and structure of a tree, with modules and states as leaves."""
    return jax.tree.flatten(tree, is_leaf=is_nnx)


def leaves_of(tree: PyTree) -> list[Any]:
    """The leaves of a tree, with modules and states as leaves."""
    return flatten(tree)[0]


def modules_of(tree: PyTree) -> list[Any]:
    """All modules in a tree, apart from the variables of states."""
    return list(filter(is_module, leaves_of(tree)))


def map_leaves(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """The tree with `function(leaf)` in place of each of `leaves_of(tree)`."""
    return jax.tree.map(function, tree, *rest, is_leaf=is_nnx)


def states_of(tree: PyTree) -> PyTree:
    """The tree with the state of each module in its place, which shares its variables.

    Variables that stand alone are left as they are.
    """

    def state_of(leaf: Any) -> Any:
        has_state = is_module(leaf) and not is_variable(leaf)
        return flax_nnx().state(leaf) if has_state else leaf

    return map_leaves(state_of, tree)


def update_in_place(tree: PyTree, states: PyTree) -> PyTree:
    """The tree with `states` in it, modules and variables changed in place."""

    def update(node: PyTree, state: PyTree) -> PyTree:
        if not is_module(node):
            return state
        flax_nnx().update(node, state)
        return node

    return map_leaves(update, tree, states)


def value_and_grad_of_modules(
    fun: Callable[..., Any],
    argnums: Any,
    state: PyTree,
    args: Sequence[PyTree],
    **nnx_kwargs: Any,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` by the variables that an `nnx.Optimizer` trains.

    Any other state, such as its `opt_state`, does not know them: then by `nnx.Param`.
    """
    nnx = flax_nnx()

    def select(argnum: Any) -> Any:
        if not isinstance(state, nnx.Optimizer) or isinstance(argnum, nnx.DiffState):
            return argnum
        wrt = tuple(state.wrt) if isinstance(state.wrt, list) else state.wrt
        return nnx.DiffState(argnum % len(args), wrt)

    is_one = not isinstance(argnums, tuple)
    selected = select(argnums) if is_one else tuple(map(select, argnums))
    return nnx.value_and_grad(fun, argnums=selected, **nnx_kwargs)
