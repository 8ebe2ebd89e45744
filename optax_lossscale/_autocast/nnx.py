"""Objects of `flax.nnx`, which a function under autocast may change in place."""

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


def parts_of(tree: PyTree) -> list[Any]:
    """The leaves of a tree, with modules as leaves and without states."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: is_module(x) or _is_state(x))
    return [leaf for leaf in leaves if not _is_state(leaf)]


def modules_of(tree: PyTree) -> list[Any]:
    """All modules in a tree."""
    if _nnx() is None:
        return []
    return [part for part in parts_of(tree) if is_module(part)]


def is_module(node: object) -> bool:
    """Whether a node is an object that a call may change in place."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, getattr(nnx, "Pytree", nnx.Module))


def _modules_of(tree: PyTree) -> list[Any]:
    return [part for part in parts_of(tree) if is_module(part)]


def _is_state(node: object) -> bool:
    """Whether a node is a state, from which `nnx.merge` makes modules."""
    nnx = _nnx()
    return nnx is not None and isinstance(node, nnx.State)


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")
