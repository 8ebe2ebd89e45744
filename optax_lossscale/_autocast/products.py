"""Products of low operands, whose gradients have the dtypes of the operands as given.

A float32 parameter is rounded before it is multiplied. If the rounding were an
operation of its own, then its result would have a gradient in the low dtype: a sum over
the batch that overflows before its terms do, and that devices would add up in the low
dtype. So rounding and product are one operation here, `low_product`:

    low_product(x, y)     = product(low(x), low(y)),         in the dtype that is asked for
    its gradient for x    = low_product(gradient, y),        in the dtype of x
    its gradient for y    = low_product(x, gradient),        in the dtype of y

All its derivatives are of the same kind, so this holds for derivatives of any order. The
hardware adds up products of low operands in float32 anyway.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from optax_lossscale._autocast.policy import LOW
from optax_lossscale._jaxprs import bind

low_product_p = core.Primitive("low_product")


def low_product(
    product: core.Primitive,
    operands: Sequence[Any],
    low: Any,
    params: dict[str, Any],
) -> Any:
    """Applies a product to operands, of which those in float32 are rounded.

    Args:
      product: The primitive, one of those in `LOW`.
      operands: The two factors, in the low dtype or in float32, and what else it reads.
      low: The low dtype.
      params: The parameters of the primitive. `preferred_element_type` is the dtype of
        the result, the low one or float32.

    Returns:
      The product. The gradient of each factor has its dtype.
    """
    dtypes = {jnp.result_type(x) for x in operands[:2]}
    if {*dtypes, params["preferred_element_type"]} == {low}:
        return bind(product, operands, params)[0]
    avals = map(jax.typeof, operands)
    program = _program(product, low, tuple(params.items()), *avals)
    return low_product_p.bind(*operands, jaxpr=program)


@functools.lru_cache(maxsize=4096)
def _program(
    product: core.Primitive, low: Any, items: tuple[Any, ...], *avals: Any
) -> core.ClosedJaxpr:
    """Casts and a product, as the program that a `low_product` holds and runs."""

    def apply(*operands: Any) -> Any:
        factors = [lax.convert_element_type(x, low) for x in operands[:2]]
        return bind(product, [*factors, *operands[2:]], dict(items))[0]

    return jax.make_jaxpr(apply)(*avals)


def _product_of(program: core.ClosedJaxpr) -> Any:
    """The product in the program of a `low_product`."""
    return program.jaxpr.eqns[-1]


def _as_written(*operands: Any, jaxpr: core.ClosedJaxpr) -> Any:
    """The same result, computed as several operations."""
    return core.jaxpr_as_fun(jaxpr)(*operands)[0]


low_product_p.def_impl(jax.jit(_as_written, static_argnames="jaxpr"))
def _on_gpu(*operands: Any, jaxpr: core.ClosedJaxpr) -> Any:
    """The same for GPUs, whose library has no convolution with another result dtype.

    XLA would convolve float32 copies instead.
    """
    equation = _product_of(jaxpr)
    low = equation.invars[0].aval.dtype
    if equation.primitive.name != "conv_general_dilated":
        return _as_written(*operands, jaxpr=jaxpr)
    factors = [lax.convert_element_type(x, low) for x in operands]
    params = {**equation.params, "preferred_element_type": low}
    (result,) = bind(equation.primitive, factors, params)
    return lax.convert_element_type(result, jaxpr.out_avals[0].dtype)


mlir.register_lowering(
    low_product_p, mlir.lower_fun(_as_written, multiple_results=False)
)
for platform in ("cuda", "rocm"):
    mlir.register_lowering(
        low_product_p, mlir.lower_fun(_on_gpu, multiple_results=False), platform
    )


@low_product_p.def_effectful_abstract_eval
def _abstract(*avals: Any, jaxpr: core.ClosedJaxpr) -> Any:
    equation = _product_of(jaxpr)
    low = equation.invars[0].aval.dtype
    return equation.primitive.abstract_eval(*_in(low, avals), **equation.params)


def _in(dtype: Any, avals: Sequence[Any]) -> list[Any]:
    """The same avals, with the factors in another dtype."""
    return [*(aval.update(dtype=dtype) for aval in avals[:2]), *avals[2:]]


def _tangent(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: core.ClosedJaxpr
) -> tuple[Any, Any]:
    """The rule of a product: the sum over the factors, each with its tangent."""
    result = low_product_p.bind(*primals, jaxpr=jaxpr)
    total: Any = None
    for i, tangent in enumerate(tangents[:2]):
        if not isinstance(tangent, ad.Zero):
            operands = [*primals[:i], tangent, *primals[i + 1 :]]
            term = low_product_p.bind(*operands, jaxpr=jaxpr)
            total = term if total is None else lax.add(total, term)
    return result, ad.Zero.from_primal_value(result) if total is None else total


ad.primitive_jvps[low_product_p] = _tangent


def _transpose(
    cotangent: Any, *operands: Any, jaxpr: core.ClosedJaxpr
) -> list[Any]:
    """The gradient for the one factor of which the product is a linear function."""
    (place,) = (i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    results: list[Any] = [None] * len(operands)
    if not isinstance(cotangent, ad.Zero):
        aval = operands[place].aval
        given = [cotangent, *(x for i, x in enumerate(operands) if i != place)]
        program = _transposed(jaxpr, place, aval, *map(jax.typeof, given))
        results[place] = _evaluate(program, given, jaxpr, aval.dtype)
    return results


ad.primitive_transposes[low_product_p] = _transpose


@functools.lru_cache(maxsize=4096)
def _transposed(
    jaxpr: core.ClosedJaxpr, place: int, factor: Any, *avals: Any
) -> core.ClosedJaxpr:
    """The transpose of a product for one factor, as a program for float32.

    `avals` are those of the cotangent, of the other factor and of the rest.
    """
    apply = _in_float32(jaxpr)

    def pull_back(cotangent: Any, *others: Any) -> Any:
        def of_factor(x: Any) -> Any:
            return apply(*others[:place], x, *others[place:])

        (factor_aval,) = _in(jnp.float32, [factor])
        return jax.linear_transpose(of_factor, factor_aval)(cotangent)[0]

    return jax.make_jaxpr(pull_back)(*_in(jnp.float32, avals))


def _in_float32(jaxpr: core.ClosedJaxpr) -> Callable[..., Any]:
    """The product in a program, as a function of float32 arrays."""
    equation = _product_of(jaxpr)
    params = {**equation.params, "preferred_element_type": np.dtype(np.float32)}
    return lambda *operands: bind(equation.primitive, operands, params)[0]


def _evaluate(
    program: core.ClosedJaxpr,
    operands: Sequence[Any],
    jaxpr: core.ClosedJaxpr,
    dtype: Any,
) -> Any:
    """Evaluates moves and a product as low as that in `jaxpr`, with a result dtype."""
    low = _product_of(jaxpr).invars[0].aval.dtype
    values = dict(zip(program.jaxpr.invars, operands, strict=True))
    for equation in program.jaxpr.eqns:
        inputs = [
            x.val if isinstance(x, core.Literal) else values[x] for x in equation.invars
        ]
        params, primitive = dict(equation.params), equation.primitive
        if primitive.name in LOW:
            params["preferred_element_type"] = dtype
            outputs = [low_product(primitive, inputs, low, params)]
        else:
            outputs = list(bind(primitive, inputs, params))
        values.update(zip(equation.outvars, outputs, strict=True))
    return values[program.jaxpr.outvars[0]]


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, jaxpr: core.ClosedJaxpr
) -> tuple[Any, int]:
    """The product of batches of factors."""
    axes = tuple(axis if isinstance(axis, int) else None for axis in axes)
    program, axis = _batched(jaxpr, axes, *map(jax.typeof, operands))
    return _evaluate(program, operands, jaxpr, jaxpr.out_avals[0].dtype), axis


batching.primitive_batchers[low_product_p] = _batch


@functools.lru_cache(maxsize=4096)
def _batched(
    jaxpr: core.ClosedJaxpr, axes: tuple[int | None, ...], *avals: Any
) -> tuple[core.ClosedJaxpr, int]:
    """A product of batches, as a program for float32, and the batch axis of its result.

    That is the axis with the shortest program, so that the result need not be moved.
    """

    def program_with(axis: int) -> core.ClosedJaxpr:
        function = jax.vmap(_in_float32(jaxpr), in_axes=axes, out_axes=axis)
        return jax.make_jaxpr(function)(*_in(jnp.float32, avals))

    rank = jaxpr.out_avals[0].ndim + 1
    programs = [(program_with(axis), axis) for axis in range(rank)]
    return min(programs, key=lambda pair: len(pair[0].eqns))


def _jet(
    primals: Sequence[Any], series: Sequence[Any], *, jaxpr: core.ClosedJaxpr
) -> tuple[Any, Any]:
    """The Taylor series of a product."""
    function = functools.partial(_as_written, jaxpr=jaxpr)
    return jet.jet(function, primals, series, factorial_scaled=False)


rules: dict[core.Primitive, Any] = jet.jet_rules
rules[low_product_p] = _jet


_RECOMPUTE = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "host")(
    None
)


def _partial_eval(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    equation: Any,
) -> Any:
    """Asks a policy of `jax.checkpoint` about the product, the only one that it knows.

    All else is as JAX treats any operation.
    """
    pairs = zip(equation.invars, instantiated, strict=True)
    residuals = [x for x, flag in pairs if not flag and isinstance(x, core.Var)]
    if any(unknown):
        return None, equation, [True], [True], residuals
    product = _product_of(equation.params["jaxpr"])
    avals = [x.aval for x in product.invars]
    decision = saveable(product.primitive, *avals, **product.params)
    if isinstance(decision, tuple):  # Two memories, of the device and of the host.
        function = jax.jit(functools.partial(_as_written, **equation.params))
        (call,) = jax.make_jaxpr(function)(*(x.aval for x in equation.invars)).eqns
        equation = equation.replace(primitive=call.primitive, params=call.params)
        rule = pe.partial_eval_jaxpr_custom_rules[call.primitive]
        return rule(saveable, unknown, instantiated, equation)
    if decision is False or decision is _RECOMPUTE:
        return equation, equation, [False], [True], residuals
    return equation, None, [False], [False], []


pe.partial_eval_jaxpr_custom_rules[low_product_p] = _partial_eval
