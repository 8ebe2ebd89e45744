"""Name the calls of modules of `flax.nnx` and Equinox, as Flax Linen does by itself.

JAX knows the line of an operation, but a loop calls all layers from one line. So while
a function is traced, each call of a module runs in a `jax.named_scope` with the path of
that module, such as `Transformer/blocks/4/attention`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from optax_lossscale._jax_internals import UserContext
from optax_lossscale._nnx import flax_nnx, is_module, is_variable

# The modules whose calls are running; None where calls are not named.
_RUNNING: contextvars.ContextVar[tuple[Any, ...] | None] = contextvars.ContextVar(
    "running", default=None
)
_NAMED = UserContext("named")  # So that JAX does not reuse what has no names.
_LOCK = threading.RLock()  # One thread at a time may change the classes.
_MOST_NESTED = 4  # Of lists and dicts in which a module may stand.


@contextlib.contextmanager
def named_calls() -> Iterator[None]:
    """Names the calls of modules inside the `with` block, in this thread."""
    if _RUNNING.get() is not None:
        yield
        return
    with _LOCK, _NAMED.set(True):
        originals = {kind: vars(kind)["__call__"] for kind in _classes()}
        token = _RUNNING.set(())
        try:
            for kind, call in originals.items():
                setattr(kind, "__call__", _named(call))  # noqa: B010
            yield
        finally:
            for kind, call in originals.items():
                setattr(kind, "__call__", call)  # noqa: B010
            _RUNNING.reset(token)


def _classes() -> set[type]:
    """The classes of modules that have a `__call__` of their own."""
    equinox: Any = sys.modules.get("equinox")
    nnx = flax_nnx()
    found: set[type] = set()
    new = [library.Module for library in (equinox, nnx) if library is not None]
    while new:
        kind = new.pop()
        if kind not in found:
            found.add(kind)
            new += kind.__subclasses__()
    return {
        kind
        for kind in found
        if callable(vars(kind).get("__call__")) and not _is_wrapper(kind)
    }


def _is_wrapper(kind: type) -> bool:
    """Whether a class is of what a transformation of Equinox returns."""
    names = kind.__module__.split(".")
    return names[0] == "equinox" and names[1:2] != ["nn"]


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
    if not _is_module(node):
        return []
    attributes = vars(node).items()
    return [(name, value) for name, value in attributes if not name.startswith("_")]


def _is_module(node: Any) -> bool:
    equinox: Any = sys.modules.get("equinox")
    if equinox is not None and isinstance(node, equinox.Module):
        return True
    return flax_nnx() is not None and is_module(node) and not is_variable(node)
