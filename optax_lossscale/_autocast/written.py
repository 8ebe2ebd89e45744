"""The programs of a `low_product`: as it is written, transposed, and for batches."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from optax_lossscale._autocast.float8 import Factors, Rounded, multiply, round_to_float8
from optax_lossscale._jaxprs import bind


def split(
    operands: Sequence[Any], copied: Sequence[bool], float8: Factors
) -> tuple[Sequence[Any], list[Any]]:
    """The operands of a `low_product` without the copies, and the copies."""
    parts = 2 if float8 else 1
    count = len(operands) - parts * sum(copied)
    given = iter(operands[count:])
    groups = iter(zip(*[given] * parts, strict=True))
    copies = [next(groups) if flag else None for flag in copied]
    if float8:
        return operands[:count], [copy and Rounded(*copy) for copy in copies]
    return operands[:count], [copy and copy[0] for copy in copies]


def product_of(program: core.ClosedJaxpr) -> Any:
    """The product in the program of a `low_product`."""
    return program.jaxpr.eqns[-1]


def low_of(program: core.ClosedJaxpr) -> Any:
    """The low dtype in the program of a `low_product`."""
    return product_of(program).invars[0].aval.dtype


def as_written(
    *operands: Any,
    jaxpr: core.ClosedJaxpr,
    copied: Sequence[bool],
    stand_in: Sequence[bool] = (),
    float8: Factors = None,
    platform: str = "",
) -> Any:
    """The same as several operations, in a form that XLA for a platform can compute."""
    equation, low = product_of(jaxpr), low_of(jaxpr)
    dtype = jaxpr.out_avals[0].dtype
    wide, copies = split(operands, copied, float8)
    if float8 is not None:
        pair = [
            copy or round_to_float8(x, to)
            for x, to, copy in zip(wide, float8, copies, strict=True)
        ]
        primitive, params = equation.primitive, equation.params
        return multiply(primitive, pair, params, multiplies_float8=platform != "cpu")
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


@functools.lru_cache(maxsize=4096)
def program_of(
    product: core.Primitive, low: Any, items: tuple[Any, ...], *avals: Any
) -> core.ClosedJaxpr:
    """The product of the rounded factors, as a program."""

    def apply(*operands: Any) -> Any:
        return bind(product, operands, dict(items))[0]

    return jax.make_jaxpr(apply)(*in_dtype(low, avals))


@functools.lru_cache(maxsize=4096)
def transposed_program(
    jaxpr: core.ClosedJaxpr, place: int, setting: Any, factor: Any, *avals: Any
) -> core.ClosedJaxpr:
    """The transpose of a product for one factor, as a program for float32.

    `setting` is part of the key only; `avals` are those of the cotangent, of the other
    factor and of the rest.
    """
    apply = in_float32(jaxpr)

    def pull_back(cotangent: Any, *others: Any) -> Any:
        def of_factor(x: Any) -> Any:
            return apply(*others[:place], x, *others[place:])

        (factor_aval,) = in_dtype(jnp.float32, [factor])
        return jax.linear_transpose(of_factor, factor_aval)(cotangent)[0]

    return jax.make_jaxpr(pull_back)(*in_dtype(jnp.float32, avals))


def setting() -> Any:
    """The setting of JAX that a product without a precision reads when it is traced."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


def in_float32(jaxpr: core.ClosedJaxpr) -> Callable[..., Any]:
    """The product in a program, as a function of float32 arrays."""
    equation = product_of(jaxpr)
    params = {**equation.params, "preferred_element_type": jnp.dtype(jnp.float32)}
    return lambda *operands: bind(equation.primitive, operands, params)[0]


@functools.lru_cache(maxsize=4096)
def batched_program(
    jaxpr: core.ClosedJaxpr, axes: tuple[int | None, ...], setting: Any, *avals: Any
) -> tuple[core.ClosedJaxpr, int]:
    """A product of batches, as a program for float32, and the batch axis of its result.

    That is the axis with the shortest program, so that the result need not be moved.
    """

    def program_with(axis: int) -> core.ClosedJaxpr:
        function = jax.vmap(in_float32(jaxpr), in_axes=axes, out_axes=axis)
        return jax.make_jaxpr(function)(*in_dtype(jnp.float32, avals))

    rank = jaxpr.out_avals[0].ndim + 1
    programs = [(program_with(axis), axis) for axis in range(rank)]
    return min(programs, key=lambda pair: len(pair[0].eqns))


def in_dtype(dtype: Any, avals: Sequence[Any]) -> tuple[Any, ...]:
    """The same avals, with the factors in another dtype, which is not a weak one."""
    factors = (aval.update(dtype=dtype, weak_type=False) for aval in avals[:2])
    return *factors, *avals[2:]
