"""Objects of `flax.nnx`, which a function may change in place."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from optax_lossscale._types import PyTree

# Flax is never imported here: without it there are no such objects.


def states_of(tree: PyTree) -> list[PyTree]:
    """The states of all modules in a tree."""
    return [_nnx().state(module) for module in modules_of(tree)]


def update_modules(tree: PyTree, states: Sequence[PyTree]) -> None:
    """Updates all modules in a tree, in the order of `states_of`."""
    for module, state in zip(modules_of(tree), states, strict=True):
        _nnx().update(module, state)


def is_nnx(node: object) -> bool:
    """Whether a node is a module or a state."""
    return is_module(node) or is_state(node)


def is_state(node: object) -> bool:
    """Whether a node is a state, from which `nnx.merge` makes modules."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.State)


def modules_of(tree: PyTree) -> list[Any]:
    """All modules in a tree."""
    if _nnx() is None:
        return []
    leaves = jax.tree.leaves(tree, is_leaf=is_nnx)
    return [leaf for leaf in leaves if is_module(leaf)]


def is_module(node: object) -> bool:
    """Whether a node is an object that a call may change in place."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, getattr(nnx, "Pytree", nnx.Module))


def wrt_of(state: PyTree) -> Any:
    """The variables that an `nnx.Optimizer` trains; `nnx.Param` for any other state."""
    nnx = _nnx()
    if nnx is None:
        return None
    return state.wrt if isinstance(state, nnx.Optimizer) else nnx.Param


def value_and_grad_of_modules(
    argnums: int | Sequence[int], wrt: Any
) -> Callable[..., Callable[..., Any]]:
    """`nnx.value_and_grad` with respect to some of the variables of each module."""
    nnx = _nnx()

    def select(argnum: Any) -> Any:
        is_default = isinstance(argnum, nnx.DiffState) or wrt is nnx.Param
        return argnum if is_default else nnx.DiffState(argnum, wrt)

    if isinstance(argnums, Iterable):
        selected = tuple(map(select, argnums))
    else:
        selected = select(argnums)
    return functools.partial(nnx.value_and_grad, argnums=selected)


def split_state(state: PyTree, wrt: Any) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The variables of a state that `wrt` selects, and a function that adds the rest.

    A state without such variables, such as one of plain arrays, is returned whole.
    """
    nnx = _nnx()
    trained, rest = nnx.split_state(state, wrt, ...)
    if not jax.tree.leaves(trained):
        return state, lambda state: state

    def merge(trained: PyTree) -> PyTree:
        # Flax lets a function change only variables that were made in its own trace.
        return nnx.merge_state(trained, jax.tree.map(lambda leaf: leaf, rest))

    return trained, merge


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")
