"""Trace a call of a function, whatever it is given, and finish the call later.

A program takes and returns arrays of JAX. Whatever else stands in the arguments reaches
the function as it is, and whatever else it returns is returned as it is: numbers,
functions, arrays of NumPy (as in Equinox's `filter_eval_shape`). What the function may
change, such as modules of Flax, is not changed before the call is finished.
"""

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.tree_util import Partial

from optax_lossscale._autocast.context import context
from optax_lossscale._ground.nnx import (
    flatten,
    flax_nnx,
    is_module,
    is_variable,
    leaves_of,
    modules_of,
)
from optax_lossscale._ground.tree import are_same
from optax_lossscale._ground.types import Arrays, PyTree

_EMPTY = types.CellType()  # Of a variable that is not assigned yet.


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

    def traced_by_autocast(*arrays: jax.Array) -> Partial:
        results = fun(*jax.tree.unflatten(structure, _combine(arrays, others)))
        leaves, new_structure = jax.tree.flatten(results)
        are_traced = (isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        new_arrays, new_others = _partition(are_traced, leaves)

        def finish(arrays: Arrays) -> PyTree:
            return jax.tree.unflatten(new_structure, _combine(arrays, new_others))

        return Partial(finish, new_arrays)  # A pytree of arrays, with the rest static.

    program, results = jax.make_jaxpr(traced_by_autocast, return_shape=True)(*arrays)
    return Traced(program, arrays, results.func)


def trace_call(
    tree: PyTree, low: PyTree | None = None, scopes: Sequence[Any] = ()
) -> Traced:
    """Traces a call of a function, which may change modules of Flax in its arguments.

    Modules of `flax.nnx` are split before the call, merged inside, and updated after
    it. Those of `flax.linen` write the variables of a scope, and any function may write
    into what it closes over. Scopes, and what is closed over, have their old values
    again after the trace.

    Args:
      tree: Function, arguments and keyword arguments.
      low: The same tree with the arrays that the function is traced with.
      scopes: The scopes of linen.
    """
    low = tree if low is None else low
    modules, boxes = modules_of(tree), _boxes_of(tree[0])
    graph, state = _split(modules, modules_of(low))
    leaves, structure = flatten(low)
    _, others = _partition(map(is_module, leaves), leaves)

    def pure(others: list[PyTree], state: PyTree) -> PyTree:
        inside = _merge(graph, state)
        fun, args, kwargs = jax.tree.unflatten(structure, _combine(inside, others))
        old_entries = [dict(box) for box in boxes]
        with variables_kept(scopes), _explain_changes():
            try:
                results = fun(*args, **kwargs)
            finally:
                new_entries = list(map(_take_arrays, boxes, old_entries))
            changes = changes_of(inside, graph, state)
            return results, changes, list(map(_variables_of, scopes)), new_entries

    traced = trace(pure, others, state)

    def finish(arrays: Arrays) -> PyTree:
        results, changes, variables, entries = traced.finish(arrays)
        _write(scopes, variables)
        if context.value.record is None:  # Else somebody only looks at the call.
            for box, new in zip(boxes, entries, strict=True):
                box.update(new)
        if changes:
            with _explain_changes():
                flax_nnx().update(modules, changes)
        return results

    return traced._replace(finish=finish)


def as_partial(fun: Callable[..., PyTree]) -> Partial:
    """The same function as a pytree, whose leaves are what it is bound to."""
    if isinstance(fun, types.FunctionType):
        return Partial(fun)
    if isinstance(fun, types.MethodType):
        return Partial(fun.__func__, fun.__self__)
    if isinstance(fun, functools.partial):
        inner = as_partial(fun.func)
        keywords = inner.keywords | fun.keywords
        return Partial(inner.func, *inner.args, *fun.args, **keywords)
    return Partial(operator.call, fun)


def _is_input(leaf: PyTree) -> bool:
    """Whether a leaf is an input of the program.

    Outside of `jit` only floating arrays are, so that integers can be the bounds of
    loops that are differentiated.
    """
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _partition(flags: Iterable[bool], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """The leaves with a flag, and all leaves with None in the places of these."""
    pairs = list(zip(flags, leaves, strict=True))
    flagged = [leaf for flag, leaf in pairs if flag]
    return flagged, [None if flag else leaf for flag, leaf in pairs]


def _combine(flagged: Iterable[Any], others: list[Any]) -> list[Any]:
    """All leaves again, from what `_partition` returned. None is never a leaf."""
    given = iter(flagged)
    return [next(given) if leaf is None else leaf for leaf in others]


# --- Objects that a function closes over ------------------------------------------


def _boxes_of(fun: Partial) -> list[dict[str, Any]]:
    """Dicts, and the attributes of objects, into which a function may write."""
    cells = getattr(fun.func, "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells if cell != _EMPTY]
    boxes = (x if isinstance(x, dict) else getattr(x, "__dict__", 0) for x in contents)
    return [box for box in boxes if isinstance(box, dict)]


def _take_arrays(box: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The traced arrays that a call has left in a box, which gets its old ones back."""
    new = {
        name: value
        for name, value in box.items()
        if isinstance(value, jax.core.Tracer) and value is not old.get(name)
    }
    for name in new:
        if name in old:
            box[name] = old[name]
        else:
            del box[name]
    return new


# --- Modules of flax.nnx ----------------------------------------------------------


def _split(modules: list[Any], low_modules: list[Any]) -> tuple[Any, Any]:
    """The graph of modules, and their state with the values of the low ones.

    A variable that has several places is one variable in the state. In the low modules
    it is several, all with the same value.
    """
    if not modules:
        return None, None
    nnx = flax_nnx()
    graph, state = nnx.split(modules)
    low_values = dict(nnx.to_flat_state(nnx.state(low_modules)))
    paths = [path for path, _ in nnx.to_flat_state(state)]
    return graph, nnx.from_flat_state([(path, low_values[path]) for path in paths])


def _merge(graph: Any, state: Any) -> list[Any]:
    """New modules, which share no variable with the state."""
    if graph is None:
        return []
    merged: list[Any] = flax_nnx().merge(graph, jax.tree.map(lambda x: x, state))
    return merged


def changes_of(modules: list[Any], graph: Any, state: Any) -> Any:
    """The variables that a call has changed, as `nnx.update` writes them."""
    if graph is None:
        return None
    nnx = flax_nnx()
    new_graph, new_state = nnx.split(modules)
    if new_graph != graph:
        _refuse_lost_changes(_merge(graph, state), modules)
    old = dict(nnx.to_flat_state(state))
    return nnx.from_flat_state(
        (path, new)
        for path, new in nnx.to_flat_state(new_state)
        if not are_same(*map(jax.tree.leaves, (new, old.get(path))))
    )


def _refuse_lost_changes(old_modules: list[Any], modules: list[Any]) -> None:
    """Refuses what `nnx.update` does not write: attributes, modes, what is gone."""
    old, new = (dict(flax_nnx().iter_graph(each)) for each in (old_modules, modules))
    kinds = (int, float, str, type(None))

    def is_lost(path: tuple[Any, ...]) -> bool:
        if path not in old or path not in new:
            return not is_variable(new.get(path))
        is_plain = isinstance(old[path], kinds) or isinstance(new[path], kinds)
        return is_plain and str(old[path]) != str(new[path])

    lost = filter(is_lost, {**old, **new})
    if names := [".".join(map(str, path[1:])) for path in lost]:
        raise ValueError(
            "A module of `flax.nnx` has changed in a way that would be lost: "
            f"{', '.join(map(repr, names))}. (Set attributes and modes, as by "
            "`model.train()`, outside the function, and keep what changes in an "
            "`nnx.Variable`.)"
        )


# --- Modules of flax.linen --------------------------------------------------------
# They write the variables of a scope, which get their old values back after the trace.


def linen_scopes_of(tree: PyTree) -> list[Any]:
    """The root scopes of the linen modules among function and arguments."""
    linen: Any = sys.modules.get("flax.linen")
    leaves = [] if linen is None else leaves_of(tree)
    modules = [leaf for leaf in leaves if isinstance(leaf, linen.Module)]
    scopes = [module.scope.root for module in modules if module.scope is not None]
    return list(dict.fromkeys(scopes))


def are_initializing(scopes: Sequence[Any]) -> bool:
    """Whether a linen module is making its parameters, which are not to be rounded."""
    return any(scope.get_flag("initializing", False) for scope in scopes)


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
