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

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from optax_lossscale._autocast.identity import free_sizes, summed_size
from optax_lossscale._autocast.policy import Policy
from optax_lossscale._autocast.values import (
    OF_ARGUMENTS,
    OF_PARAMETERS,
    Origin,
    Value,
)
from optax_lossscale._jaxprs import bind

VALUES, COTANGENTS = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
# For each factor of a product its float8 dtype, or None if the product is not float8.
Factors = tuple[Any, Any] | None
OF_VALUES: Factors = (VALUES, VALUES)
# GPUs multiply blocks of this many entries along each axis.
_MULTIPLE = 16
_OTHERS = {
    "conv_general_dilated": "a convolution",
    "ragged_dot_general": "a ragged product",
}


class Rounded(NamedTuple):
    """A factor in float8.

    Attributes:
      array: `round(x * 2**exponent)`. Entries that are not finite are NaN.
      exponent: `k(x)` as `i32`.
    """

    array: Any
    exponent: Any


def reason_not_float8(
    equation: Any, operands: Sequence[Value], policy: Policy
) -> str | None:
    """Why a product on the low list does not take float8 operands, or None."""
    if equation.primitive.name in _OTHERS:
        return _OTHERS[equation.primitive.name]
    if not any(map(_is_parameter, operands[:2])):
        return "no parameter is a factor"
    rows, columns = free_sizes(equation)
    sizes = rows, summed_size(equation), columns
    if odd := dict.fromkeys(str(size) for size in sizes if size % _MULTIPLE):
        verb = "are not multiples" if len(odd) > 1 else "is not a multiple"
        shape = " x ".join(map(str, sizes))
        return f"of {shape}, {' and '.join(odd)} {verb} of {_MULTIPLE}"
    sharding = equation.params.get("out_sharding")
    if sharding is not None and getattr(sharding.spec, "unreduced", None):
        return "devices have yet to add up its result"
    is_kept = policy.keeps_products
    return f"`keep` returns True for {policy.scope!r}" if is_kept else None


def _is_parameter(value: Value) -> bool:
    """Whether a value is an argument, or computed from arguments without a product."""
    # The source of a half-precision value that a loop reads is not known.
    is_known = value.origin is not Origin.LOOP_CONSTANT
    return value.origin in OF_ARGUMENTS or (is_known and value.source in OF_PARAMETERS)


def for_cotangent(other: Any) -> Factors:
    """The dtypes of a cotangent and of the factor in float8 `other` beside it."""
    return (COTANGENTS, other) if other == VALUES else None


def multiply(
    product: core.Primitive,
    pair: Sequence[Rounded],
    params: dict[str, Any],
    *,
    multiplies_float8: bool,
) -> Any:
    """The product of two factors in float8.

    Args:
      product: The primitive.
      pair: The factors.
      params: Its parameters. `preferred_element_type` is the dtype of the result.
      multiplies_float8: Whether the platform multiplies float8 arrays. If not, the
        factors are multiplied in float32, which gives the same.

    Returns:
      The product. An entry of a factor that is NaN spoils the entries that read it.
    """
    dtype = params["preferred_element_type"]
    factors = [x.array for x in pair]
    # A float16 result would overflow before it is scaled; bfloat16 has enough range.
    sums = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
    if not multiplies_float8:
        factors = [lax.convert_element_type(x, jnp.float32) for x in factors]
        sums = jnp.dtype(jnp.float32)
    (result,) = bind(product, factors, {**params, "preferred_element_type": sums})
    # One factor, because cuBLASLt multiplies by one. It is infinite above the range of
    # float32, and zero below: only there the product is not that of the formula.
    exponent = -pair[0].exponent - pair[1].exponent
    scale = _power_of_two(lax.clamp(np.int32(-127), exponent, np.int32(128)))
    scaled = result * lax.convert_element_type(scale, sums)
    return lax.convert_element_type(scaled, dtype)


@functools.partial(jax.jit, static_argnums=1)
def round_to_float8(x: Any, dtype: Any) -> Rounded:
    """Rounds a factor to float8. This has no derivative; that of a product does."""
    x = lax.stop_gradient(x)
    is_finite = lax.is_finite(x)
    magnitudes = lax.select(is_finite, lax.abs(x), lax.full_like(x, 0))
    largest = lax.convert_element_type(jnp.max(magnitudes, initial=0), jnp.float32)
    # The largest number of both float8 dtypes is 1.75 times a power of two. This adds 1
    # to the exponent of what is above 1.75 times a power of two.
    bits = lax.bitcast_convert_type(largest, jnp.int32) + 0x1FFFFF
    top = math.frexp(float(jnp.finfo(dtype).max))[1] - 1
    exponent = lax.min(top + 127 - (bits >> 23), np.int32(126))
    scaled = lax.convert_element_type(x, jnp.float32) * _power_of_two(exponent)
    # float8_e4m3fn has no infinity, and the casts of some GPUs turn one into 448.
    visible = lax.select(is_finite, scaled, lax.full_like(scaled, jnp.nan))
    return Rounded(lax.convert_element_type(visible, dtype), exponent)


def _power_of_two(exponent: Any) -> Any:
    """`2**exponent` as float32 from -126 to 127; 0 for -127, infinity for 128."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
