"""Evaluate a program that was written for float32, operation by operation.

What goes nowhere but into products is rounded where it is made: it is then stored once,
in half the bytes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_lossscale._casting import (
    Origin,
    Value,
    argument,
    as_operand,
    cast,
    choose,
    declared,
    fits,
    is_cast,
    is_rounded,
    origin_of,
    params_in,
    read_by_products,
    variables_of,
    why_left_alone,
)
from optax_lossscale._custom_rules import custom_jvp, custom_vjp
from optax_lossscale._masking import evaluate
from optax_lossscale._nested import NESTED
from optax_lossscale._operations import SENSITIVE, Policy

CALLS = {**NESTED, "custom_jvp_call": custom_jvp, "custom_vjp_call": custom_vjp}


def run(
    closed: core.ClosedJaxpr,
    inputs: Sequence[Value],
    policy: Policy,
    rounded: Sequence[bool] = (),
) -> list[Value]:
    """Evaluates a program with casts.

    Args:
      closed: The program, written for float32.
      inputs: A value for each of its inputs.
      policy: What computes in what.
      rounded: Of each output, whether it is rounded to the low dtype where it is made,
        so that whatever else reads it reads the rounded one. Empty: none is.

    Returns:
      A value for each of its outputs, perhaps narrower than declared.
    """
    program = closed.jaxpr
    values: dict[core.Var, Value] = dict(zip(program.invars, inputs, strict=True))
    for variable, constant in zip(program.constvars, closed.consts, strict=True):
        values[variable] = argument(constant)
    to_round = read_by_products(program, policy, rounded)
    if rounded:
        to_round |= variables_of(program.outvars, rounded)

    @functools.cache
    def cast_variable(variable: core.Var, dtype: Any) -> Any:
        return cast(values[variable].array, dtype)

    def read(atom: Any) -> Value:
        if isinstance(atom, core.Literal):
            is_held = fits(atom.val, policy.dtype)
            return Value(atom.val, Origin.CONSTANT if is_held else Origin.COMPUTED)
        return values[atom]

    def read_as(atom: Any, dtype: Any) -> Any:
        if not is_cast(atom):
            return read(atom).array
        literal = isinstance(atom, core.Literal)
        return cast(atom.val, dtype) if literal else cast_variable(atom, dtype)

    for equation in program.eqns:
        name = equation.primitive.name
        operands = [as_operand(read(x), x, equation) for x in equation.invars]
        flags = [variable in to_round for variable in equation.outvars]
        if name in CALLS and not why_left_alone(equation, policy):
            outputs = CALLS[name](run, equation, operands, policy, flags)
        else:
            dtype, reason = choose(equation, operands, policy)
            policy.note(equation, dtype, reason)
            if dtype is None and name in SENSITIVE:
                results = _recomputed(equation, operands)
            else:
                arrays = [read_as(x, dtype or x.aval.dtype) for x in equation.invars]
                results = evaluate(equation, arrays, params_in(equation, dtype))
            origin = origin_of(equation, operands)
            outputs = [Value(array, origin) for array in results]
            is_one = is_rounded(equation, operands, dtype, policy)
            flags = [flag or is_one for flag in flags]
        for variable, value, flag in zip(equation.outvars, outputs, flags, strict=True):
            if flag and is_cast(variable):
                value = Value(cast(value.array, policy.dtype), value.origin)
            values[variable] = value
    return [read(atom) for atom in program.outvars]


def _recomputed(equation: Any, operands: Sequence[Value]) -> Sequence[Any]:
    """A result in float32, of which the backward pass saves the narrow operands."""

    def compute(*arrays: Any) -> Sequence[Any]:
        return evaluate(equation, declared(equation.invars, arrays))

    arrays = [operand.array for operand in operands]
    is_wide = all(jnp.result_type(array).itemsize > 2 for array in arrays)
    if not is_wide:
        compute = jax.checkpoint(compute, prevent_cse=False)
    return compute(*arrays)
