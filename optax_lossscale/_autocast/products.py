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
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from optax_lossscale._autocast.policy import LOW
from optax_lossscale._jaxprs import bind

low_product_p = core.Primitive("low_product")


def low_product(
    product: core.Primitive,
    operands: Sequence[Any],
    copies: Sequence[Any],
    low: Any,
    params: dict[str, Any],
    stand_in: tuple[bool, ...] = (False, False),
) -> Any:
    """Applies a product to operands, of which those in float32 are rounded.

    Args:
      product: The primitive, one of those in `LOW`.
      operands: The two factors, in the low dtype or in float32, and what else it reads.
      copies: For each factor its rounded copy, or None. Forward and backward pass then
        read the same copy, so that devices that share a parameter gather it once.
      low: The low dtype.
      params: The parameters of the primitive. `preferred_element_type` is the dtype of
        the result, the low one or float32.
      stand_in: For each factor, whether its copy takes its place in the gradient of the
        other factor, so that only the copy is saved. Second derivatives then are low.

    Returns:
      The product. The gradient of each factor has its dtype.
    """
    dtypes = {jnp.result_type(x) for x in operands[:2]}
    if {*dtypes, params["preferred_element_type"]} == {low}:
        return bind(product, operands, params)[0]
    avals = map(jax.typeof, operands)
    program = _program(product, low, tuple(params.items()), *avals)
    return _bind(program, operands, copies, stand_in)


def _bind(
    jaxpr: core.ClosedJaxpr,
    operands: Sequence[Any],
    copies: Sequence[Any],
    stand_in: tuple[bool, ...] = (False, False),
) -> Any:
    given = [copy for copy in copies if copy is not None]
    copied = tuple(copy is not None for copy in copies)
    return low_product_p.bind(
        *operands, *given, jaxpr=jaxpr, copied=copied, stand_in=stand_in
    )


def split(
    operands: Sequence[Any], copied: Sequence[bool]
) -> tuple[Sequence[Any], list[Any]]:
    """The operands of a `low_product` without the copies, and the copies."""
    count = len(operands) - sum(copied)
    given = iter(operands[count:])
    return operands[:count], [next(given) if flag else None for flag in copied]


@functools.lru_cache(maxsize=4096)
def _program(
    product: core.Primitive, low: Any, items: tuple[Any, ...], *avals: Any
) -> core.ClosedJaxpr:
    """The product of the rounded factors, as a program."""

    def apply(*operands: Any) -> Any:
        return bind(product, operands, dict(items))[0]

    return jax.make_jaxpr(apply)(*_in(low, avals))


def product_of(program: core.ClosedJaxpr) -> Any:
    """The product in the program of a `low_product`."""
    return program.jaxpr.eqns[-1]


def _low_of(program: core.ClosedJaxpr) -> Any:
    """The low dtype in the program of a `low_product`."""
    return product_of(program).invars[0].aval.dtype


def as_written(
    *operands: Any,
    jaxpr: core.ClosedJaxpr,
    copied: Sequence[bool],
    stand_in: Sequence[bool] = (),
    platform: str = "",
) -> Any:
    """The same as several operations, in a form that XLA for a platform can compute."""
    equation, low = product_of(jaxpr), _low_of(jaxpr)
    dtype = jaxpr.out_avals[0].dtype
    wide, copies = split(operands, copied)
    factors = [
        lax.convert_element_type(x, low) if copy is None else copy
        for x, copy in zip(wide[:2], copies, strict=True)
    ]
    params, primitive = dict(equation.params), equation.primitive
    if platform in ("cuda", "rocm") and primitive.name == "conv_general_dilated":
        # GPUs have no convolution of low operands with a float32 result. XLA would
        # convolve float32 copies of them instead.
        params["preferred_element_type"] = low
    if platform == "cpu" and low == jnp.bfloat16 and dtype == jnp.float32:
        # CPUs have such a product for some shapes only. This one gives the same.
        factors = [lax.convert_element_type(x, dtype) for x in factors]
    (result,) = bind(primitive, [*factors, *wide[2:]], params)
    return lax.convert_element_type(result, dtype)


def _register_lowering(platform: str | None) -> None:
    function = functools.partial(as_written, platform=platform or "")
    lowering = mlir.lower_fun(function, multiple_results=False)
    mlir.register_lowering(low_product_p, lowering, platform)


for _platform in (None, "cpu", "cuda", "rocm"):
    _register_lowering(_platform)

_run = jax.jit(low_product_p.bind, static_argnames=("jaxpr", "copied", "stand_in"))
low_product_p.def_impl(_run)


def _abstract(
    *given: Any, jaxpr: core.ClosedJaxpr, copied: Sequence[bool], stand_in: Any
) -> Any:
    equation, (avals, _) = product_of(jaxpr), split(given, copied)
    return equation.primitive.abstract_eval(
        *_in(_low_of(jaxpr), avals), **equation.params
    )


low_product_p.def_effectful_abstract_eval(_abstract)


