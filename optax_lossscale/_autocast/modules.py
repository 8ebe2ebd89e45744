"""Trace a call of a function, whatever it is given, and finish the call later.

A program takes and returns arrays of JAX. Whatever else stands in the arguments reaches
the function as it is, and whatever else it returns is returned as it is: numbers,
functions, arrays of NumPy (as in Equinox's `filter_eval_shape`). Modules of Flax, which
the function may change, are not changed before the call is finished.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.tree_util import Partial

from optax_lossscale._autocast.jax_internals import linen_modules_around
from optax_lossscale._ground.nnx import (
    flatten,
    flax_nnx,
    is_variable,
    leaves_of,
    modules_of,
)
from optax_lossscale._ground.tree import are_same
from optax_lossscale._ground.types import Arrays, PyTree

_TAG = "optax_lossscale.autocast"
_EMPTY = types.CellType()  # Of a variable that is not assigned yet.
_Finish: TypeAlias = Callable[[PyTree], PyTree]


class Traced(NamedTuple):
    """A call that was traced, and that has changed nothing yet.

    Attributes:
      program: What was traced.
      arrays: Its inputs.
      finish: Makes the results of the call from those of the program.
    """

    program: core.ClosedJaxpr
    arrays: list[jax.Array]
    finish: Callable[[Arrays], PyTree]


def trace(fun: Callable[..., PyTree], *args: PyTree) -> Traced:
    """Traces `fun(*args)`, which must change nothing."""
    leaves, structure = jax.tree.flatten(args)
    arrays, others = _partition(map(_is_input, leaves), leaves)

    def flat(*arrays: jax.Array) -> Partial:
        results = fun(*jax.tree.unflatten(structure, _combine(arrays, others)))
        leaves, new_structure = jax.tree.flatten(results)
        are_traced = (isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        new_arrays, new_others = _partition(are_traced, leaves)

        def finish(arrays: Arrays) -> PyTree:
            return jax.tree.unflatten(new_structure, _combine(arrays, new_others))

        return Partial(finish, new_arrays)  # A pytree of arrays, with the rest static.

    program, results = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return Traced(program, arrays, results.func)


def trace_call(
    tree: PyTree, low: PyTree | None = None, scopes: Sequence[Any] = ()
) -> Traced:
    """Traces a call of a function, which may change modules and scopes of linen.

    Args:
      tree: Function, arguments and keyword arguments.
      low: The same tree with the arrays that the function is traced with.
      scopes: The scopes.
    """
    low = tree if low is None else low
    finish: _Finish
    pure, inputs, finish = _call_tree, low, lambda results: results
    if modules_of(tree):
        pure, inputs, finish = _without_modules(tree, low)
    if scopes:
        pure, finish = _without_variables(scopes, pure, finish)
    with _explain_numpy(tree):
        traced = trace(pure, *inputs)
    return traced._replace(finish=lambda results: finish(traced.finish(results)))


def _call_tree(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    with _explain_changes():
        return fun(*args, **kwargs)


@contextlib.contextmanager
def _explain_numpy(tree: PyTree) -> Iterator[None]:
    """Adds to an error of NumPy which arguments led to it."""
    try:
        yield
    except (jax.errors.TracerArrayConversionError, AssertionError) as error:
        # JAX asserts that `vmap` maps no array of NumPy into a `custom_jvp`.
        leaves = jax.tree.leaves(tree) if "ndarray" in str(error) else []
        has_numpy = any(isinstance(leaf, np.ndarray) for leaf in leaves)
        if has_numpy and _OF_NUMPY not in getattr(error, "__notes__", []):
            error.add_note(_OF_NUMPY)
        raise


_OF_NUMPY = (
    "Outside `jit`, arrays of NumPy among the arguments stay arrays of NumPy. A traced "
    "array cannot index them, and `vmap` cannot map them into every function. Pass "
    "arrays of JAX (`jax.tree.map(jnp.asarray, batch)`), or call the function under "
    "`jax.jit`."
)


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


def _is_input(leaf: PyTree) -> bool:
    """Whether a leaf is an input of the program.

    Outside of `jit`, arrays of integers and bools are not, so that they can be the
    bounds of loops that are differentiated.
    """
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return True
    kinds = (jnp.integer, jnp.bool_)
    return isinstance(leaf, jax.Array) and not any(
        jnp.issubdtype(leaf.dtype, kind) for kind in kinds
    )


def _partition(flags: Iterable[bool], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """The leaves with a flag, and all leaves with None in the places of these."""
    pairs = list(zip(flags, leaves, strict=True))
    flagged = [leaf for flag, leaf in pairs if flag]
    return flagged, [None if flag else leaf for flag, leaf in pairs]


def _combine(flagged: Iterable[Any], others: list[Any]) -> list[Any]:
    """All leaves again, from what `_partition` returned. None is never a leaf."""
    given = iter(flagged)
    return [next(given) if leaf is None else leaf for leaf in others]


# --- Modules of flax.nnx ----------------------------------------------------------
# They are taken apart before the call, put together inside, and updated after it, as in
# the transformations of Flax.


def _without_modules(
    tree: PyTree, low: PyTree
) -> tuple[Callable[..., PyTree], PyTree, _Finish]:
    """A call in which values stand for modules; `low` has those to trace with."""
    nnx = flax_nnx()
    graph, leaves, objects = _take_apart(modules_of(tree))
    modules, others, structure = _take_modules(low)
    low_leaves = leaves if low is tree else _take_apart(modules)[1]
    # A variable that has several places in the tree has the value of the first.
    values = [_value_of(low_leaves[path]) for path in leaves]

    def pure(others: list[PyTree], values: list[PyTree]) -> PyTree:
        with nnx.update_context(_TAG):
            with nnx.merge_context(_TAG, inner=True) as context:
                inside, _ = context.unflatten(graph, values)
            results = _call_tree(
                *jax.tree.unflatten(structure, _combine(inside, others))
            )
            made, *rest = _take_modules(results)
            with nnx.split_context(_TAG) as context:
                return rest, context.flatten((inside, made), with_paths=False)

    def finish(results: PyTree) -> PyTree:
        (others, structure), new = results
        with _explain_changes():
            made = _update(graph, leaves, objects, *new)
        return jax.tree.unflatten(structure, _combine(made, others))

    return pure, (others, values), finish


def _take_modules(tree: PyTree) -> tuple[list[Any], list[Any], Any]:
    """The modules in a tree, its leaves without them, and its structure."""
    leaves, structure = flatten(tree)
    kinds = set(map(type, modules_of(tree)))
    return *_partition((type(leaf) in kinds for leaf in leaves), leaves), structure


def _take_apart(modules: list[Any]) -> tuple[Any, dict[Any, Any], dict[int, Any]]:
    """Graph and leaves of modules, by path, and their objects by number in the graph.

    A leaf is a variable, or an array outside of variables.
    """
    with flax_nnx().split_context() as context:
        graph, leaves = context.flatten((modules, []))
        objects = {index: node for node, index in context.ref_index.items()}
    return graph, dict(leaves), objects


def _update(
    graph: Any,
    leaves: dict[Any, Any],
    objects: dict[int, Any],
    new_graph: Any,
    values: list[PyTree],
) -> list[Any]:
    """Changes modules, and returns those that the function has returned."""
    nnx = flax_nnx()
    if new_graph.with_no_outer_index() == graph:
        pairs = zip(leaves.values(), values, strict=True)
        changed = [(leaf, x) for leaf, x in pairs if not _has_value(leaf, x)]
        if all(is_variable(leaf) for leaf, _ in changed):
            for variable, value in changed:
                nnx.update(variable, value)
            return []
    # Flax may refuse to change a module, and then must not have emptied it before.
    for node in objects.values():
        if hasattr(node, "_check_valid_context"):
            node._check_valid_context(lambda: "from a different trace level")
    returned: list[Any]
    _, returned = nnx.unflatten(new_graph, values, outer_index_outer_ref=objects)
    return returned


def _value_of(leaf: PyTree) -> PyTree:
    """The value of a variable; any other leaf is its own value."""
    if not is_variable(leaf):
        return leaf
    (value,) = jax.tree.leaves(leaf, is_leaf=lambda node: node is not leaf)
    return value


def _has_value(leaf: PyTree, value: PyTree) -> bool:
    if isinstance(value, flax_nnx().graph.NoUpdate):  # Of a `jax.Ref`, which has it.
        return True
    return are_same(jax.tree.leaves(_value_of(leaf)), jax.tree.leaves(value))


# --- Modules of flax.linen --------------------------------------------------------
# They write the variables of a scope, which get their old values back after the trace.


def is_unbound(fun: Any) -> bool:
    """Whether a function is a linen module outside of any other, without variables."""
    linen = sys.modules.get("flax.linen")
    is_linen = linen is not None and isinstance(fun, linen.Module)
    return is_linen and fun.scope is None and fun.parent is None


def linen_scopes_of(fun: Callable[..., PyTree], *args: PyTree) -> list[Any]:
    """The root scopes of linen modules: arguments, named in it, around the call."""
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return []
    cells = [x for x in getattr(fun, "__closure__", None) or () if x != _EMPTY]
    objects = [*leaves_of((as_partial(fun), *args)), *linen_modules_around()]
    objects += [cell.cell_contents for cell in cells]
    if isinstance(fun, types.FunctionType):
        objects += map(fun.__globals__.get, fun.__code__.co_names)
    modules = [x for x in objects if isinstance(x, linen.Module)]
    scopes = [module.scope.root for module in modules if module.scope is not None]
    return list(dict.fromkeys(scopes))


def are_initializing(scopes: Sequence[Any]) -> bool:
    """Whether a module is making its parameters, which are not to be rounded."""
    return any(scope.get_flag("initializing", False) for scope in scopes)


def _without_variables(
    scopes: Sequence[Any], call: Callable[..., PyTree], finish: _Finish
) -> tuple[Callable[..., PyTree], _Finish]:
    """A call that returns the variables of scopes, too; `finish` writes them."""

    def pure(*args: Any) -> PyTree:
        with variables_kept(scopes):
            return call(*args), list(map(_variables_of, scopes))

    def finish_and_write(results: PyTree) -> PyTree:
        _write(scopes, results[1])
        return finish(results[0])

    return pure, finish_and_write


@contextlib.contextmanager
def variables_kept(scopes: Sequence[Any]) -> Iterator[None]:
    """A context after which the scopes have their old variables again."""
    old = list(map(_variables_of, scopes))
    try:
        yield
    finally:
        _write(scopes, old)


def _variables_of(scope: Any) -> dict[str, Any]:
    """The collections of a scope that may change, copied."""
    names = filter(scope.is_mutable_collection, scope._variables)
    return {name: jax.tree.map(lambda x: x, scope._variables[name]) for name in names}


def _write(scopes: Sequence[Any], variables: Sequence[dict[str, Any]]) -> None:
    for scope, new in zip(scopes, variables, strict=True):
        old = scope._variables
        fixed = {k: v for k, v in old.items() if not scope.is_mutable_collection(k)}
        _assign(old, {**fixed, **new})


def _assign(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Makes a nested dict equal to another one, in place.

    Each dict stays the same object, even an empty one, since a scope may hold it.
    """
    for name in set(old) - set(new):
        if isinstance(old[name], dict):
            _assign(old[name], {})
        else:
            del old[name]
    for name, value in new.items():
        if old.get(name) is value:
            continue
        if isinstance(old.get(name), dict) and isinstance(value, dict):
            _assign(old[name], value)
        else:
            old[name] = value


@contextlib.contextmanager
def _explain_changes() -> Iterator[None]:
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
