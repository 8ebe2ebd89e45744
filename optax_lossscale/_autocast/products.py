"""`low_product`: a matrix product or a convolution of operands rounded to a low dtype.

    low_product(x, y) = round(product(low(x), low(y)))

Rounding and product are one operation, so that the gradient of a float32 operand is a
float32 array: a sum of products of low numbers, which neither overflows before its last
term nor loses terms. Hardware adds up in float32 anyway, so this costs nothing.

    gradient for x = product(gradient, low(y)), in the dtype of x
    gradient for y = product(low(x), gradient), in the dtype of y

If the factor is an activation, its gradient is rounded as the product is. (The next
product of the backward pass would round it anyway, and until then it has half the
bytes.)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p
from jax.interpreters import mlir

from optax_lossscale._autocast.jax_internals import ragged_dot_general_p
from optax_lossscale._autocast.programs import bind

PRODUCTS = (
    dot_general_p,
    conv_general_dilated_p,
    ragged_dot_general_p,
)
FLOAT32 = jnp.dtype(jnp.float32)
low_product_p = core.Primitive("low_product")


class Factor(NamedTuple):
    """What is known of a factor of a product.

    Attributes:
      is_activation: Whether it has a derivative by the result of a low product.
      is_fixed: Whether it is the same in each iteration of the loop around it.
    """

    is_activation: bool = False
    is_fixed: bool = False


class Product(NamedTuple):
    """What a `low_product` computes; the one parameter of its equations.

    Attributes:
      primitive: One of `PRODUCTS`.
      params: The parameters of this primitive, as pairs, so that they can be hashed.
        `out` takes the place of its own dtype of the result.
      low: The dtype to which float32 operands are rounded, float16 or bfloat16.
      out: The dtype of the result.
      factors: What is known of the two factors.
    """

    primitive: core.Primitive
    params: tuple[tuple[str, Any], ...]
    low: jnp.dtype
    out: jnp.dtype
    factors: tuple[Factor, ...] = (Factor(), Factor())

    @property
    def written(self) -> dict[str, Any]:
        """The parameters of the primitive, with the dtype of the result."""
        return {**dict(self.params), "preferred_element_type": self.out}

    def apply(self, *operands: jax.Array) -> jax.Array:
        """The product of operands as they are."""
        return bind(self.primitive, operands, self.written)[0]


def to_low(x: jax.Array, low: jnp.dtype) -> jax.Array:
    """Rounds a float32 operand; group sizes and low operands stay as they are."""
    return lax.convert_element_type(x, low) if x.dtype == FLOAT32 else x


def rounded_product(
    *operands: jax.Array, product: Product, platform: str | None = None
) -> jax.Array:
    """The low product by operations of JAX that XLA for a platform can compute."""
    low, out = product.low, product.out
    x, y, *rest = (to_low(operand, low) for operand in operands)
    if platform in ("cuda", "rocm") and product.primitive is conv_general_dilated_p:
        # cuDNN has no convolution of low factors with a float32 result. XLA would
        # convolve float32 copies of them instead.
        return lax.convert_element_type(product._replace(out=low).apply(x, y), out)
    if platform == "cpu" and low == jnp.bfloat16 and out == FLOAT32:
        # CPUs have such a product for some shapes only. This one gives the same.
        x, y = (lax.convert_element_type(factor, out) for factor in (x, y))
    return product.apply(x, y, *rest)


def _run(*operands: jax.Array, product: Product) -> jax.Array:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        platform = jax.default_backend()
        return rounded_product(*operands, product=product, platform=platform)
    result: jax.Array = _run_compiled(*operands, product=product)
    return result


_run_compiled = jax.jit(low_product_p.bind, static_argnames="product")
low_product_p.def_impl(_run)


def _abstract_eval(*avals: jax.core.ShapedArray, product: Product) -> Any:
    x, y, *rest = avals
    low = [aval.update(dtype=product.low, weak_type=False) for aval in (x, y)]
    return product.primitive.abstract_eval(*low, *rest, **product.written)


low_product_p.def_effectful_abstract_eval(_abstract_eval)
for _platform in (None, "cpu", "cuda", "rocm"):
    _function = functools.partial(rounded_product, platform=_platform)
    _lowering = mlir.lower_fun(_function, multiple_results=False)
    mlir.register_lowering(low_product_p, _lowering, _platform)
