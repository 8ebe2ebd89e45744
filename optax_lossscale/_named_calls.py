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

from optax_lossscale._nnx import flax_nnx
from optax_lossscale._tree import path_name
from optax_lossscale._types import KeyPath, PyTree

# The module whose call is running, and the paths of the modules in it, by identity;
# (None, {}) outside of all modules, and None where calls are not named.
_RUNNING: contextvars.ContextVar[tuple[Any, dict[int, str]] | None]
_RUNNING = contextvars.ContextVar("running", default=None)
# Set while calls are named, so that JAX does not reuse what has no names.
_ARE_NAMED = jax.make_user_context(None)
_LOCK = threading.RLock()  # One thread at a time may change the classes.


@contextlib.contextmanager
def named_calls() -> Iterator[None]:
    """Names the calls of modules inside the `with` block, in this thread."""
    if _RUNNING.get() is not None:
        yield
        return
    with _LOCK, _ARE_NAMED(True):
        originals = {kind: vars(kind)["__call__"] for kind in _classes()}
        token = _RUNNING.set((None, {}))
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
    found: set[Any] = set()
    libraries = flax_nnx(), sys.modules.get("equinox")
    new = [library.Module for library in libraries if library is not None]
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
        if running is None or running[0] is self:
            return call(self, *args, **kwargs)
        name = running[1].get(id(self), type(self).__name__)
        token = _RUNNING.set((self, _paths_in(self)))
        try:
            with jax.named_scope(name):
                return call(self, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return named_call


def _paths_in(module: Any) -> dict[int, str]:
    """The paths of the modules in a module, by identity."""
    nnx = flax_nnx()
    if nnx is not None and isinstance(module, nnx.Module):
        nodes = nnx.iter_graph(module)
        return {
            id(node): "/".join(map(str, path))
            for path, node in nodes
            if isinstance(node, nnx.Module)
        }
    paths: dict[int, str] = {}
    equinox: Any = sys.modules["equinox"]

    def add(path: KeyPath, node: PyTree) -> bool:
        if isinstance(node, equinox.Module):
            paths.setdefault(id(node), path_name(path))
        return False

    jax.tree_util.tree_leaves_with_path(module, is_leaf=add, is_leaf_takes_path=True)
    return paths