def _in(dtype: Any, avals: Sequence[Any]) -> tuple[Any, ...]:
    """The same avals, with the factors in another dtype, which is not a weak one."""
    factors = (aval.update(dtype=dtype, weak_type=False) for aval in avals[:2])
    return *factors, *avals[2:]


def _tangent(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    jaxpr: core.ClosedJaxpr,
    copied: Sequence[bool],
    stand_in: tuple[bool, ...],
) -> tuple[Any, Any]:
    """The rule of a product: the sum over the factors, each with its tangent.

    The copies have none, because their factors have it.
    """
    operands, copies = split(primals, copied)
    terms = []
    for i, tangent in enumerate(tangents[:2]):
        if isinstance(tangent, ad.Zero):
            continue
        factors, others, j = list(operands), list(copies), 1 - i
        factors[i], others[i] = tangent, None
        if stand_in[j] and copied[j]:
            factors[j], others[j] = copies[j], None
        terms.append(_bind(jaxpr, factors, others))
    result = _bind(jaxpr, operands, copies, stand_in)
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
) -> list[Any]:
    """The gradient for the one factor of which the product is a linear function."""
    results: list[Any] = [None] * len(operands)
    factors, copies = split(operands, copied)
    (place,) = (i for i, x in enumerate(factors) if ad.is_undefined_primal(x))
    if not isinstance(cotangent, ad.Zero):
        aval = factors[place].aval
        given = [cotangent, *(x for i, x in enumerate(factors) if i != place)]
        program = _transposed(jaxpr, place, _setting(), aval, *map(jax.typeof, given))
        others = [None, copies[1 - place]]
        results[place] = _evaluate(program, given, others, jaxpr, aval.dtype)
    return results


ad.primitive_transposes[low_product_p] = _transpose


@functools.lru_cache(maxsize=4096)
def _transposed(
    jaxpr: core.ClosedJaxpr, place: int, setting: Any, factor: Any, *avals: Any
) -> core.ClosedJaxpr:
    """The transpose of a product for one factor, as a program for float32.

    `setting` is part of the key only; `avals` are those of the cotangent, of the other
    factor and of the rest.
    """
    apply = _in_float32(jaxpr)

    def pull_back(cotangent: Any, *others: Any) -> Any:
        def of_factor(x: Any) -> Any:
            return apply(*others[:place], x, *others[place:])

        (factor_aval,) = _in(jnp.float32, [factor])
        return jax.linear_transpose(of_factor, factor_aval)(cotangent)[0]

    return jax.make_jaxpr(pull_back)(*_in(jnp.float32, avals))


def _setting() -> Any:
    """The setting of JAX that a product without a precision reads when it is traced."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def _in_float32(jaxpr: core.ClosedJaxpr) -> Callable[..., Any]:
    """The product in a program, as a function of float32 arrays."""
    equation = product_of(jaxpr)
    params = {**equation.params, "preferred_element_type": jnp.dtype(jnp.float32)}
    return lambda *operands: bind(equation.primitive, operands, params)[0]


def _evaluate(
    program: core.ClosedJaxpr,
    operands: Sequence[Any],
    copies: Sequence[Any],
    jaxpr: core.ClosedJaxpr,
    dtype: Any,
    stand_in: tuple[bool, ...] = (False, False),
) -> Any:
    """Evaluates moves and a product as low as that in `jaxpr`, with a result dtype.

    The copies of the first two operands are moved as these are.
    """
    # For each variable its array, and the copy of this array or None.
    arrays = dict(zip(program.jaxpr.invars, operands, strict=True))
    moved = dict(zip(program.jaxpr.invars[:2], copies, strict=True))
    for equation in program.jaxpr.eqns:
        inputs = [_read(arrays, atom) for atom in equation.invars]
        low_inputs = [_read(moved, atom) for atom in equation.invars]
        params, primitive = dict(equation.params), equation.primitive
        low_outputs: list[Any] = [None] * len(equation.outvars)
        if primitive.name in LOW:
            params["preferred_element_type"] = dtype
            low = _low_of(jaxpr)
            outputs = [
                low_product(primitive, inputs, low_inputs[:2], low, params, stand_in)
            ]
        else:
            outputs = list(bind(primitive, inputs, params))
            if all(x is not None for x in low_inputs):
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
) -> tuple[Any, int]:
    """The product of batches of factors."""
    (operands, copies), (axes, axes_of_copies) = (
        split(some, copied) for some in (operands, axes)
    )
    axes = tuple(axis if isinstance(axis, int) else None for axis in axes)
    copies = [
        copy if axis == other else None
        for copy, axis, other in zip(copies, axes_of_copies, axes[:2], strict=True)
    ]
    program, axis = _batched(jaxpr, axes, _setting(), *map(jax.typeof, operands))
    dtype = jaxpr.out_avals[0].dtype
    return _evaluate(program, operands, copies, jaxpr, dtype, stand_in), axis


batching.primitive_batchers[low_product_p] = _batch


@functools.lru_cache(maxsize=4096)
def _batched(
    jaxpr: core.ClosedJaxpr, axes: tuple[int | None, ...], setting: Any, *avals: Any
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
