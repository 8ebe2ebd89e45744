"""The values of a program that is evaluated with casts.

An array may be narrower than the program declares. Its origin decides in which dtype
the operations that read it may compute.
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
    """Where a value comes from, as far as this matters for casts."""

    COMPUTED = enum.auto()  # Any value not named below; it counts as its own dtype.
    PRODUCT = enum.auto()  # A result of an operation in `LOW`, perhaps moved.
    ARGUMENT = enum.auto()  # An argument or a constant array, perhaps moved.
    BIAS = enum.auto()  # An ARGUMENT of one axis: if added to a product, its bias.
    LOOP_CONSTANT = enum.auto()  # A low value that a loop reads at each step.
    CUBE = enum.auto()  # A third power.
    SMALL_CUBE = enum.auto()  # A third power times a small number, as in gelu.
    LARGE = enum.auto()  # A number beyond the low dtype, perhaps moved or multiplied.
    NORMALIZED = enum.auto()  # At O2, a result computed in a normalization layer.
    CONSTANT = enum.auto()  # A number that the low dtype can hold; it widens nothing.


OF_ARGUMENTS = (Origin.ARGUMENT, Origin.BIAS)


class Value(NamedTuple):
    """An array, perhaps narrower than declared, and its origin."""

    array: Any
    origin: Origin


def as_argument(array: Any) -> Value:
    """The value of an argument or of a constant array."""
    return Value(array, Origin.BIAS if jnp.ndim(array) == 1 else Origin.ARGUMENT)


def as_literal(number: Any, dtype: Any) -> Value:
    """The value of a number, which widens if the low dtype cannot represent it."""
    if getattr(number, "dtype", None) == jax.dtypes.float0:
        return Value(number, Origin.CONSTANT)
    info, magnitude = jnp.finfo(dtype), float(np.abs(number))
    if float(info.max) < magnitude < float("inf"):
        return Value(number, Origin.LARGE)
    is_small = 0 < magnitude < float(info.tiny)
    return Value(number, Origin.COMPUTED if is_small else Origin.CONSTANT)


def as_operand(value: Value, atom: Any, equation: Any) -> Value:
    """The value as an equation reads it; a row that is broadcast in a sum is a bias."""
    is_argument = value.origin is Origin.ARGUMENT and equation.primitive.name in ADDS
    if (
        is_argument
        and _has_one_long_axis(atom.aval)
        and atom.aval != equation.outvars[0].aval
    ):
        return Value(value.array, Origin.BIAS)
    return value


def _has_one_long_axis(aval: Any) -> bool:
    """Whether at most one axis is longer than 1."""
    return bool(aval.ndim > 0 and sum(size > 1 for size in aval.shape) <= 1)


def origin_of(equation: Any, operands: Sequence[Value]) -> Origin:
    """The origin of an equation's results; the first rule that applies decides."""
    name, origins = equation.primitive.name, {x.origin for x in operands}
    if name in LOW:
        return Origin.PRODUCT
    sum_of_products = {Origin.PRODUCT, Origin.BIAS, Origin.CONSTANT}
    if name in ADDS and Origin.PRODUCT in origins and origins <= sum_of_products:
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
    if name in MOVES or name == "convert_element_type":
        return _origin_of_moved(equation, operands)
    return Origin.COMPUTED


def _origin_of_moved(equation: Any, operands: Sequence[Value]) -> Origin:
    """The origin of a moved value: its own, if it is the only floating operand."""
    is_float = [is_floating(atom.aval) for atom in equation.invars]
    if sum(is_float) != 1:
        return Origin.COMPUTED
    place = is_float.index(True)
    old, new = equation.invars[place].aval, equation.outvars[0].aval
    becomes_row = new.ndim == 1 or (_has_one_long_axis(old) and new.size > old.size)
    origin = operands[place].origin
    return Origin.BIAS if origin is Origin.ARGUMENT and becomes_row else origin


def cast(array: Any, dtype: Any) -> Any:
    """Casts an array to a dtype, if it has another one."""
    same = jnp.result_type(array) == dtype
    return array if same else lax.convert_element_type(array, dtype)


def is_float32(atom: Any) -> bool:
    """Whether a value is declared as float32; only such values are ever cast."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and atom.aval.dtype == jnp.float32


def as_declared(atoms: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Casts arrays to the dtypes that the program declares."""
    return [
        cast(x, atom.aval.dtype) if is_float32(atom) else x
        for atom, x in zip(atoms, arrays, strict=True)
    ]


def is_move(equation: Any) -> bool:
    """Whether an operation moves values without changing them."""
    name = equation.primitive.name
    atoms = [*equation.invars, *equation.outvars]
    # An explicit cast of a product to float32 is traced as float32 to float32.
    is_cast_to_itself = name == "convert_element_type" and all(map(is_float32, atoms))
    return name in MOVES or is_cast_to_itself
