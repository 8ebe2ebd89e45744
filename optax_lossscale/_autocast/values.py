"""The values of a program that is evaluated with casts.

An array may be narrower than the program declares. Its origin decides in which dtype
the operations that read it may compute.
"""

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._autocast.identity import (
    Identity,
    identity_of_literal,
    is_square,
    new_identity,
)
from optax_lossscale._autocast.policy import COMMUTES, LISTED, LOW, MOVES, POWERS
from optax_lossscale._jaxprs import INLINING_KEEPS_LINES
from optax_lossscale._tree import is_floating

ADDS = ("add", "add_any")
SUMS_OF_TWO = (*ADDS, "sub")


class Origin(enum.Enum):
    """Where a value comes from, as far as this matters for casts."""

    COMPUTED = enum.auto()  # Any value not named below; it counts as its own dtype.
    PRODUCT = enum.auto()  # A low result of an operation in `LOW`, perhaps moved.
    SATURATED = enum.auto()  # A low sum with a bias, which may be a mask.
    ARGUMENT = enum.auto()  # An argument or a constant array, perhaps moved.
    BIAS = enum.auto()  # An ARGUMENT of one axis: if added to a product, its bias.
    LOOP_CONSTANT = enum.auto()  # A low value that a loop reads at each step.
    POWER = enum.auto()  # A power of a low value, or a polynomial with one.
    WIDE = enum.auto()  # A number that the low dtype cannot hold, or a sum with one.
    NORMALIZED = enum.auto()  # At O2, a result computed in a normalization layer.
    CONSTANT = enum.auto()  # A number that the low dtype can hold; it widens nothing.


OF_ARGUMENTS = (Origin.ARGUMENT, Origin.BIAS)
OF_PRODUCTS = (Origin.PRODUCT, Origin.SATURATED)
# Values whose entries may be masks, such as -1e9, before or after they were rounded.
MAY_MASK = {Origin.SATURATED, *OF_ARGUMENTS}
OF_MASKS = (Origin.SATURATED, Origin.WIDE)


class Source(enum.IntEnum):
    """What a value is computed from: the greatest of what goes into it."""

    NUMBERS = 0  # Nothing that has a gradient.
    ITSELF = 1  # Nothing: it is an argument in float32, as a parameter is.
    ARGUMENTS = 2  # Such arguments, and in float32: `w.T`, or `w / norm(w)`.
    PRODUCTS = 3  # A product, an entry that was looked up, or anything else.


OF_PARAMETERS = (Source.ITSELF, Source.ARGUMENTS)
# Operations whose results have the source of their operands.
_OF_THEIR_OPERANDS = (LISTED | {"convert_element_type"}) - LOW - {"gather"}


class Value(NamedTuple):
    """An array, perhaps narrower than declared, and what is known of it."""

    array: Any
    origin: Origin
    identity: Identity | None = None
    source: Source = Source.PRODUCTS
    is_tangent: bool = False  # In a rule of `custom_jvp`, which JAX may transpose.


def identities(values: Sequence[Value]) -> list[Identity]:
    """The identities of some values; those that have none get one of their own."""
    return [value.identity or new_identity() for value in values]


def identified(values: Sequence[Value], known: Sequence[Identity]) -> list[Value]:
    """Gives an identity to each of some values that has none."""
    return [
        value._replace(identity=value.identity or identity)
        for value, identity in zip(values, known, strict=True)
    ]


def as_argument(array: Any) -> Value:
    """The value of an argument or of a constant array."""
    origin = Origin.BIAS if jnp.ndim(array) == 1 else Origin.ARGUMENT
    is_wide = jax.typeof(array).dtype == jnp.float32
    source = Source.ITSELF if is_wide else Source.PRODUCTS
    return Value(array, origin, source=source)


def as_literal(number: Any, dtype: Any) -> Value:
    """The value of a number, which widens if the low dtype cannot represent it."""
    identity = identity_of_literal(number)
    constant = Value(number, Origin.CONSTANT, identity, Source.NUMBERS)
    if jnp.result_type(number) == jax.dtypes.float0:
        return constant
    info, magnitude = jnp.finfo(dtype), float(np.abs(number))
    is_large = float(info.max) < magnitude < float("inf")
    is_wide = is_large or 0 < magnitude < float(info.tiny)
    return constant._replace(origin=Origin.WIDE) if is_wide else constant


def recomputed(value: Value, array: Any, origin: Origin) -> Value:
    """A new value that was computed from another one."""
    return Value(array, origin, is_tangent=value.is_tangent)


