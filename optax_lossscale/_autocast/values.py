"""The values of a program that is evaluated with casts.

An array may be narrower than the program declares. Where it comes from says in what the
operations that read it may compute.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._autocast.policy import LOW, MOVES
from optax_lossscale._tree import is_floating

ADDS = ("add", "add_any")


class Origin(enum.Enum):
    """Where a value comes from, as far as it says in what it may be computed."""

    COMPUTED = enum.auto()
    PRODUCT = enum.auto()  # A result of the low list, perhaps moved.
    ARGUMENT = enum.auto()  # An argument or a constant array, perhaps moved.
    BIAS = enum.auto()  # The same, of one axis: added to a product, its bias.
    HELD = enum.auto()  # A low value that a loop reads, in float32: see `_nested`.
    CUBE = enum.auto()  # A third power.
    SMALL_CUBE = enum.auto()  # The same times a small number, as in gelu.
    LARGE = enum.auto()  # A number that overflows in the low dtype, perhaps moved.
    NORMALIZED = enum.auto()  # At O2, what a normalization layer computes.
    CONSTANT = enum.auto()  # A number in the range of the low dtype: widens nothing.


OF_ARGUMENTS = (Origin.ARGUMENT, Origin.BIAS)


class Value(NamedTuple):
    """An array, perhaps narrower than the program says."""

    array: Any
    origin: Origin


def argument(array: Any) -> Value:
    """An argument, or a constant array, as a value."""
    return Value(array, Origin.BIAS if jnp.ndim(array) == 1 else Origin.ARGUMENT)


def literal(number: Any, dtype: Any) -> Value:
    """A number as a value; one that over- or underflows in the low dtype widens."""
    info, magnitude = jnp.finfo(dtype), float(np.abs(number))
    if float(info.max) < magnitude < float("inf"):
        return Value(number, Origin.LARGE)
    is_small = 0 < magnitude < float(info.tiny)
    return Value(number, Origin.COMPUTED if is_small else Origin.CONSTANT)


def as_operand(value: Value, atom: Any, equation: Any) -> Value:
    """A value as an operand: an argument of one axis that is broadcast is a bias."""
    is_argument = value.origin is Origin.ARGUMENT and equation.primitive.name in ADDS
    if is_argument and _is_row(atom.aval) and atom.aval != equation.outvars[0].aval:
        return Value(value.array, Origin.BIAS)
    return value


def _is_row(aval: Any) -> bool:
    return bool(aval.ndim > 0 and sum(size > 1 for size in aval.shape) <= 1)


def origin_of(equation: Any, operands: Sequence[Value]) -> Origin:
    """Where a result comes from."""
    name, origins = equation.primitive.name, {x.origin for x in operands}
    if name in LOW:
        return Origin.PRODUCT
    sum_of_products = {Origin.PRODUCT, Origin.BIAS, Origin.CONSTANT}
    if name in ADDS and {Origin.PRODUCT} <= origins <= sum_of_products:
        return Origin.PRODUCT
    if name == "convert_element_type" and origins == {Origin.CONSTANT}:
        return Origin.CONSTANT
    if name == "integer_pow" and equation.params["y"] == 3:
        return Origin.CUBE
    if name == "mul" and origins == {Origin.CUBE, Origin.CONSTANT}:
        numbers = [x.array for x in operands if x.origin is Origin.CONSTANT]
        is_small = all(np.ndim(x) == 0 and abs(float(x)) < 0.1 for x in numbers)
        return Origin.SMALL_CUBE if is_small else Origin.COMPUTED
    if name in MOVES | {"mul"} and Origin.LARGE in origins:
        return Origin.LARGE
    is_float = [is_floating(atom.aval) for atom in equation.invars]
    if sum(is_float) != 1 or name not in MOVES | {"convert_element_type"}:
        return Origin.COMPUTED
    origin, new = operands[is_float.index(True)].origin, equation.outvars[0].aval
    old = equation.invars[is_float.index(True)].aval
    is_row = new.ndim == 1 or (_is_row(old) and new.size > old.size)
    return Origin.BIAS if origin is Origin.ARGUMENT and is_row else origin


def cast(array: Any, dtype: Any) -> Any:
    """An array in a dtype."""
    same = jnp.result_type(array) == dtype
    return array if same else lax.convert_element_type(array, dtype)


def is_cast(atom: Any) -> bool:
    """Whether a value is declared as float32, so that it may be narrower."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and atom.aval.dtype == jnp.float32


def declared(atoms: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Arrays in the dtypes that the program declares."""
    return [
        cast(x, atom.aval.dtype) if is_cast(atom) else x
        for atom, x in zip(atoms, arrays, strict=True)
    ]


def is_move(equation: Any) -> bool:
    """Whether an operation moves float32 values, and does not change them."""
    name = equation.primitive.name
    atoms = [*equation.invars, *equation.outvars]
    # From float32 to float32: `x.astype(jnp.float32)` after a product vanishes.
    is_cast_to_itself = name == "convert_element_type" and all(map(is_cast, atoms))
    return name in MOVES or is_cast_to_itself
