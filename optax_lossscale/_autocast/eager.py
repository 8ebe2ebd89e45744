"""Compile a function once for its calls outside `jit`, where that is sound.

`autocast` traces a function anew at each call, because what the function reads beside
its arguments may have changed: a module's parameters, a setting, an iterator. If all
that it reads is immutable and still the same, then one compiled program gives the same
results, and is many times as fast.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from optax_lossscale._autocast.reads import MayChangeError, Reads

# A function of more values of its static arguments is compiled no more, because they
# may be different at each call, such as the number of a step.
_MOST_STATIC_VALUES = 8


class _Caller:
    """The function of one call. Equal to any other, so that JAX compiles only once."""

    def __init__(self, fun: Any, arrays: Sequence[Any]) -> None:
        self.fun = weakref.ref(fun)
        self.arrays = list(map(weakref.ref, arrays))  # That the function reads.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Caller)

    def __hash__(self) -> int:
        return 0


class _Compiled:
    """A compiled function, and what it read when it was compiled."""

    def __init__(self, reads: Reads, name: str, call: Callable[..., Any]) -> None:
        def compiled(
            caller: _Caller, static: Hashable, captured: list[Any], *arrays: Any
        ) -> Any:
            read = [reference() for reference in caller.arrays]
            pairs = list(zip(read, captured, strict=True))
            return call(caller.fun(), static, pairs, *arrays)

        compiled.__name__ = name
        self.call = jax.jit(compiled, static_argnums=(0, 1))
        self.static_values: set[Hashable] = set()
        self.shape = reads.shape
        self.objects = list(map(_reference, reads.objects))

    def is_valid(self, reads: Reads) -> bool:
        """Whether the function still reads the same objects."""
        if self.shape != reads.shape or len(self.objects) != len(reads.objects):
            return False
        pairs = zip(self.objects, reads.objects, strict=True)
        return all(reference() is value for reference, value in pairs)

    def accepts(self, static: Hashable) -> bool:
        """Whether it may be compiled for this value of its static arguments."""
        if len(self.static_values) < _MOST_STATIC_VALUES:
            self.static_values.add(static)
        return static in self.static_values


# By the code of a function, so that a lambda that is evaluated at each step is compiled
# once; then by the settings of autocast.
_COMPILED: weakref.WeakKeyDictionary[Any, dict[Hashable, _Compiled]] = (
    weakref.WeakKeyDictionary()
)


def compile_once(
    fun: Callable[..., Any],
    settings: Hashable,
    call: Callable[..., Any],
    static: Hashable,
) -> Callable[..., Any] | None:
    """Compiles `call(fun, static, captured, *arrays)`, in which `static` is static.

    `captured` are pairs of an array that `fun` reads and the argument that stands for
    it. A compiled program that held the arrays itself would keep them alive.

    Returns:
      The compiled function of the arrays, the same one while `fun` reads the same
      objects. None if a compiled program might differ from a new trace.
    """
    try:
        reads = Reads(fun)
    except MayChangeError:
        return None
    # The other settings of JAX are part of the key of a jitted function.
    settings = (settings, jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
    by_settings = _COMPILED.setdefault(getattr(fun, "__code__", fun), {})
    if settings not in by_settings:
        name = getattr(fun, "__name__", "autocast")
        by_settings[settings] = _Compiled(reads, name, call)
    compiled = by_settings[settings]
    if not compiled.is_valid(reads) or not compiled.accepts(static):
        return None
    caller = _Caller(fun, reads.arrays())
    return functools.partial(compiled.call, caller, static, reads.arrays())


def _reference(value: object) -> Callable[[], object]:
    """A reference to a value, weak if the value allows it."""
    try:
        return weakref.ref(value)
    except TypeError:  # A number or a string.
        return lambda: value