def values_like(operands: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """The operands with other arrays."""
    pairs = zip(arrays, operands, strict=True)
    return [operand._replace(array=array) for array, operand in pairs]


def as_computed(
    arrays: Sequence[Any], sources: Sequence[Source] = (), *, is_tangent: bool = False
) -> list[Value]:
    """Values of arrays that some operation computed."""
    sources = sources or [Source.PRODUCTS] * len(arrays)
    return [
        Value(array, Origin.COMPUTED, source=source, is_tangent=is_tangent)
        for array, source in zip(arrays, sources, strict=True)
    ]


def as_normalized(value: Value) -> Value:
    """Marks a result of a normalization layer."""
    is_computed = value.origin is Origin.COMPUTED
    return value._replace(origin=Origin.NORMALIZED) if is_computed else value


def as_results(results: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """The results of a loop or of devices; a mask in them is still one."""
    origins = [x.origin if x.origin in OF_MASKS else Origin.COMPUTED for x in results]
    return list(map(recomputed, results, arrays, origins))


def has_tangent(values: Sequence[Value]) -> bool:
    """Whether a tangent is among the values."""
    return any(value.is_tangent for value in values)


def as_operand(value: Value, atom: Any, equation: Any) -> Value:
    """The value as an equation reads it; a row that is broadcast in a sum is a bias."""
    is_argument = value.origin is Origin.ARGUMENT and equation.primitive.name in ADDS
    if (
        is_argument
        and _has_one_long_axis(atom.aval)
        and atom.aval != equation.outvars[0].aval
    ):
        return value._replace(origin=Origin.BIAS)
    return value


def _has_one_long_axis(aval: Any) -> bool:
    """Whether at most one axis is longer than 1."""
    return bool(aval.ndim > 0 and sum(size > 1 for size in aval.shape) <= 1)


def origin_of(equation: Any, operands: Sequence[Value]) -> Origin:
    """The origin of an equation's results; the first rule that applies decides."""
    name, origins = equation.primitive.name, {x.origin for x in operands}
    if name in LOW:
        return Origin.PRODUCT
    if name == "convert_element_type" and origins == {Origin.CONSTANT}:
        return Origin.CONSTANT
    is_power = name in POWERS or is_square(equation, identities(operands))
    if is_power and any(dtype_in_jax(x.array).itemsize == 2 for x in operands):
        return Origin.POWER
    if name in COMMUTES | {*SUMS_OF_TWO, "mul"} and Origin.WIDE in origins:
        return Origin.WIDE
    is_scaled = name == "mul" and origins == {Origin.POWER, Origin.CONSTANT}
    if is_scaled or (name in SUMS_OF_TWO and Origin.POWER in origins):
        return Origin.POWER
    if name in ADDS and Origin.PRODUCT in origins <= {Origin.PRODUCT, Origin.CONSTANT}:
        return Origin.PRODUCT
    if name in MOVES or name == "convert_element_type":
        origin = _origin_of_moved(equation, operands)
        if origin is not None:
            return origin
    if origins & MAY_MASK and keeps_masks(equation, operands):
        return Origin.SATURATED
    return Origin.COMPUTED


def source_of(equation: Any, operands: Sequence[Value]) -> Source:
    """The source of an equation's results, if they are in float32."""
    name, pairs = equation.primitive.name, zip(operands, equation.invars, strict=True)
    sources = [value.source for value, atom in pairs if is_floating(atom.aval)]
    if sources and name not in _OF_THEIR_OPERANDS:
        return Source.PRODUCTS
    source = max(sources, default=Source.NUMBERS)
    return Source.ARGUMENTS if source is Source.ITSELF else source


def keeps_masks(equation: Any, operands: Sequence[Value]) -> bool:
    """Whether a mask in an operand is still one in the result.

    So it is in sums, in a value times one number, and where entries are moved.
    """
    name = equation.primitive.name
    if name not in ("mul", "div"):
        return name in SUMS_OF_TWO or name in COMMUTES | {"sort", "top_k"}
    numbers = [
        value.origin is Origin.CONSTANT or atom.aval.size <= 1
        for value, atom in zip(operands, equation.invars, strict=True)
    ]
    if numbers == [False, True]:
        return operands[0].origin in MAY_MASK
    return name == "mul" and numbers == [True, False] and operands[1].origin in MAY_MASK


def _origin_of_moved(equation: Any, operands: Sequence[Value]) -> Origin | None:
    """The origin of what is moved, if it has one; rows of arguments become a bias."""
    atoms, new = equation.invars, equation.outvars[0].aval
    moved = [i for i, atom in enumerate(atoms) if is_floating(atom.aval)]
    origins = {operands[i].origin for i in moved}
    if len(moved) != 1 and not (origins and origins <= {*OF_ARGUMENTS}):
        return None
    old, origin = atoms[moved[0]].aval, operands[moved[0]].origin
    becomes_row = new.ndim == 1 or (_has_one_long_axis(old) and new.size > old.size)
    if len(moved) > 1:
        return Origin.BIAS if new.ndim == 1 else Origin.ARGUMENT
    return Origin.BIAS if origin is Origin.ARGUMENT and becomes_row else origin


def dtype_in_jax(array: Any) -> Any:
    """The dtype of an array or number as an operation reads it."""
    # `result_type` takes longer, and this is asked many times for each operation.
    is_tracer = isinstance(array, jax.core.Tracer)
    return array.aval.dtype if is_tracer else jnp.result_type(array)


def cast(array: Any, dtype: Any) -> Any:
    """Casts an array to a dtype, if it has another one."""
    same = dtype_in_jax(array) == dtype
    return array if same else _convert(array, dtype)


_convert = lax.convert_element_type
if not INLINING_KEEPS_LINES:  # Else a cast would have the line of the first one.
    _convert = jax.jit(_convert, static_argnums=1, inline=True)


def narrow(value: Value, dtype: Any) -> Any:
    """Casts a value's array; what may be a mask stays finite."""
    is_wider = dtype_in_jax(value.array).itemsize > jnp.dtype(dtype).itemsize
    may_mask = value.origin in MAY_MASK and not value.is_tangent
    to = _saturate if is_wider and may_mask else cast
    return to(value.array, dtype)


@functools.partial(jax.jit, static_argnums=1)
def _saturate(array: Any, dtype: Any) -> Any:
    """Casts; finite numbers beyond the range of the dtype become the ends of the range.

    The derivative is that of the plain cast, and the backward pass needs nothing saved.
    """
    is_finite = lax.is_finite(array)
    finite = lax.stop_gradient(lax.select(is_finite, array, lax.full_like(array, 0)))
    limit = np.asarray(jnp.finfo(dtype).max, array.dtype)
    # The difference is 0, or what is not finite, and carries the derivative.
    inside = lax.clamp(-limit, finite, limit) + (array - finite)
    return lax.convert_element_type(inside, dtype)


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
