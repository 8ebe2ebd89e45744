"""Objects of `flax.nnx`, which a function may change in place."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from optax_lossscale._types import PyTree

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


def is_module(node: object) -> bool:
    """Whether a node is an object that a call may change in place."""
    return is_nnx(node) and not is_state(node)


def leaves_of(tree: PyTree) -> list[Any]:
    """The leaves of a tree, with modules and states as leaves."""
    nnx = flax_nnx()
    if nnx is None:
        return jax.tree.leaves(tree)
    seen: dict[type, bool] = {}  # Flax's own `isinstance` is slow.

    def is_leaf(node: Any) -> bool:
        if type(node) not in seen:
            seen[type(node)] = is_nnx(node)
        return seen[type(node)]

    return jax.tree.leaves(tree, is_leaf=is_leaf)


def modules_of(tree: PyTree) -> list[Any]:
    """All modules in a tree, apart from the variables of states."""
    return list(filter(is_module, leaves_of(tree)))


def map_modules(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """The tree with `function(module)` in place of each of `modules_of(tree)`."""

    def of_leaf(leaf: Any) -> Any:
        return function(leaf) if is_module(leaf) else leaf

    return jax.tree.map(of_leaf, tree, is_leaf=is_nnx)


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
