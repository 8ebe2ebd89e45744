"""Products of low operands, whose gradients have the dtypes of the operands as given.

A float32 parameter is rounded before it is multiplied. If the rounding were an
operation of its own, then its result would have a gradient in the low dtype: a sum over
the batch that overflows before its terms do, and that devices would add up in the low
dtype. So rounding and product are one operation here, `low_product`:

    low_product(x, y)  = product(low(x), low(y))
    gradient for x     = low_product(gradient, y), in the dtype of x
    gradient for y     = low_product(x, gradient), in the dtype of y

All its derivatives are of the same kind, so this holds for derivatives of any order. It
costs nothing: hardware adds up the products of low numbers in float32 anyway. A factor
may come with its rounded copy, which is then read instead of rounding it again.

A product whose factors have float8 dtypes rounds them to float8 instead, as `float8.py`
says, and so do its derivatives.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from optax_lossscale._autocast.float8 import (
    COTANGENTS,
    VALUES,
    Factors,
    Rounded,
    for_cotangent,
    round_to_float8,
)
from optax_lossscale._autocast.policy import LOW
from optax_lossscale._autocast.values import cast
from optax_lossscale._autocast.written import (
    as_written,
    batched_program,
    in_dtype,
    low_of,
    product_of,
    program_of,
    setting,
    split,
    transposed_program,
)
from optax_lossscale._jaxprs import bind

low_product_p = core.Primitive("low_product")
# By default cuBLAS adds up products of float8 numbers in fewer bits than float32 has.
_SUMS_OF_GRADIENTS = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
# Each of these names dtypes of operands.
_ALGORITHMS = (lax.DotAlgorithm, lax.DotAlgorithmPreset)


def low_product(
    product: core.Primitive,
    operands: Sequence[Any],
    copies: Sequence[Any],
    low: Any,
    params: dict[str, Any],
    stand_in: tuple[bool, ...] = (False, False),
    float8: Factors = None,
) -> Any:
    """Applies a product to operands, of which those in float32 are rounded.

    Args:
      product: The primitive, one of those in `LOW`.
      operands: The two factors, in the low dtype or in float32, and what else it reads.
      copies: For each factor its rounded copy, or None. Forward and backward pass then
        read the same copy, so that devices that share a parameter gather it once. In
        float8 a copy is a `Rounded`.
      low: The low dtype.
      params: The parameters of the primitive. `preferred_element_type` is the dtype of
        the result, the low one or float32.
      stand_in: For each factor, whether its copy takes its place in the gradient of the
        other factor, so that only the copy is saved. Second derivatives then are low.
      float8: For each factor the float8 dtype that it is rounded to, or None.

    Returns:
      The product. The gradient of each factor has its dtype.
    """
    dtypes = {jnp.result_type(x) for x in operands[:2]}
    if float8 is None and {*dtypes, params["preferred_element_type"]} == {low}:
        return bind(product, operands, params)[0]
    avals = map(jax.typeof, operands)
    program = program_of(product, low, tuple(params.items()), *avals)
    return _bind(program, operands, copies, stand_in, float8)


def copy_of(parameter: Any, low: Any, float8: Factors) -> Any:
    """The rounded copy of a parameter, for all products that read it."""
    if float8 is None:
        return cast(parameter, low)
    return round_to_float8(parameter, VALUES)


def _bind(
    jaxpr: core.ClosedJaxpr,
    operands: Sequence[Any],
    copies: Sequence[Any],
    stand_in: tuple[bool, ...],
    float8: Factors,
) -> Any:
    given = jax.tree.leaves(copies)
    copied = tuple(copy is not None for copy in copies)
    params = {"copied": copied, "stand_in": stand_in, "float8": float8}
    return low_product_p.bind(*operands, *given, jaxpr=jaxpr, **params)


def _register_lowering(platform: str | None) -> None:
    function = functools.partial(as_written, platform=platform or "")
    lowering = mlir.lower_fun(function, multiple_results=False)
    mlir.register_lowering(low_product_p, lowering, platform)


for _platform in (None, "cpu", "cuda", "rocm"):
    _register_lowering(_platform)

_STATIC = ("jaxpr", "copied", "stand_in", "float8")
_run_compiled = jax.jit(low_product_p.bind, static_argnames=_STATIC)


def _run(*operands: Any, **params: Any) -> Any:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return as_written(*operands, platform=jax.default_backend(), **params)
    return _run_compiled(*operands, **params)


low_product_p.def_impl(_run)


def _abstract(
    *given: Any,
    jaxpr: core.ClosedJaxpr,
    copied: Sequence[bool],
    float8: Factors,
    **params: Any,
) -> Any:
    equation, (avals, _) = product_of(jaxpr), split(given, copied, float8)
    return equation.primitive.abstract_eval(
        *in_dtype(low_of(jaxpr), avals), **equation.params
    )


low_product_p.def_effectful_abstract_eval(_abstract)


def _tangent(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: core.ClosedJaxpr,
    copied: Sequence[bool],
    stand_in: tuple[bool, ...],
    float8: Factors,
) -> tuple[Any, Any]:
    """The rule of a product: the sum over the factors, each with its tangent.

    The copies have none, because their factors have it.
    """
    operands, copies = split(primals, copied, float8)
    terms = []
    for i, tangent in enumerate(tangents[:2]):
        if isinstance(tangent, ad.Zero):
            continue
        factors, others, j = list(operands), list(copies), 1 - i
        factors[i], others[i] = tangent, None
        if stand_in[j] and copied[j]:
            factors[j], others[j] = copies[j], None
            if float8:  # A copy in float8 has no derivative.
                factors[j] = lax.convert_element_type(operands[j], low_of(jaxpr))
        terms.append(_bind(jaxpr, factors, others, (False, False), float8))
    result = _bind(jaxpr, operands, copies, stand_in, float8)
    if terms:
        return result, functools.reduce(lax.add, terms)
    return result, lax.full_like(result, 0)


ad.primitive_jvps[low_product_p] = _tangent


def _transpose(
    cotangent: Any,
    *operands: Any,
    jaxpr: core.ClosedJaxpr,
    copied: Sequence[bool],
    stand_in: tuple[bool, ...],
    float8: Factors,
) -> list[Any]:
    """The gradient for the one factor of which the product is a linear function."""
    results: list[Any] = [None] * len(operands)
    factors, copies = split(operands, copied, float8)
    (place,) = (i for i, x in enumerate(factors) if ad.is_undefined_primal(x))
    if not isinstance(cotangent, ad.Zero):
        aval = factors[place].aval
        given = [cotangent, *(x for i, x in enumerate(factors) if i != place)]
        program = transposed_program(
            jaxpr, place, setting(), aval, *map(jax.typeof, given)
        )
        others = [None, copies[1 - place]]
        dtypes = None if float8 is None else for_cotangent(float8[1 - place])
        if float8 is not None and dtypes is None:
            others = [None, None]
        results[place] = _evaluate(
            program, given, others, jaxpr, aval.dtype, float8=dtypes
        )
    return results


ad.primitive_transposes[low_product_p] = _transpose


def _evaluate(
    program: core.ClosedJaxpr,
    operands: Sequence[Any],
    copies: Sequence[Any],
    jaxpr: core.ClosedJaxpr,
    dtype: Any,
    stand_in: tuple[bool, ...] = (False, False),
    float8: Factors = None,
) -> Any:
    """Evaluates moves and a product as low as that in `jaxpr`, with a result dtype.

    The copies of the first two operands are moved as these are. `float8` holds the
    float8 dtypes of these two.
    """
    # For each variable its array, the copy of this array or None, and its float8 dtype.
    factors, to_float8 = program.jaxpr.invars[:2], dict[Any, Any]()
    arrays = dict(zip(program.jaxpr.invars, operands, strict=True))
    moved = dict(zip(factors, copies, strict=True))
    if float8 is not None:
        to_float8.update(zip(factors, float8, strict=True))
    for equation in program.jaxpr.eqns:
        inputs = [_read(arrays, atom) for atom in equation.invars]
        low_inputs = [_read(moved, atom) for atom in equation.invars]
        dtypes = [to_float8.get(atom) for atom in equation.invars]
        params, primitive = dict(equation.params), equation.primitive
        low_outputs: list[Any] = [None] * len(equation.outvars)
        if primitive.name in LOW:
            params["preferred_element_type"] = dtype
            given = low_inputs[:2], low_of(jaxpr), params, stand_in
            pair = (dtypes[0], dtypes[1]) if float8 else None
            if pair and COTANGENTS in pair:
                params["precision"] = _SUMS_OF_GRADIENTS
            elif pair and isinstance(params["precision"], _ALGORITHMS):
                params["precision"] = None
            outputs = [low_product(primitive, inputs, *given, pair)]
        else:
            to_float8.update((x, dtypes[0]) for x in equation.outvars)
            outputs = list(bind(primitive, inputs, params))
            if isinstance(low_inputs[0], Rounded):
                (array,) = bind(primitive, [low_inputs[0].array], params)
                low_outputs = [low_inputs[0]._replace(array=array)]
            elif all(x is not None for x in low_inputs):
                low_outputs = list(bind(primitive, low_inputs, params))
        arrays.update(zip(equation.outvars, outputs, strict=True))
        moved.update(zip(equation.outvars, low_outputs, strict=True))
    return arrays[program.jaxpr.outvars[0]]


def _read(values: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable, None if it has none; of a literal, its number."""
    return atom.val if isinstance(atom, core.Literal) else values.get(atom)


