"""Objects of `flax.nnx`, which a function may change in place."""

import sys
from collections.abc import Sequence
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


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")
