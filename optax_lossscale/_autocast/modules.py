"""Call a function with the states of its `flax.nnx` modules as arguments and results.

A call may change such a module in place, say its batch statistics. Nothing that is
traced can do that, so each module is taken apart before the call, put together inside
it and updated after it, as in the transformations of Flax itself.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import Partial

from optax_lossscale._autocast.arguments import are_same, call_unchanged
from optax_lossscale._nnx import (
    explain_changes,
    flax_nnx,
    is_variable,
    map_modules,
    modules_of,
)
from optax_lossscale._types import PyTree

_TAG = "optax_lossscale.autocast"
_SLOT = object()  # Stands in the place of a module.


def as_partial(fun: Callable[..., PyTree]) -> Partial:
    """The same function as a pytree, whose leaves are what it is bound to."""
    if isinstance(fun, types.FunctionType):
        return Partial(fun)
    if isinstance(fun, types.MethodType):
        return Partial(fun.__func__, fun.__self__)
    if isinstance(fun, functools.partial):
        return Partial(call_partial, as_partial(fun.func), *fun.args, **fun.keywords)
    return Partial(call_partial, fun)


def call_partial(fun: Callable[..., PyTree], /, *args: Any, **kwargs: Any) -> PyTree:
    """Returns `fun(*args, **kwargs)`."""
    return fun(*args, **kwargs)


def call_with_states(
    call: Callable[..., PyTree],
    fun: Callable[..., PyTree],
    args: PyTree,
    kwargs: PyTree,
    *,
    is_update: bool,
) -> PyTree:
    """Returns `fun(*args, **kwargs)`, evaluated by `call(pure, arguments, {})`.

    If `is_update`, the modules take the changes that `fun` makes to them.
    """
    nnx = flax_nnx()
    own, function = _take_modules(as_partial(fun))
    given, arguments = _take_modules((args, kwargs))
    modules = [*own, *given]

    def pure(
        arguments: PyTree, values: list[PyTree]
    ) -> tuple[PyTree, dict[int, PyTree] | list[PyTree], Any]:
        with nnx.merge_context(_TAG, inner=True) as context:
            inside = context.unflatten(graph, values)
        args, kwargs = _put_modules(arguments, inside[len(own) :])
        results = call_unchanged(_put_modules(function, inside), args, kwargs)
        made, results = _take_modules(results)
        with nnx.split_context() as context:
            new_graph, new_values = context.flatten(inside, with_paths=False)
        if new_graph == graph and not made:
            pairs = enumerate(zip(values, new_values, strict=True))
            changes = {i: new for i, (old, new) in pairs if not _is_same(old, new)}
            if all(is_variable(leaves[i]) for i in changes):
                return results, changes, None
        with nnx.split_context(_TAG) as context:
            new_graph, new_values = context.flatten((inside, made), with_paths=False)
        return results, new_values, new_graph

    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            graph, pairs = context.flatten(modules)
        leaves = [leaf for _, leaf in pairs]
        values = list(map(_value_of, leaves))
        results, changes, new_graph = call(pure, (arguments, values), {})
        if not is_update:
            with nnx.merge_context() as context:
                made = context.unflatten(new_graph, changes)[1] if new_graph else []
            return _put_modules(results, made)
        with explain_changes():
            if new_graph is None:
                for i, value in changes.items():
                    nnx.update(leaves[i], value)
                return results
            _check_may_change(modules)
            with nnx.merge_context(_TAG, inner=False) as context:
                _, made = context.unflatten(new_graph, changes)
        return _put_modules(results, made)


def _check_may_change(modules: Sequence[Any]) -> None:
    """Has Flax refuse to change any object in some modules, before one is changed."""
    nnx = flax_nnx()
    for _, node in nnx.iter_graph(modules):
        if is_variable(node):
            nnx.update(node, _value_of(node))
        elif hasattr(node, "_check_valid_context"):
            node._check_valid_context(lambda: "from a different trace level")


def _value_of(leaf: Any) -> PyTree:
    """The value of a variable; any other leaf is its own value."""
    if not is_variable(leaf):
        return leaf
    (value,) = jax.tree.leaves(leaf, is_leaf=lambda node: node is not leaf)
    return value


def _is_same(old: PyTree, new: PyTree) -> bool:
    return are_same(jax.tree.leaves(old), jax.tree.leaves(new))


def _take_modules(tree: PyTree) -> tuple[list[Any], PyTree]:
    """The modules in a tree, and the tree with slots in their places."""
    modules = modules_of(tree)
    return modules, map_modules(lambda module: _SLOT, tree) if modules else tree


def _put_modules(tree: PyTree, modules: Sequence[Any]) -> PyTree:
    """The tree with modules in its slots."""
    given = iter(modules)
    return jax.tree.map(lambda leaf: next(given) if leaf is _SLOT else leaf, tree)
