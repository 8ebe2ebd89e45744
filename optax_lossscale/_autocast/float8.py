"""Products of float8 arrays, each scaled by the largest magnitude that it has now.

A factor is multiplied by the largest power of two that keeps it within the range of its
float8 dtype, and then rounded. The product is multiplied by the inverse powers of two:

    k(x)         = floor(log2(largest / max(abs(x))))
    quantized(x) = round(x * 2**k(x))
    product      = (quantized(x) @ quantized(y)) * 2**(-k(x) - k(y))

Multiplying by a power of two is exact, so nothing is rounded but the factors and the
result. The scales are factors of the result, because XLA then computes the product in
float8. (If they are factors of operands that are cast up first, it uses bfloat16.)

Values are in float8_e4m3fn. Cotangents are in float8_e5m2, which has a wider range and
fewer digits. No hardware multiplies two arrays in float8_e5m2.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from optax_lossscale._bits import power_of_two
from optax_lossscale._jax_internals import TRACED_RULES
from optax_lossscale._jaxprs import aval_of

VALUES, COTANGENTS = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
# For each factor of a product its float8 dtype, or None if the product is not float8.
Factors = tuple[jnp.dtype, jnp.dtype] | None
OF_VALUES: Factors = (VALUES, VALUES)
# By default cuBLAS adds up products of float8 numbers in fewer bits than float32 has.
PRECISION_OF_GRADIENTS = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
# GPUs multiply blocks of this many entries along each axis.
_MULTIPLE = 16


class Rounded(NamedTuple):
    """A factor in float8.

    Attributes:
      array: `round(x * 2**exponent)`. Entries that are not finite are NaN.
      exponent: `k(x)` as `i32`.
    """

    array: jax.Array
    exponent: jax.Array


def has_rules(equation: core.JaxprEqn) -> bool:
    """Whether an equation calls a function with derivative rules of its own.

    Its rules hold products of cotangents, which float8 would round as values. And the
    function itself must give the same result with and without a derivative.
    """
    return not equation.params.keys().isdisjoint(TRACED_RULES)


def reason_not_float8(
    equation: core.JaxprEqn, calls: Sequence[core.JaxprEqn] = ()
) -> str | None:
    """Why the factors of a product that runs low are not in float8, or None.

    Args:
      equation: The product.
      calls: The equations that hold it.
    """
    if any(map(has_rules, calls)):
        return "in a function with derivative rules of its own"
    if equation.primitive is not dot_general_p:
        is_convolution = equation.primitive is conv_general_dilated_p
        return "a convolution" if is_convolution else "a ragged product"
    (contracted, of_y), (batch, _) = equation.params["dimension_numbers"]
    if batch:
        return "batch dimensions, as in attention"
    shapes = [aval_of(atom).shape for atom in equation.invars]
    rows, columns = (
        math.prod(size for axis, size in enumerate(shape) if axis not in axes)
        for shape, axes in zip(shapes, (contracted, of_y), strict=True)
    )
    sizes = rows, math.prod(shapes[0][axis] for axis in contracted), columns
    if odd := dict.fromkeys(str(size) for size in sizes if size % _MULTIPLE != 0):
        verb = "are not multiples" if len(odd) > 1 else "is not a multiple"
        shape = " x ".join(map(str, sizes))
        return f"of {shape}, {' and '.join(odd)} {verb} of {_MULTIPLE}"
    return None


def of_cotangent(other: jnp.dtype) -> Factors:
    """The dtypes of a cotangent and of the factor in float8 `other` beside it."""
    return (COTANGENTS, other) if other == VALUES else None


def multiply(
    apply: Callable[..., jax.Array],
    pair: tuple[jax.Array, jax.Array],
    dtypes: tuple[jnp.dtype, jnp.dtype],
    out: jnp.dtype,
    *,
    multiplies_float8: bool,
) -> jax.Array:
    """The product of two factors in float8.

    Args:
      apply: `apply(x, y, out=dtype)` multiplies two arrays.
      pair: The factors, in a wider dtype.
      dtypes: Their float8 dtypes.
      out: The dtype of the result.
      multiplies_float8: Whether the platform multiplies float8 arrays. If not, the
        rounded factors are multiplied in float32, which gives the same.

    Returns:
      The product. An entry of a factor that is NaN spoils the entries that read it.
    """
    x, y = map(round_to_float8, pair, dtypes)
    factors = [x.array, y.array]
    # A float16 result would overflow before it is scaled; bfloat16 has enough range.
    sums = jnp.dtype(jnp.float32) if out == jnp.float16 else out
    if not multiplies_float8:
        factors = [lax.convert_element_type(factor, jnp.float32) for factor in factors]
        sums = jnp.dtype(jnp.float32)
    result = apply(*factors, out=sums)
    # One factor, because cuBLASLt multiplies by one. It is infinite above the range of
    # float32, and zero below: only there the product is not that of the formula.
    exponent = -x.exponent - y.exponent
    scale = power_of_two(lax.clamp(np.int32(-127), exponent, np.int32(128)))
    return lax.convert_element_type(result * lax.convert_element_type(scale, sums), out)


def round_to_float8(x: jax.Array, dtype: jnp.dtype) -> Rounded:
    """Rounds a factor to float8, scaled by a power of two."""
    is_finite = lax.is_finite(x)
    magnitudes = lax.select(is_finite, lax.abs(x), lax.full_like(x, 0))
    largest = lax.convert_element_type(jnp.max(magnitudes, initial=0), jnp.float32)
    # The largest number of both float8 dtypes is 1.75 times a power of two. This adds 1
    # to the exponent of what is above 1.75 times a power of two.
    bits = lax.bitcast_convert_type(largest, jnp.int32) + 0x1FFFFF
    top = math.frexp(float(jnp.finfo(dtype).max))[1] - 1
    exponent = lax.min(top + 127 - (bits >> 23), np.int32(126))
    scaled = lax.convert_element_type(x, jnp.float32) * power_of_two(exponent)
    # float8_e4m3fn has no infinity, and the casts of some GPUs turn one into 448.
    visible = lax.select(is_finite, scaled, lax.full_like(scaled, jnp.nan))
    return Rounded(lax.convert_element_type(visible, dtype), exponent)
