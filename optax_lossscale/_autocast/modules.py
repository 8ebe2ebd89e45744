"""Call a function with arrays as its arguments and results, whatever it is given.

What is traced takes arrays and returns arrays. A function may take more: numbers and
functions, which are static, and modules of Flax, which it may change in place. A module
of `flax.nnx` is taken apart before the call, put together inside it and updated after
it, as in the transformations of Flax itself. A module of `flax.linen` that is bound
writes the variables of its scope, which then get the results of the evaluation.
"""

import functools
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.tree_util import Partial, PyTreeDef

from optax_lossscale._jax_internals import linen_modules_around
from optax_lossscale._nnx import (
    explain_changes,
    flax_nnx,
    is_variable,
    map_modules,
    modules_of,
    one_of_each,
)
from optax_lossscale._tree import are_same
from optax_lossscale._types import Arrays, PyTree

_TAG = "optax_lossscale.autocast"
_SLOT = object()  # Stands in the place of a module.
_EMPTY = types.CellType()  # Of a variable that is not assigned yet.


class Rest(NamedTuple):
    """What remains of a tree without the arrays that are traced.

    Attributes:
      structure: The structure of the tree.
      others: Its leaves, with None in the places of arrays.
      flags: For each leaf, whether it is such an array.
    """

    structure: PyTreeDef
    others: list[PyTree]
    flags: list[bool]

    def merge(self, arrays: Arrays) -> PyTree:
        """The tree with these arrays in its places."""
        given, pairs = iter(arrays), zip(self.others, self.flags, strict=True)
        leaves = [next(given) if is_traced else other for other, is_traced in pairs]
        return jax.tree.unflatten(self.structure, leaves)


def partition(tree: PyTree) -> tuple[list[jax.Array], Rest]:
    """The arrays of a tree that are traced, and the rest of it.

    Outside of `jit`, arrays of integers and bools are not traced, so that they can be
    the bounds of loops that are differentiated.
    """
    leaves, structure = jax.tree.flatten(tree)
    # A traced integer can be the index of an array of JAX, but not of one of NumPy.
    leaves = [jnp.asarray(x) if _is_of_numpy(x) else x for x in leaves]
    flags = list(map(_is_traced, leaves))
    pairs = zip(leaves, flags, strict=True)
    others = [None if flag else leaf for leaf, flag in pairs]
    rest = Rest(structure, others, flags)
    return list(itertools.compress(leaves, flags)), rest


def _is_traced(leaf: PyTree) -> bool:
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return True
    kinds = (jnp.integer, jnp.bool_)
    return isinstance(leaf, jax.Array) and not any(
        jnp.issubdtype(leaf.dtype, kind) for kind in kinds
    )


def _is_of_numpy(leaf: PyTree) -> bool:
    """Whether it is an array of NumPy that JAX has too: not of strings or dates."""
    is_array = isinstance(leaf, np.ndarray)
    return is_array and leaf.dtype.isnative and hasattr(jnp, leaf.dtype.name)


class Traced(NamedTuple):
    """A call of a function that is traced, and not evaluated yet.

    Attributes:
      program: What was traced.
      arrays: Its inputs.
      finish: Makes the results of the call from those of the program.
    """

    program: core.ClosedJaxpr
    arrays: list[jax.Array]
    finish: Callable[[Arrays], PyTree]


def trace(fun: Callable[..., PyTree], *args: PyTree) -> Traced:
    """Traces `fun(*args)`."""
    arrays, rest = partition(args)

    def flat(*arrays: jax.Array) -> Partial:
        results, other_results = partition(fun(*rest.merge(arrays)))
        # A `Partial` is a pytree of its arrays, with the function as static data.
        return Partial(other_results.merge, results)

    program, results = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return Traced(program, arrays, results.func)


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
    is_update: bool = True,
) -> PyTree:
    """Returns `fun(*args, **kwargs)`, evaluated by `call(pure, *arguments)`.

    If `is_update`, the modules of `flax.nnx` take the changes that `fun` makes to them.
    """
    tree = as_partial(fun), args, kwargs
    if not modules_of(tree):
        return call(_call_tree, *tree)
    nnx = flax_nnx()
    modules, arguments = _take_modules(tree)

    def pure(
        arguments: PyTree, values: list[PyTree]
    ) -> tuple[PyTree, dict[int, PyTree] | list[PyTree], Any]:
        with nnx.merge_context(_TAG, inner=True) as context:
            inside = context.unflatten(graph, values)
        results = _call_tree(*_put_modules(arguments, inside))
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
        results, changes, new_graph = call(
            pure, arguments, list(map(_value_of, leaves))
        )
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


def _call_tree(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    with explain_changes():
        return fun(*args, **kwargs)


def _check_may_change(modules: Sequence[Any]) -> None:
    """Has Flax refuse to change any object in some modules, before one is changed."""
    nnx = flax_nnx()
    for _, node in nnx.iter_graph(modules):
        if is_variable(node):
            nnx.update(node, _value_of(node))
        elif hasattr(node, "_check_valid_context"):
            node._check_valid_context(lambda: "from a different trace level")


def _value_of(leaf: PyTree) -> PyTree:
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


def is_unbound(fun: Any) -> bool:
    """Whether a function is a linen module outside of any other, without variables."""
    linen = sys.modules.get("flax.linen")
    is_linen = linen is not None and isinstance(fun, linen.Module)
    return is_linen and fun.scope is None and fun.parent is None


def linen_scopes_of(fun: Callable[..., PyTree], leaves: Sequence[Any]) -> list[Any]:
    """The root scopes of linen modules: some leaves, in a closure, around the call."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return []
    cells = [x for x in getattr(fun, "__closure__", None) or () if x != _EMPTY]
    objects = [*leaves, *(cell.cell_contents for cell in cells)]
    objects += linen_modules_around()
    if not any(isinstance(x, linen.Module) for x in one_of_each(objects)):
        return []
    modules = [x for x in objects if isinstance(x, linen.Module)]
    scopes = [module.scope.root for module in modules if module.scope is not None]
    return list(dict.fromkeys(scopes))


def are_initializing(scopes: Sequence[Any]) -> bool:
    """Whether a module is making its parameters, which are not to be rounded."""
    return any(scope.get_flag("initializing", False) for scope in scopes)


def with_variables(
    scopes: Sequence[Any], call: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """The same as `call`; the scopes take the variables that the function writes."""

    def call_with_variables(fun: Callable[..., PyTree], *args: Any) -> PyTree:
        old = list(map(_variables_of, scopes))

        def pure(*args: Any) -> tuple[PyTree, list[PyTree]]:
            results = fun(*args)
            return results, list(map(_variables_of, scopes))

        new = old
        try:
            results, new = call(pure, *args)
        finally:
            for scope, variables in zip(scopes, new, strict=True):
                _assign(scope._variables, {**_fixed_of(scope), **variables})
        return results

    return call_with_variables


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
