"""Compile a function once for its calls outside `jit`, where that is sound.

`autocast` traces a function anew at each call, because what the function reads beside
its arguments may have changed: a module's parameters, a setting, an iterator. If all
that it reads is immutable and still the same, then one compiled program gives the same
results, and is many times as fast.
"""

import builtins
import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np

_CONSTANTS = (bool, int, float, complex, str, bytes, np.dtype, type(None))
# Libraries whose functions read nothing that a program changes.
_LIBRARIES = ("jax", "jaxlib", "math", "operator", "optax", "optax_lossscale")
# Builtin functions that may do or give something else at each call.
_IMPURE = (
    *("__import__", "breakpoint", "delattr", "eval", "exec", "globals", "id", "input"),
    *("locals", "next", "open", "print", "setattr", "vars"),
)
# Instructions that change something outside of a function, or read it out of sight.
_HIDDEN = (
    *("DELETE_ATTR", "DELETE_GLOBAL", "IMPORT_NAME", "LOAD_BUILD_CLASS"),
    *("STORE_ATTR", "STORE_GLOBAL"),
)


class _MayChangeError(Exception):
    """Something that a function reads may change between its calls."""


class _Caller:
    """The function of one call. Equal to any other, so that JAX compiles only once."""

    def __init__(self, fun: Any) -> None:
        self.fun = weakref.ref(fun)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Caller)

    def __hash__(self) -> int:
        return 0


class _Reads:
    """All that a function reads beside its arguments.

    Attributes:
      objects: The immutable objects, in the order in which they are found.
      shape: In the same order, the number of each function, which is the same when it
        is found again, and the length of each tuple.
    """

    def __init__(self, fun: object) -> None:
        self.objects: list[object] = []
        self.shape: list[int] = []
        self._numbers: dict[int, int] = {}
        self._find(fun)

    def arrays(self) -> list[jax.Array]:
        """The arrays among the objects."""
        return [value for value in self.objects if isinstance(value, jax.Array)]

    def _find(self, value: object) -> None:
        """Adds a value; of a function or a tuple, all that it refers to."""
        if isinstance(value, types.FunctionType) and not _is_of_library(value):
            is_new = id(value) not in self._numbers
            number = self._numbers.setdefault(id(value), len(self._numbers))
            self.shape.append(number)
            parts: Iterator[object] | tuple[object, ...] = (
                _parts(value) if is_new else ()
            )
        elif isinstance(value, jax.stages.Wrapped):
            parts = (inspect.getattr_static(value, "__wrapped__"),)
            self.objects.append(value)
        elif type(value) is tuple:
            self.shape.append(len(value))
            parts = value
        elif is_immutable(value):
            parts = ()
            self.objects.append(value)
        else:
            raise _MayChangeError
        for part in parts:
            self._find(part)


class _Compiled:
    """A compiled function, and what it read when it was compiled."""

    def __init__(self, reads: _Reads, name: str, call: Callable[..., Any]) -> None:
        def compiled(
            caller: _Caller, static: Hashable, captured: list[Any], *arrays: Any
        ) -> Any:
            fun = caller.fun()
            return call(
                fun,
                static,
                list(zip(_Reads(fun).arrays(), captured, strict=True)),
                *arrays,
            )

        compiled.__name__ = name
        self.call = jax.jit(compiled, static_argnums=(0, 1))
        self.shape = reads.shape
        self.objects = list(map(_reference, reads.objects))

    def is_valid(self, reads: _Reads) -> bool:
        """Whether the function still reads the same objects."""
        if self.shape != reads.shape or len(self.objects) != len(reads.objects):
            return False
        pairs = zip(self.objects, reads.objects, strict=True)
        return all(reference() is value for reference, value in pairs)


# By the code of a function, so that a lambda that is evaluated at each step is compiled
# once; then by the settings of autocast.
_COMPILED: weakref.WeakKeyDictionary[Any, dict[Hashable, _Compiled]] = (
    weakref.WeakKeyDictionary()
)


def compile_once(
    fun: Callable[..., Any], settings: Hashable, call: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Compiles `call(fun, static, captured, *arrays)`, in which `static` is static.

    `captured` are pairs of an array that `fun` reads and the argument that stands for
    it. A compiled program that held the arrays itself would keep them alive.

    Returns:
      The compiled function of `static` and the arrays, the same one while `fun` reads
      the same objects. None if a compiled program might differ from a new trace.
    """
    try:
        reads = _Reads(fun)
    except _MayChangeError:
        return None
    by_settings = _COMPILED.setdefault(getattr(fun, "__code__", fun), {})
    if settings not in by_settings:
        name = getattr(fun, "__name__", "autocast")
        by_settings[settings] = _Compiled(reads, name, call)
    compiled = by_settings[settings]
    if not compiled.is_valid(reads):
        return None
    caller, captured = _Caller(fun), reads.arrays()
    return lambda static, *arrays: compiled.call(caller, static, captured, *arrays)


def is_immutable(value: object) -> bool:
    """Whether a value is a number, a string, an array, or a function of a library."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer)
    if isinstance(value, (*_CONSTANTS, types.CodeType)):
        return True
    is_function = callable(value) and not isinstance(value, functools.partial)
    is_module = isinstance(value, types.ModuleType)
    return (is_function or is_module) and _is_of_library(value)


def _is_of_library(value: Any) -> bool:
    is_module = isinstance(value, types.ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def _parts(function: types.FunctionType) -> Iterator[object]:
    """The objects that a Python function refers to."""
    if set(vars(function)) - {"__wrapped__"}:  # Attributes, which it might read.
        raise _MayChangeError
    yield function.__code__
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError as error:  # The variable is not assigned yet.
            raise _MayChangeError from error
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]
        elif name in _IMPURE or not hasattr(builtins, name):
            raise _MayChangeError


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of global variables that code reads."""
    names: list[str] = []
    for instruction in dis.get_instructions(code):
        changes_cell = instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
        changes_cell &= instruction.argval in code.co_freevars
        if instruction.opname in _HIDDEN or changes_cell:
            raise _MayChangeError
        if instruction.opname == "LOAD_GLOBAL":
            names.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return tuple(dict.fromkeys(names))


def _reference(value: object) -> Callable[[], object]:
    """A reference to a value, weak if the value allows it."""
    try:
        return weakref.ref(value)
    except TypeError:  # A number or a string.
        return lambda: value
