"""Compute an operation a second time, on numbers that were never rounded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_lossscale._autocast.products import low_product_p
from optax_lossscale._autocast.written import product_of, split
from optax_lossscale._jaxprs import bind, evaluate, programs_of
from optax_lossscale._operations.values import Value, is_narrow, widened
from optax_lossscale._tree import wide_dtype


def in_float32(
    equation: core.JaxprEqn, operands: Sequence[Value], arrays: Sequence[Any]
) -> list[Any]:
    """The results of an operation on the references of its operands.

    Where it cannot run in float32, its results are widened as they are.
    """
    references: Sequence[Any] = [x.reference for x in operands]
    if is_saturation(equation) or equation.primitive.name == "reduce_precision":
        return list(references)
    is_product = equation.primitive is low_product_p
    is_rounded = is_product or any(map(is_narrow, arrays))
    if not is_rounded and all(x.reference is x.array for x in operands):
        return list(arrays)
    if len(list(programs_of(equation))) > len(_programs_in(equation)):
        return list(map(widened, arrays))
    # Such as an operation on bits, or a kernel that is written for one dtype.
    with contextlib.suppress(Exception):
        if is_product:
            params = equation.params
            references, _ = split(references, params["copied"], params["float8"])
            equation = product_of(equation.params["jaxpr"])
        params = {key: _wide_param(x) for key, x in equation.params.items()}
        if not _has_side_effect(equation):
            outputs = list(evaluate(equation, references, params))
            if all(map(_is_reference, outputs, arrays)):
                return outputs
    return list(map(widened, arrays))


def _has_side_effect(equation: core.JaxprEqn) -> bool:
    """Whether an operation does more than to compute, or calls Python.

    JAX also counts as an effect that a collective reads the name of an axis.
    """
    if equation.primitive.name == "pure_callback":
        return True
    return any(
        type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects
    )


def _is_reference(output: Any, array: Any) -> bool:
    """Whether an array may be the reference of another one."""
    dtype = jnp.result_type(array)
    dtype = wide_dtype(dtype) if is_narrow(array) else dtype
    return jnp.shape(output) == jnp.shape(array) and jnp.result_type(output) == dtype


def _programs_in(equation: core.JaxprEqn) -> list[Any]:
    """The parameters of an operation that are programs, such as that of a scatter."""
    params = equation.params.values()
    return [x for x in params if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]


def _wide_program(program: Any) -> Any:
    """The same program for numbers in float32."""
    closed = program if isinstance(program, core.ClosedJaxpr) else None
    consts = closed.consts if closed else ()
    jaxpr = closed.jaxpr if closed else program

    def apply(*arrays: Any) -> list[Any]:
        values = dict(zip(jaxpr.invars, arrays, strict=True))
        values.update(zip(jaxpr.constvars, map(widened, consts), strict=True))

        def read(atom: Any) -> Any:
            is_literal = isinstance(atom, core.Literal)
            return widened(atom.val) if is_literal else values[atom]

        for equation in jaxpr.eqns:
            params = {key: _wide_param(x) for key, x in equation.params.items()}
            outputs = bind(equation.primitive, list(map(read, equation.invars)), params)
            values.update(zip(equation.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))

    avals = [x.aval.update(dtype=_wide(x.aval.dtype)) for x in jaxpr.invars]
    wide = jax.make_jaxpr(apply)(*avals)
    return wide if closed else wide.jaxpr


def _wide(dtype: Any) -> Any:
    """float32 in place of a floating dtype below 32 bits."""
    return wide_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _wide_param(param: Any) -> Any:
    """A parameter of an operation for float32: its dtypes, and its programs."""
    if isinstance(param, core.Jaxpr | core.ClosedJaxpr):
        return _wide_program(param)
    return _wide(param) if isinstance(param, np.dtype) else param


def is_rounding_to_float8(equation: core.JaxprEqn) -> bool:
    """Whether an operation makes a copy of a parameter, for products in float8."""
    is_pair = len(equation.outvars) == 2  # The copy, and the exponent of its scale.
    return equation.params.get("name") == "round_to_float8" and is_pair


def is_saturation(equation: core.JaxprEqn) -> bool:
    """Whether an operation is the cast of autocast that keeps masks finite."""
    is_one = len(equation.invars) == len(equation.outvars) == 1  # Its transpose is not.
    return equation.params.get("name") == "_saturate" and is_one
