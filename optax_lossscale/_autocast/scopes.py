"""Call a function with the variables of `flax.linen` modules among its results.

A linen module that is bound reads and writes the variables of its scope. What a traced
function writes there would leak out of the trace, so after the call the results of the
evaluation take its place.
"""

import sys
from collections.abc import Callable, Sequence
from types import CellType
from typing import Any

import jax

from optax_lossscale._nnx import one_of_each
from optax_lossscale._types import PyTree

_EMPTY = CellType()  # Of a variable that is not assigned yet.


def scopes_of(fun: Callable[..., PyTree], leaves: Sequence[Any]) -> list[Any]:
    """The root scopes of linen modules: some leaves, in a closure, around the call."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return []
    cells = [x for x in getattr(fun, "__closure__", None) or () if x != _EMPTY]
    closure = [cell.cell_contents for cell in cells]
    around = linen.module._context.module_stack[-1:]
    objects = [*leaves, *closure, *around]
    if not any(isinstance(x, linen.Module) for x in one_of_each(objects)):
        return []
    modules = [x for x in objects if isinstance(x, linen.Module)]
    scopes = [module.scope.root for module in modules if module.scope is not None]
    return list(dict.fromkeys(scopes))


def are_initializing(scopes: Sequence[Any]) -> bool:
    """Whether a module is making its parameters, which are not to be rounded."""
    return any(scope.get_flag("initializing", False) for scope in scopes)


def call_with_variables(
    call: Callable[..., PyTree],
    scopes: Sequence[Any],
    fun: Callable[..., PyTree],
    args: PyTree,
    kwargs: PyTree,
) -> PyTree:
    """Returns `fun(*args, **kwargs)`, evaluated by `call`.

    The scopes take the variables that `fun` writes.
    """
    old = list(map(_variables_of, scopes))

    def with_variables(*args: Any, **kwargs: Any) -> tuple[PyTree, list[PyTree]]:
        results = fun(*args, **kwargs)
        return results, list(map(_variables_of, scopes))

    new = old
    try:
        results, new = call(with_variables, args, kwargs)
    finally:
        for scope, variables in zip(scopes, new, strict=True):
            _assign(scope._variables, {**_fixed_of(scope), **variables})
    return results


def _variables_of(scope: Any) -> dict[str, Any]:
    """The collections of a scope that may change, copied."""
    names = filter(scope.is_mutable_collection, scope._variables)
    return {name: jax.tree.map(lambda x: x, scope._variables[name]) for name in names}


def _fixed_of(scope: Any) -> dict[str, Any]:
    """The other collections, which are read only."""
    collections = scope._variables.items()
    return {k: v for k, v in collections if not scope.is_mutable_collection(k)}


def _assign(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Makes a nested dict equal to another one, in place."""
    for name in set(old) - set(new):
        del old[name]
    for name, value in new.items():
        if old.get(name) is value:
            continue
        if isinstance(old.get(name), dict) and isinstance(value, dict):
            _assign(old[name], value)
        else:
            old[name] = value
