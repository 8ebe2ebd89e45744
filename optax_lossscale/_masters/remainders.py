"""The bits of a float32 master that its half-precision parameter lacks.

A master is written in the format of its parameter, extended by 16 bits of mantissa. For
bfloat16 that is float32 itself. For float16 it has 26 bits of mantissa, 3 more than
float32, and it ends where float16 does: its smallest number is `2**-40`. Without the
sign, the extended bits are an integer of 31 bits. Rounded to the upper 15, they are the
bits of the parameter, and the remainder completes these:

    parameter = round(extended / 2**16)
    remainder = extended - 2**16 * parameter, from -2**15 to 2**15 - 1

For example, the bfloat16 parameter of the master 0x3F808001 is 0x3F81, to which
0x8001 is rounded up, and the remainder is 0x3F808001 - 0x3F810000 = -0x7FFF.

A tie, such as the master 0x3F808000, lies midway between two parameters. There are
65,537 remainders from `-2**15` to `2**15`, one more than 16 bits can hold. So in
bfloat16 ties are rounded away from zero, and no remainder is `2**15`. In float16 they
are rounded to the even parameter, as by a cast, and a remainder of `2**15` is stored as
`2**15 - 1`. A master of at least `2**-16` is a multiple of two units, so no other one
has that remainder, and when the two are joined it is rounded to the tie again.

All this is integer arithmetic, because XLA leaves out some casts.
"""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_Arrays: TypeAlias = tuple[jax.Array, jax.Array]
_BFLOAT16 = jnp.dtype(jnp.bfloat16)
_FLOAT16 = jnp.dtype(jnp.float16)
# Of 16 bits. Two dtypes, so that one cannot be taken for the other.
REMAINDERS = {_BFLOAT16: np.dtype(np.int16), _FLOAT16: np.dtype(np.uint16)}
_SIGN = 0x8000
_UNSIGNED = 0x7FFF
_NAN = {_BFLOAT16: 0x7FC0, _FLOAT16: 0x7E00}
_INFINITY = 31 << 26  # In extended float16.
_INFINITY_32 = 0x7F800000
_BIASES = 112 << 23  # By which the exponents of float32 exceed those of float16.
_LEAST_NORMAL_32 = 113 << 23
_LEAST_NORMAL = 1 << 26
_LEAST = 2.0**-40


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_master(master: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The parameter of a float32 master, in float16 or bfloat16.

    Its derivative is that of a cast.
    """
    bits = _rounded_bits(master, dtype).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, dtype)


@round_master.defjvp
def _(
    dtype: jnp.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> _Arrays:
    return round_master(*primals, dtype), tangents[0].astype(dtype)


# Jitted, here and below, so that outside `jit` it is one dispatch.
@partial(jax.jit, static_argnames="dtype")
def _rounded_bits(master: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The bits of a float32 master that is rounded to a dtype, `i32`."""
    extended = _extended(master, dtype)
    is_even = 1 - ((extended >> 16) & 1)
    half = 0x8000 if dtype == _BFLOAT16 else 0x8000 - is_even
    magnitude = (extended + half) >> 16
    if dtype == _FLOAT16:  # The extended bits of small masters are rounded already.
        small = jnp.minimum(_magnitude(master), _LEAST_NORMAL_32)
        count = _count(small, 2.0**-24)
        magnitude = jnp.where(small < _LEAST_NORMAL_32, count, magnitude)
    return magnitude | _sign(master)


@jax.jit
def remainder_of(master: jax.Array, param: jax.Array) -> jax.Array:
    """The remainder that completes a parameter to its master, in its dtype.

    A parameter that is zero may lose its sign when an update is added, so that of its
    master is in the remainder.

    If the parameter is not the nearest one to the master, the remainder completes it to
    its own value.
    """
    magnitude = _bits(param) & _UNSIGNED
    remainder = _extended(master, param.dtype) - (magnitude << 16)
    largest = _UNSIGNED if param.dtype == _BFLOAT16 else _SIGN
    is_nearest = (remainder >= -_SIGN) & (remainder <= largest)
    remainder = jnp.minimum(remainder, _UNSIGNED)
    remainder = jnp.where(magnitude == 0, remainder - _sign(master), remainder)
    return _stored(jnp.where(is_nearest, remainder, 0), param.dtype)


@jax.jit
def first_remainder(param: jax.Array) -> jax.Array:
    """The remainder that completes a parameter to its own value."""
    return _stored(jnp.where(_bits(param) == _SIGN, -_SIGN, 0), param.dtype)


def _stored(remainder: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A remainder as it is stored for parameters of a dtype."""
    return lax.bitcast_convert_type(remainder.astype(jnp.int16), REMAINDERS[dtype])


@jax.custom_jvp
def join_master(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """The float32 master of a parameter and its remainder.

    If a finite parameter was changed since, the master is within half a unit of its
    last place of it, whatever the remainder. The derivative is that of a cast.
    """
    return lax.bitcast_convert_type(_master_bits(param, remainder), jnp.float32)


@join_master.defjvp
def _(primals: _Arrays, tangents: _Arrays) -> _Arrays:
    return join_master(*primals), tangents[0].astype(jnp.float32)


@jax.jit
def _master_bits(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """The bits of the master, `i32`."""
    bits = _bits(param)
    remainder = lax.bitcast_convert_type(remainder, jnp.int16).astype(jnp.int32)
    magnitude = bits & _UNSIGNED
    is_zero = magnitude == 0
    is_negative = jnp.where(is_zero, remainder < 0, bits >= _SIGN)
    remainder = jnp.where(is_zero, remainder & _UNSIGNED, remainder)
    extended = (magnitude << 16) + remainder
    wide = extended if param.dtype == _BFLOAT16 else _from_extended_float16(extended)
    return wide | jnp.where(is_negative, jnp.int32(-(2**31)), 0)


def _extended(master: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The magnitude of a master in the extended format of a dtype, `i32`."""
    magnitude = _magnitude(master)
    extended = magnitude if dtype == _BFLOAT16 else _to_extended_float16(magnitude)
    return jnp.where(magnitude > _INFINITY_32, _NAN[dtype] << 16, extended)


def _to_extended_float16(magnitude: jax.Array) -> jax.Array:
    """The extended bits of float16 for those of float32; infinity from `2**16` on."""
    two_to_16 = (16 + 127) << 23  # The bits of 2**16, which float16 has as infinity.
    normal = (jnp.minimum(magnitude, two_to_16) - _BIASES) << 3  # 26 bits, not 23.
    small = jnp.minimum(magnitude, _LEAST_NORMAL_32)
    return jnp.where(small < _LEAST_NORMAL_32, _count(small, _LEAST), normal)


def _count(magnitude: jax.Array, unit: float) -> jax.Array:
    """How often a unit fits in a float32 number with these bits, rounded to nearest."""
    count = lax.bitcast_convert_type(magnitude, jnp.float32) / unit
    return lax.round(count, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)


def _from_extended_float16(extended: jax.Array) -> jax.Array:
    """The bits of float32 for the extended ones of float16."""
    count = extended.astype(jnp.float32) * _LEAST
    normal = ((extended + 4) >> 3) + _BIASES
    is_finite = extended < _INFINITY
    return jnp.where(
        extended < _LEAST_NORMAL,
        lax.bitcast_convert_type(count, jnp.int32),
        jnp.where(is_finite, normal, normal + _BIASES),  # 143 + 112 is infinity's 255.
    )


def _bits(array: jax.Array) -> jax.Array:
    """The bits of an array of 16-bit or float32 numbers, `i32`."""
    if array.dtype.itemsize == 2:
        return lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.int32)
    return lax.bitcast_convert_type(array, jnp.int32)


def _magnitude(master: jax.Array) -> jax.Array:
    """The bits of a float32 master without its sign."""
    return _bits(master) & 0x7FFFFFFF


def _sign(master: jax.Array) -> jax.Array:
    """The sign bit of a master, in the place that it has in the parameter."""
    return jnp.where(_bits(master) < 0, _SIGN, 0)
