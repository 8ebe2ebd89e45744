"""Values that are computed twice, and the tape on which operations are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from optax_lossscale._operations.statistics import Health, Statistics, measure
from optax_lossscale._tree import REFERENCES, is_floating

Pair = tuple[Any, Any]  # An array and its reference, or None if both are one.


class Value(NamedTuple):
    """An array, and what it would be in float32.

    Attributes:
      array: The array as the program computes it.
      reference: The same in float32; the very same object if nothing was rounded.
      health: What the operation that made it hands on; None for sound numbers.
      is_scaled: Whether it depends on the loss scale.
      statistics: The numbers of that operation, if it has one result only.
    """

    array: Any
    reference: Any
    health: Health | None = None
    is_scaled: bool = False
    statistics: Statistics | None = None


class Record(NamedTuple):
    """What is known of an operation before it runs.

    Attributes:
      primitive: Name of the primitive.
      where: Line and function that it was written in.
      scope: Names of the scopes around it.
      is_backward: Whether only gradients depend on its result.
      is_transposed: Whether it belongs to a backward pass, even if more depends on it.
      is_scaled: Whether its result depends on the loss scale.
      is_recomputed: Whether it may repeat an operation of the forward pass.
      dtype: The dtype of its first floating result.
      shape: The shape of that result.
      loop: The number of the outermost loop around it; None outside of loops.
    """

    primitive: str
    where: str
    scope: tuple[str, ...]
    is_backward: bool
    is_transposed: bool
    is_scaled: bool
    is_recomputed: bool
    dtype: np.dtype
    shape: tuple[int, ...]
    loop: int | None


class Context(NamedTuple):
    """What surrounds a program.

    Attributes:
      where: Line and function that called for it.
      scope: Names of the scopes around it.
      is_transposed: Whether it belongs to a backward pass.
      is_recomputed: Whether it is computed again for the backward pass.
      loop: The number of the outermost loop around it; None outside of loops.
    """

    where: str
    scope: tuple[str, ...] = ()
    is_transposed: bool = False
    is_recomputed: bool = False
    loop: int | None = None


class Tape:
    """The operations of one trace, and their numbers, in order of execution.

    Attributes:
      records: A record for each operation.
      statistics: The statistics of each operation.
      clock: `i32[]`. How many iterations of loops have begun before.
      starts: The clock at the start of each loop that no other loop holds.
      has_references: Whether each operation also runs in float32. If not, a value is
        its own reference.
    """

    def __init__(self, clock: Any, *, has_references: bool = True) -> None:
        self.records: list[Record] = []
        self.statistics: list[Statistics] = []
        self.clock = clock
        self.starts: list[Any] = []
        self.has_references = has_references


class Frame(NamedTuple):
    """One equation that holds programs, and the means to evaluate them.

    Attributes:
      run: `shadow.run`, which evaluates a program. It is passed in, because importing
        it where it is needed would be circular.
      equation: The equation.
      operands: The values that it reads.
      tape: Where its operations are recorded.
      context: What surrounds its programs.
      is_forward: For each result, whether more than gradients depend on it.
      is_live: For each result, whether anything depends on it.
    """

    run: Callable[..., list[Value]]
    equation: core.JaxprEqn
    operands: list[Value]
    tape: Tape
    context: Context
    is_forward: list[bool]
    is_live: list[bool]


def as_argument(array: Any) -> Value:
    """The value of an argument or a constant."""
    return of_arrays(array, widened(array))


def of_number(number: Any) -> Value:
    """The value of a literal, which is nearly always sound."""
    is_float = np.issubdtype(jnp.result_type(number), np.inexact)
    if not is_float or np.all(np.isfinite(number)):
        return Value(number, widened(number))
    return as_argument(jnp.asarray(number))


def is_float(array: Any) -> bool:
    """Whether an array is floating; a `jax.Ref` is none."""
    return not isinstance(array, REFERENCES) and is_floating(array)


def of_arrays(array: Any, reference: Any, is_scaled: bool = False) -> Value:
    """The value of an array whose health is not known."""
    health = None
    if is_float(array):
        _, health = measure([array], [reference], [], np.int32(0))
    return Value(array, reference, health, is_scaled)


def is_narrow(array: Any) -> bool:
    """Whether an array has fewer than 32 bits."""
    return is_float(array) and jnp.finfo(jnp.result_type(array)).bits < 32


def widened(array: Any) -> Any:
    """An array in float32 if it is narrower, else the very same object."""
    return lax.convert_element_type(array, jnp.float32) if is_narrow(array) else array


def pairs_of(values: Sequence[Value]) -> list[Pair]:
    """The arrays with their references, to pass into a trace; None for equal ones."""
    return [(x.array, None if x.reference is x.array else x.reference) for x in values]


def separate_pairs_of(values: Sequence[Value]) -> list[Pair]:
    """The same, with a reference for each floating array, as a loop carries them."""
    return [(x.array, x.reference if is_float(x.array) else None) for x in values]


def of_pairs(pairs: Sequence[Pair], is_scaled: Sequence[bool]) -> list[Value]:
    """The values of arrays with their references."""
    return [
        of_arrays(array, array if reference is None else reference, flag)
        for (array, reference), flag in zip(pairs, is_scaled, strict=True)
    ]