def _batch(
    operands: Sequence[Any],
    axes: Sequence[Any],
    *,
    jaxpr: core.ClosedJaxpr,
    copied: Sequence[bool],
    stand_in: tuple[bool, ...],
    float8: Factors,
) -> tuple[Any, int]:
    """The product of batches of factors."""
    (operands, copies), (axes, axes_of_copies) = (
        split(some, copied, float8) for some in (operands, axes)
    )
    axes = tuple(axis if isinstance(axis, int) else None for axis in axes)
    copies = [
        copy if _is_batched_alike(axis, other) else None
        for copy, axis, other in zip(copies, axes_of_copies, axes[:2], strict=True)
    ]
    program, axis = batched_program(jaxpr, axes, setting(), *map(jax.typeof, operands))
    dtype = jaxpr.out_avals[0].dtype
    result = _evaluate(program, operands, copies, jaxpr, dtype, stand_in, float8)
    return result, axis


def _is_batched_alike(copy: Any, factor: int | None) -> bool:
    """Whether the copy of a factor can stand for it, by the axes of their batches.

    In float8, a batch has one scale, and so a batch of copies cannot.
    """
    if isinstance(copy, Rounded):
        return factor is None and not any(isinstance(axis, int) for axis in copy)
    return bool(copy == factor)


batching.primitive_batchers[low_product_p] = _batch
