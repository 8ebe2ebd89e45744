"""Derivatives and batches of `low_product`, by JAX's own rules for the same product.

Each of JAX's rules for a product consists of products and of moves, such as a
transposition. So the rule is traced for a float32 product, and evaluated with each
product in it low. Nothing about dimension numbers is written here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from optax_lossscale._autocast.jax_internals import name_p
from optax_lossscale._autocast.products import (
    FLOAT32,
    PRODUCTS,
    Factor,
    Product,
    low_product_p,
    to_low,
)
from optax_lossscale._autocast.programs import aval_of, bind, read
from optax_lossscale._ground.types import Arrays

Aval: TypeAlias = jax.core.ShapedArray
Tangent: TypeAlias = jax.Array | ad.Zero


def _jvp(
    primals: Arrays, tangents: Sequence[Tangent], *, product: Product
) -> tuple[jax.Array, Tangent]:
    """The copies in the low dtype are what is saved for the backward pass."""
    x, y, *rest = primals
    x, y = map(_low_copy, (x, y), product.factors, (product.low, product.low))
    dx, dy, *_ = tangents
    bind_product = functools.partial(low_product_p.bind, product=product)
    terms = []
    if type(dx) is not ad.Zero:
        terms.append(bind_product(dx, y, *rest))
    if type(dy) is not ad.Zero:
        terms.append(bind_product(x, dy, *rest))
    return bind_product(x, y, *rest), functools.reduce(lax.add, terms)


def _low_copy(x: jax.Array, factor: Factor, low: jnp.dtype) -> jax.Array:
    """The factor as it is saved: rounded, unless it is weakly typed.

    JAX gives the gradient of a cast the weak type of what was cast. So a second
    derivative, which goes through this copy, would be weakly typed where that of a
    product is not. The factor itself gives the same numbers.

    A copy that is the same in each iteration of a loop has a name, so that it is saved
    where other casts are computed again. JAX then makes it once, before the loop.
    """
    if jax.typeof(x).weak_type:
        return x
    copy = to_low(x, low)
    return name_p.bind(copy, name="low copy") if factor.is_fixed else copy


def _transpose(
    cotangent: Tangent, *operands: jax.Array | ad.UndefinedPrimal, product: Product
) -> list[jax.Array | None]:
    """The gradient for the one factor of which the product is a linear function.

    It has the dtype of that factor, and so is a float32 sum where this is float32, but
    is rounded for an activation.
    """
    gradients: list[jax.Array | None] = [None] * len(operands)
    place = 0 if ad.is_undefined_primal(operands[0]) else 1
    if isinstance(cotangent, ad.Zero):
        return gradients
    factor = operands[place].aval
    others: list[Any] = [x for i, x in enumerate(operands) if i != place]
    avals = map(jax.typeof, (cotangent, *others))
    program = _transposed(product, place, factor, *avals)
    out = product.low if product.factors[place].is_activation else factor.dtype
    own = product._replace(out=out, factors=(Factor(), Factor()))
    gradient = _evaluate_rule(program, own, cotangent, *others)
    gradients[place] = lax.convert_element_type(gradient, factor.dtype)
    return gradients


def _batch(
    operands: Arrays, axes: Sequence[Any], *, product: Product
) -> tuple[jax.Array, int]:
    program = _batched(product, tuple(axes), *map(jax.typeof, operands))
    return _evaluate_rule(program, product, *operands), 0


@functools.lru_cache(maxsize=4096)
def _transposed(
    product: Product, place: int, factor: Aval, *avals: Aval
) -> core.ClosedJaxpr:
    """JAX's rule for the gradient of a float32 product, as a program."""
    wide = product._replace(out=FLOAT32)

    def transpose(cotangent: jax.Array, *others: jax.Array) -> jax.Array:
        def of_factor(x: jax.Array) -> jax.Array:
            return wide.apply(*others[:place], x, *others[place:])

        transposed = jax.linear_transpose(of_factor, _in_float32(factor))
        gradient: jax.Array = transposed(cotangent)[0]
        return gradient

    return _float32_program(transpose, avals)


@functools.lru_cache(maxsize=4096)
def _batched(
    product: Product, axes: tuple[int | None, ...], *avals: Aval
) -> core.ClosedJaxpr:
    """JAX's rule for batches of factors of a float32 product, as a program."""
    wide = product._replace(out=FLOAT32)
    return _float32_program(jax.vmap(wide.apply, in_axes=axes), avals)


def _float32_program(
    function: Callable[..., jax.Array], avals: Sequence[Aval]
) -> core.ClosedJaxpr:
    x, y, *rest = avals
    return jax.make_jaxpr(function)(_in_float32(x), _in_float32(y), *rest)


def _in_float32(aval: Aval) -> Aval:
    wide: Aval = aval.update(dtype=FLOAT32, weak_type=False)
    return wide


def _evaluate_rule(
    program: core.ClosedJaxpr, product: Product, *operands: jax.Array
) -> jax.Array:
    """Evaluates a rule of JAX, with each product in it as low as the given one."""
    values = dict(zip(program.jaxpr.invars, operands, strict=True))
    for equation in program.jaxpr.eqns:
        inputs = [read(atom, values) for atom in equation.invars]
        primitive, params = equation.primitive, equation.params
        if primitive in PRODUCTS:
            own = product._replace(primitive=primitive, params=tuple(params.items()))
            primitive, params = low_product_p, {"product": own}
        (values[equation.outvars[0]],) = bind(primitive, inputs, params)
    # Of empty factors JAX's rule makes zeros, in float32.
    return lax.convert_element_type(read(program.jaxpr.outvars[0], values), product.out)


def _ask_policy(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    equation: core.JaxprEqn,
) -> Any:
    """Asks a policy of `jax.checkpoint` about the product as JAX writes it.

    The rule is otherwise that of JAX for an operation that is saved or computed again.
    """
    pairs = zip(equation.invars, instantiated, strict=True)
    residuals = [x for x, flag in pairs if not flag and isinstance(x, core.Var)]
    if any(unknown):
        return None, equation, [True], [True], residuals
    product = equation.params["product"]
    # The factors of a product without a derivative are no low copies yet.
    avals = map(aval_of, equation.invars)
    low = [x.update(dtype=product.low) if x.dtype == FLOAT32 else x for x in avals]
    if saveable(product.primitive, *low, **product.written) is False:
        return equation, equation, [False], [True], residuals
    return equation, None, [False], [False], []


ad.primitive_jvps[low_product_p] = _jvp
ad.primitive_transposes[low_product_p] = _transpose
batching.primitive_batchers[low_product_p] = _batch
pe.partial_eval_jaxpr_custom_rules[low_product_p] = _ask_policy
