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

from optax_lossscale._autocast.jax_internals import (
    jet,
    jet_rules,
    name_p,
    register_nan_check,
)
from optax_lossscale._autocast.products import (
    FLOAT32,
    PRODUCTS,
    Factor,
    Product,
    as_written,
    low_product_p,
    product_of,
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
    bind_product = functools.partial(low_product_p.bind, product=product)
    result, (dx, dy, *_) = bind_product(x, y, *rest), tangents
    pairs = [(pair, t) for pair, t in (((dx, y), dx), ((x, dy), dy))]
    terms = [bind_product(*xy, *rest) for xy, t in pairs if type(t) is not ad.Zero]
    return result, functools.reduce(lax.add, terms)


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
    axes = tuple(axis if isinstance(axis, int) else None for axis in axes)
    program = _batched(product, axes, *map(jax.typeof, operands))
    return _evaluate_rule(program, product, *operands), 0


@functools.lru_cache(maxsize=4096)
def _transposed(
    product: Product, place: int, factor: Aval, *avals: Aval
) -> core.ClosedJaxpr:
    """JAX's rule for the gradient of a float32 product, as a program."""

    def transpose(cotangent: jax.Array, *others: jax.Array) -> jax.Array:
        def of_factor(x: jax.Array) -> jax.Array:
            return product.apply(*others[:place], x, *others[place:], out=FLOAT32)

        transposed = jax.linear_transpose(of_factor, _in_float32(factor))
        gradient: jax.Array = transposed(cotangent)[0]
        return gradient

    return _traced(transpose, avals)


@functools.lru_cache(maxsize=4096)
def _batched(
    product: Product, axes: tuple[int | None, ...], *avals: Aval
) -> core.ClosedJaxpr:
    """JAX's rule for batches of factors of a float32 product, as a program."""
    apply = functools.partial(product.apply, out=FLOAT32)
    return _traced(jax.vmap(apply, in_axes=axes), avals)


def _traced(
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
    """Evaluates a rule of JAX, with each product in it as low as the given one.

    The rule may swap the factors.
    """
    values = dict(zip(program.jaxpr.invars, operands, strict=True))
    factors = dict(zip(program.jaxpr.invars, product.factors, strict=False))
    for equation in program.jaxpr.eqns:
        inputs = [read(atom, values) for atom in equation.invars]
        (result,) = equation.outvars
        own = tuple(
            Factor() if isinstance(x, core.Literal) else factors.get(x, Factor())
            for x in equation.invars[:2]
        )
        if equation.primitive in PRODUCTS:
            low = _as_low_as(product, equation)._replace(factors=own)
            values[result] = low_product_p.bind(*inputs, product=low)
        else:
            (values[result],) = bind(equation.primitive, inputs, equation.params)
            factors[result] = own[0]
    # Of empty factors JAX's rule makes zeros, in float32.
    return lax.convert_element_type(read(program.jaxpr.outvars[0], values), product.out)


def _as_low_as(product: Product, equation: core.JaxprEqn) -> Product:
    """The product in a rule, with the dtypes and the precision of the given one."""
    params = {**equation.params, "precision": dict(product.params)["precision"]}
    return product_of(equation.replace(params=params), product.low, product.out)


def _jet(
    primals: Arrays, series: Sequence[Any], *, product: Product
) -> tuple[jax.Array, list[jax.Array]]:
    """The Taylor series of a product, which JAX's function knows for its own ones."""
    function = functools.partial(as_written, product=product)
    result: tuple[jax.Array, list[jax.Array]] = jet(
        function, primals, series, factorial_scaled=False
    )
    return result


def _ask_policy(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    equation: core.JaxprEqn,
) -> Any:
    """Asks a policy of `jax.checkpoint` about the product, the only one that it knows.

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
    params = {**dict(product.params), "preferred_element_type": product.out}
    decision = saveable(product.primitive, *low, **params)
    if isinstance(decision, tuple):  # From one memory to another: as in a jitted call.
        function = jax.jit(functools.partial(as_written, product=product))
        (call,) = jax.make_jaxpr(function)(*(x.aval for x in equation.invars)).eqns
        equation = equation.replace(primitive=call.primitive, params=call.params)
        rule = pe.partial_eval_jaxpr_custom_rules[call.primitive]
        return rule(saveable, unknown, instantiated, equation)
    if decision is False or decision is _RECOMPUTE:
        return equation, equation, [False], [True], residuals
    return equation, None, [False], [False], []


# What a policy that may offload returns for an operation that is none of its products.
_RECOMPUTE = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "host")(
    None
)

ad.primitive_jvps[low_product_p] = _jvp
ad.primitive_transposes[low_product_p] = _transpose
batching.primitive_batchers[low_product_p] = _batch
jet_rules[low_product_p] = _jet
pe.partial_eval_jaxpr_custom_rules[low_product_p] = _ask_policy
register_nan_check(low_product_p)
