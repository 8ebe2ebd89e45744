"""Exponents, read from the bits of a number, so that nothing is rounded or flushed.

XLA's `log2` and `exp2` are wrong at some exact powers of two, and comparisons and
arithmetic on a CPU or TPU take subnormal numbers for zero.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LOWEST = -(2**20)  # Below any exponent.


class Split(NamedTuple):
    """A number `x`, any shape: `abs(x) = mantissa * 2**exponent` where it is nonzero.

    Attributes:
      exponent: `i32`. `floor(log2(abs(x)))`.
      mantissa: `f32`, or `f64` of float64, from 1 to below 2.
      is_zero: `bool`.
      is_finite: `bool`.
    """

    exponent: jax.Array
    mantissa: jax.Array
    is_zero: jax.Array
    is_finite: jax.Array


def split(x: jax.Array) -> Split:
    """Splits real floating numbers exactly, subnormal ones too."""
    wide, unsigned, size, digits = jnp.float32, jnp.uint32, 32, 23
    if x.dtype == jnp.float64:
        wide, unsigned, size, digits = jnp.float64, jnp.uint64, 64, 52
    bias = int(jnp.finfo(wide).maxexp) - 1
    magnitude = _bits(x, unsigned) & unsigned((1 << (size - 1)) - 1)
    field = (magnitude >> unsigned(digits)).astype(jnp.int32)
    fraction = magnitude & unsigned((1 << digits) - 1)
    # The leading one of a subnormal number is moved to where that of others is implied.
    shift = lax.clz(fraction) - unsigned(size - 1 - digits)
    is_subnormal = field == 0
    exponent = jnp.where(is_subnormal, 1 - shift.astype(jnp.int32), field)
    fraction = jnp.where(is_subnormal, fraction << shift, fraction)
    one = unsigned(bias << digits)
    fraction = (fraction & unsigned((1 << digits) - 1)) | one
    return Split(
        exponent=exponent - bias,
        mantissa=lax.bitcast_convert_type(fraction, wide),
        is_zero=magnitude == 0,
        is_finite=field != 2 * bias + 1,
    )


def split_number(number: float) -> Split:
    """Splits a positive number, which may be beyond float32."""
    mantissa, exponent = math.frexp(number)
    return Split(
        exponent=jnp.int32(exponent - 1),
        mantissa=jnp.float32(2 * mantissa),
        is_zero=jnp.asarray(False),
        is_finite=jnp.asarray(True),
    )


def largest_of(arrays: Iterable[Split]) -> Split:
    """The largest finite one; whether all is zero, and whether all is finite."""
    exponent, mantissa = jnp.int32(_LOWEST), jnp.float32(1)
    is_finite = jnp.asarray(True)
    for array in arrays:
        exponents = jnp.where(array.is_finite & ~array.is_zero, array.exponent, _LOWEST)
        top = jnp.max(exponents, initial=_LOWEST)
        of_top = jnp.where(exponents == top, array.mantissa.astype(jnp.float32), 1.0)
        of_top = jnp.max(of_top, initial=1.0)
        both = jnp.where(top == exponent, jnp.maximum(mantissa, of_top), of_top)
        mantissa = jnp.where(top >= exponent, both, mantissa)
        exponent = jnp.maximum(top, exponent)
        is_finite &= jnp.all(array.is_finite)
    return Split(exponent, mantissa, exponent == _LOWEST, is_finite)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """`2**exponent` as float32, exactly, for exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def exponent_of_quotient(dividend: Split, divisor: Split) -> jax.Array:
    """`floor(log2(dividend / divisor))`; no quotient is rounded."""
    below = jnp.where(dividend.mantissa < divisor.mantissa, 1, 0)
    return dividend.exponent - divisor.exponent - below


def _bits(x: jax.Array, unsigned: type) -> jax.Array:
    """The bits of a float, after an exact cast to 32 of them where it has fewer."""
    if x.dtype == jnp.bfloat16:  # A cast might flush subnormals; this is the same.
        halves = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return jnp.left_shift(halves, jnp.uint32(16))
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    bits: jax.Array = lax.bitcast_convert_type(wide, unsigned)
    return bits
