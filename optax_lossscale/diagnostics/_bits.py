"""Exponents and mantissas, read from the bits of a number.

Reading the bits is always exact. XLA's `log2` and `exp2` are wrong at some exact powers
of two, and on a CPU or TPU arithmetic and comparisons treat subnormal numbers as zero.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._ground.tree import keep_rounding

_LOWEST = -(2**20)  # Below the exponent of any float.


class Split(NamedTuple):
    """Numbers `x` of any shape: `abs(x) = mantissa * 2**exponent` where `x` is nonzero.

    Attributes:
      exponent: `i32`. `floor(log2(abs(x)))`.
      mantissa: From 1 to below 2; `f64` if `x` is float64, else `f32`.
      is_zero: `bool`.
      is_finite: `bool`.
    """

    exponent: jax.Array
    mantissa: jax.Array
    is_zero: jax.Array
    is_finite: jax.Array


def split(x: jax.Array) -> Split:
    """Splits real floating numbers exactly, subnormal numbers included."""
    wide, unsigned, size, mantissa_bits = jnp.float32, jnp.uint32, 32, 23
    if x.dtype == jnp.float64:
        wide, unsigned, size, mantissa_bits = jnp.float64, jnp.uint64, 64, 52
    bias = int(jnp.finfo(wide).maxexp) - 1
    magnitude = _bits(x, unsigned) & unsigned((1 << (size - 1)) - 1)
    biased_exponent = (magnitude >> unsigned(mantissa_bits)).astype(jnp.int32)
    fraction = magnitude & unsigned((1 << mantissa_bits) - 1)
    # A subnormal number has no implied leading one: shift its own into that place.
    shift = lax.clz(fraction) - unsigned(size - 1 - mantissa_bits)
    is_subnormal = biased_exponent == 0
    exponent = jnp.where(is_subnormal, 1 - shift.astype(jnp.int32), biased_exponent)
    fraction = jnp.where(is_subnormal, fraction << shift, fraction)
    bits_of_one = unsigned(bias << mantissa_bits)
    fraction = (fraction & unsigned((1 << mantissa_bits) - 1)) | bits_of_one
    return Split(
        exponent=exponent - bias,
        mantissa=lax.bitcast_convert_type(fraction, wide),
        is_zero=magnitude == 0,
        is_finite=biased_exponent != 2 * bias + 1,
    )


def split_number(number: float) -> Split:
    """Splits a positive Python number, which may lie outside float32's range."""
    mantissa, exponent = math.frexp(number)
    return Split(
        exponent=jnp.int32(exponent - 1),
        mantissa=jnp.float32(2 * mantissa),
        is_zero=jnp.asarray(False),
        is_finite=jnp.asarray(True),
    )


def largest_of(arrays: Iterable[Split]) -> Split:
    """The parts of the largest finite magnitude, its mantissa rounded to float32.

    `is_zero` says whether all finite entries are zero, `is_finite` whether all entries
    are finite.
    """
    exponent, mantissa = jnp.int32(_LOWEST), jnp.float32(1)
    is_finite = jnp.asarray(True)
    for parts in arrays:
        exponents = jnp.where(parts.is_finite & ~parts.is_zero, parts.exponent, _LOWEST)
        top = jnp.max(exponents, initial=_LOWEST)
        at_top = jnp.where(exponents == top, parts.mantissa.astype(jnp.float32), 1.0)
        top_mantissa = jnp.max(at_top, initial=1.0)
        larger = jnp.maximum(mantissa, top_mantissa)
        mantissa = jnp.where(top == exponent, larger, mantissa)
        mantissa = jnp.where(top > exponent, top_mantissa, mantissa)
        exponent = jnp.maximum(top, exponent)
        is_finite &= jnp.all(parts.is_finite)
    return Split(exponent, mantissa, exponent == _LOWEST, is_finite)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """`2**exponent` as float32 from -126 to 127; 0 for -127, infinity for 128."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def exponent_of_quotient(dividend: Split, divisor: Split) -> jax.Array:
    """`floor(log2(dividend / divisor))`, computed without rounding a quotient."""
    borrow = jnp.where(dividend.mantissa < divisor.mantissa, 1, 0)
    return dividend.exponent - divisor.exponent - borrow


def _bits(x: jax.Array, unsigned: type) -> jax.Array:
    """The bits of a float; floats narrower than 32 bits are widened exactly first."""
    if x.dtype == jnp.bfloat16:  # A cast might flush subnormal numbers; a shift cannot.
        upper_half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return jnp.left_shift(upper_half, jnp.uint32(16))
    wide = x if x.dtype == jnp.float64 else keep_rounding(x).astype(jnp.float32)
    bits: jax.Array = lax.bitcast_convert_type(wide, unsigned)
    return bits
