"""Objects of `flax.nnx`, which a function may change in place."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def wrt_of(state: PyTree) -> Any:
    """The variables that an `nnx.Optimizer` trains; `nnx.Param` for any other state."""
    nnx = flax_nnx()
    if nnx is None:
        return None
    return state.wrt if isinstance(state, nnx.Optimizer) else nnx.Param


def value_and_grad_of_modules(
    argnums: int | Sequence[int], wrt: Any
) -> Callable[..., Callable[..., Any]]:
    """`nnx.value_and_grad` with respect to some of the variables of each module."""
    nnx = flax_nnx()

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
    nnx = flax_nnx()
    trained, rest = nnx.split_state(state, wrt, ...)
    if not jax.tree.leaves(trained):
        return state, lambda state: state

    def merge(trained: PyTree) -> PyTree:
        # Flax lets a function change only variables that were made in its own trace.
        return nnx.merge_state(trained, jax.tree.map(lambda leaf: leaf, rest))

    return trained, merge
