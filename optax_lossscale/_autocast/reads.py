"""Find all that a function reads beside its arguments, if all of it is immutable."""

import builtins
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
# Libraries whose functions read nothing that a program changes.
_LIBRARIES = (
    *("jax", "jaxlib", "math", "ml_dtypes", "operator", "optax", "optax_lossscale"),
)
_WITH_RULES = (jax.custom_jvp, jax.custom_vjp)
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
_JITTED = type(jax.jit(lambda: None))
_OF_EVERY_JITTED = frozenset(vars(jax.jit(lambda: None)))  # The attributes of each.


class _Plain(NamedTuple):
    """A named tuple without attributes and methods of its own."""


class MayChangeError(Exception):
    """Something that a function reads, or gives, may change between its calls."""


class Reads:
    """All that a function reads beside its arguments.

    Attributes:
      objects: The immutable objects, in the order in which they are found.
      shape: In the same order, the number of each function, which is the same when it
        is found again, the length of each tuple, and where the objects stand.
    """

    def __init__(self, fun: object) -> None:
        self.objects: list[object] = []
        self.shape: list[tuple[str, int]] = []
        self._numbers: dict[int, int] = {}
        self._find(fun)

    def arrays(self) -> list[jax.Array]:
        """The arrays among the objects."""
        return [value for value in self.objects if isinstance(value, jax.Array)]

    def _find(self, value: object) -> None:
        """Adds a value; of a function or a tuple, all that it refers to."""
        if type(value) is tuple:
            self.shape.append(("tuple", len(value)))
            parts: Sequence[object] | Iterator[object] = value
        elif isinstance(value, types.FunctionType):
            parts = self._parts_if_new(value, _parts)
        elif isinstance(value, (_JITTED, *_WITH_RULES)):
            self.objects.append(value)
            parts = self._parts_if_new(value, _parts_of_wrapper)
        elif is_immutable(value):
            self.shape.append(("object", 1))
            self.objects.append(value)
            parts = ()
        else:
            raise MayChangeError
        for part in parts:
            self._find(part)

    def _parts_if_new(
        self, value: Any, parts: Callable[[Any], Iterator[object]]
    ) -> Iterator[object]:
        is_new = id(value) not in self._numbers
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self.shape.append(("function", number))
        return parts(value) if is_new else iter(())


def is_immutable(value: object) -> bool:
    """Whether a value is a number, a string, an array, or a function of a library."""
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer)
    if type(value) in _CONSTANTS:  # A subclass may have attributes.
        return value == value  # NaN differs from itself at each call.
    if isinstance(value, np.dtype | types.CodeType):
        return True
    if isinstance(value, type):
        return issubclass(value, (np.generic, np.dtype)) or _is_of_library(value)
    if isinstance(value, types.FunctionType):
        return _is_library_function(value) and not value.__closure__
    is_wrapper = isinstance(value, (functools.partial, types.MethodType))
    is_wrapper |= hasattr(value, "__wrapped__")
    is_callable = callable(value) and not is_wrapper
    return is_callable and _is_of_library(value)


def is_plain(structure: Any) -> bool:
    """Whether a structure of a pytree holds nothing but containers and their keys."""
    data = structure.node_data()
    if data is None:
        return True
    kind, keys = data
    if kind is dict:
        is_known = all(type(key) in (str, int) for key in keys)
    else:
        is_known = kind in (list, tuple, type(None)) or _is_plain_tuple(kind)
    return is_known and all(map(is_plain, structure.children()))


def _is_plain_tuple(kind: type) -> bool:
    """Whether a class is that of named tuples that do nothing of their own."""
    if not issubclass(kind, tuple) or kind.__bases__ != (tuple,):
        return False
    own = set(vars(kind)) - set(getattr(kind, "_fields", ())) - set(vars(_Plain))
    return not own or _is_of_library(kind)


def _is_of_library(value: object) -> bool:
    return _is_name_of_library(getattr(value, "__module__", None))


def _is_library_function(function: types.FunctionType) -> bool:
    # `functools.wraps` changes `__module__`, but not where a function is written.
    return _is_name_of_library(function.__globals__.get("__name__"))


def _is_name_of_library(name: object) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def _parts(function: types.FunctionType) -> Iterator[object]:
    """The objects that a Python function refers to."""
    yield function.__code__
    variables: dict[str, object] = {}
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            variables[name] = cell.cell_contents
        except ValueError as error:  # The variable is not assigned yet.
            raise MayChangeError from error
    is_module = {name: isinstance(x, types.ModuleType) for name, x in variables.items()}
    yield from (value for name, value in variables.items() if not is_module[name])
    if _is_library_function(function):
        return
    if set(vars(function)) - {"__wrapped__"}:  # Attributes, which it might read.
        raise MayChangeError
    yield function.__defaults__
    yield tuple((function.__kwdefaults__ or {}).values())
    for is_global, name, *attributes in _names_read(function.__code__):
        if not is_global:
            if is_module.get(name, False):
                yield _attribute(variables[name], attributes)
        elif name in function.__globals__:
            yield _attribute(function.__globals__[name], attributes)
        elif name in _IMPURE or not hasattr(builtins, name):
            raise MayChangeError


def _parts_of_wrapper(value: Any) -> Iterator[object]:
    """The functions of a jitted function, or of one with a derivative rule."""
    if isinstance(value, _JITTED) and set(vars(value)) - _OF_EVERY_JITTED:
        raise MayChangeError  # Attributes, which a function might read.
    yield inspect.getattr_static(value, "__wrapped__")
    if isinstance(value, _WITH_RULES):
        yield from (getattr(value, name, None) for name in ("jvp", "fwd", "bwd"))


def _attribute(value: Any, names: Sequence[str]) -> object:
    """What an expression such as `jax.nn.relu` gives; the rest of it, if not a module.

    A module itself can be read in any way, so it does not count as immutable.
    """
    for name in names:
        if not isinstance(value, types.ModuleType):
            break
        value = getattr(value, name, value)
    return value


@functools.lru_cache(maxsize=1024)
def _names_read(code: types.CodeType) -> tuple[tuple[Any, ...], ...]:
    """The variables from outside that code reads, with the attributes read of them.

    Each is preceded by whether it is a global variable.
    """
    found: list[list[Any]] = []
    follows = False
    for instruction in dis.get_instructions(code):
        name, is_free = instruction.argval, instruction.argval in code.co_freevars
        changes_cell = instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
        if instruction.opname in _HIDDEN or (changes_cell and is_free):
            raise MayChangeError
        is_global = instruction.opname == "LOAD_GLOBAL"
        if is_global or (instruction.opname == "LOAD_DEREF" and is_free):
            found.append([is_global, name])
            follows = True
        elif follows and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found[-1].append(name)
        elif instruction.opname != "EXTENDED_ARG":
            follows = False
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.extend(map(list, _names_read(constant)))
    return tuple(dict.fromkeys(map(tuple, found)))
