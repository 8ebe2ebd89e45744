"""Name the calls of modules of `flax.nnx` and Equinox, as Flax Linen does by itself.

JAX knows the line of an operation, but a loop calls all layers from one line. So while
a function is traced, each call of a module runs in a `jax.named_scope` with the path of
that module, such as `Transformer/blocks/4/attention`.
"""

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from optax_lossscale._nnx import flax_nnx, is_module, is_variable
from optax_lossscale._types import PyTree

# The modules whose calls are running; None where calls are not named.
_RUNNING: contextvars.ContextVar[tuple[Any, ...] | None] = contextvars.ContextVar(
    "running", default=None
)
# The classes whose calls are named: their own calls, and how many threads name them.
_PATCHED: dict[type, tuple[Callable[..., Any], int]] = {}
_LOCK = threading.Lock()
_MOST_NESTED = 4  # Of lists and dicts in which a module may stand.


@contextlib.contextmanager
def named_calls(fun: Callable[..., Any], arguments: PyTree) -> Iterator[None]:
    """Names the calls of the modules that a function has, inside the `with` block.

    They are those in its arguments, in what it is bound to, and in the variables of
    the functions around it.
    """
    if _RUNNING.get() is not None:
        yield
        return
    trees = [arguments, fun, getattr(fun, "__self__", None), *_closure_of(fun)]
    owners, token = _owners_of_calls(trees), _RUNNING.set(())
    _patch(owners)
    try:
        yield
    finally:
        _unpatch(owners)
        _RUNNING.reset(token)


def _patch(owners: Sequence[type]) -> None:
    """Names the calls of some classes, if no other thread does so already."""
    with _LOCK:
        for owner in owners:
            if owner not in _PATCHED:
                original = vars(owner)["__call__"]
                _PATCHED[owner] = original, 0
                setattr(owner, "__call__", _named(original))  # noqa: B010
            original, users = _PATCHED[owner]
            _PATCHED[owner] = original, users + 1


def _unpatch(owners: Sequence[type]) -> None:
    """Gives the classes that no thread names any more their own calls back."""
    with _LOCK:
        for owner in owners:
            original, users = _PATCHED.pop(owner)
            if users > 1:
                _PATCHED[owner] = original, users - 1
            else:
                setattr(owner, "__call__", original)  # noqa: B010


def _named(call: Callable[..., Any]) -> Callable[..., Any]:
    """The method `__call__` of a class, in a scope with the name of the module."""

    @functools.wraps(call)
    def named_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = _RUNNING.get()
        # In another thread, or a method of a base class that `super()` calls.
        if running is None or (running and running[-1] is self):
            return call(self, *args, **kwargs)
        path = _path_to(self, running[-1]) if running else None
        token = _RUNNING.set((*running, self))
        try:
            with jax.named_scope(path or type(self).__name__):
                return call(self, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return named_call


def _closure_of(fun: Callable[..., Any]) -> list[Any]:
    """What a function reads from the functions around it."""
    contents = []
    for cell in getattr(fun, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # It is not assigned yet.
            contents.append(cell.cell_contents)
    return contents


def _owners_of_calls(trees: Sequence[PyTree]) -> list[type]:
    """The classes in which the modules in some trees have their `__call__`."""
    owners: dict[type, None] = {}
    for module in _modules_in(trees):
        for kind in type(module).__mro__:
            if callable(vars(kind).get("__call__")):
                owners[kind] = None
    return list(owners)


def _modules_in(trees: Sequence[PyTree]) -> Iterator[Any]:
    """All modules in some trees, and in these modules."""
    nodes, seen = list(trees), set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if _is_module(node) and not _is_wrapper(node):
            yield node
        nodes += [child for _, child in _children_of(node)]


def _path_to(module: Any, parent: Any, depth: int = 0) -> str | None:
    """The path of a module from its parent, or None if it is not found there."""
    children = _children_of(parent)
    for name, child in children:
        if child is module:
            return name
    if depth < _MOST_NESTED:
        for name, child in children:
            path = _path_to(module, child, depth + 1)
            if path is not None:
                return f"{name}/{path}"
    return None


def _children_of(node: Any) -> list[tuple[str, Any]]:
    """What a module or a container holds, by names or numbers."""
    if isinstance(node, dict):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return [(str(i), value) for i, value in enumerate(node)]
    if isinstance(node, functools.partial):
        return [("", node.func), ("", node.args), ("", node.keywords)]
    if not _is_module(node):
        return []
    attributes = vars(node).items()
    return [(name, value) for name, value in attributes if not name.startswith("_")]


def _is_wrapper(module: Any) -> bool:
    """Whether a module is what a transformation of Equinox returned."""
    names = type(module).__module__.split(".")
    return names[0] == "equinox" and names[1:2] != ["nn"]


def _is_module(node: Any) -> bool:
    equinox: Any = sys.modules.get("equinox")
    if equinox is not None and isinstance(node, equinox.Module):
        return True
    return flax_nnx() is not None and is_module(node) and not is_variable(node)
