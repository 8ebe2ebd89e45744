"""Evaluate a program that was written for float32, operation by operation.

What goes nowhere but into products is rounded where it is made: it is then stored once,
in half the bytes.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_lossscale._autocast.choice import (
    Choice,
    choose,
    params_in,
    policy_for,
    read_by_products,
    why_left_alone,
)
from optax_lossscale._autocast.control_flow import NESTED, Call
from optax_lossscale._autocast.custom_derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.policy import SENSITIVE, Policy
from optax_lossscale._autocast.values import (
    OF_ARGUMENTS,
    Origin,
    Value,
    argument,
    as_operand,
    cast,
    declared,
    is_cast,
    literal,
    origin_of,
)
from optax_lossscale._jaxprs import evaluate, flagged_variables

OFTEN_READ = (*OF_ARGUMENTS, Origin.HELD)
# What float32 computes from half precision is recomputed in the backward pass.
RECOMPUTED = SENSITIVE | {"atan2", "div"}
NOTE: contextvars.ContextVar[Callable[[Any, Choice | None], None]] = (
    contextvars.ContextVar("note", default=lambda equation, choice: None)
)
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
        to_round |= flagged_variables(program.outvars, rounded)

    @functools.cache
    def cast_once(variable: core.Var, dtype: Any) -> Any:
        return cast(values[variable].array, dtype)

    def read(atom: Any) -> Value:
        is_literal = isinstance(atom, core.Literal)
        return literal(atom.val, policy.dtype) if is_literal else values[atom]

    def read_as(atom: Any, dtype: Any) -> Any:
        value = read(atom)
        if not is_cast(atom):
            return value.array
        # Arguments are cast anew for each that reads them: gradients that come back
        # from several are then summed in float32.
        is_once = not isinstance(atom, core.Literal) and value.origin not in OFTEN_READ
        return cast_once(atom, dtype) if is_once else cast(value.array, dtype)

    for equation in program.eqns:
        name, own = equation.primitive.name, policy_for(equation, policy)
        operands = [as_operand(read(x), x, equation) for x in equation.invars]
        flags = [variable in to_round for variable in equation.outvars]
        if name in CALLS and not why_left_alone(equation):
            outputs = CALLS[name](Call(run, equation, operands, own, flags))
        else:
            choice = choose(equation, operands, own)
            NOTE.get()(equation, choice)
            if choice.dtype is None and name in RECOMPUTED:
                results = _recomputed(equation, operands)
            else:
                dtypes = [choice.dtype or x.aval.dtype for x in equation.invars]
                arrays = list(map(read_as, equation.invars, dtypes))
                results = evaluate(equation, arrays, params_in(equation, choice.dtype))
            origin = origin_of(equation, operands)
            outputs = [Value(array, origin) for array in results]
            flags = [flag or choice.is_rounded for flag in flags]
        for variable, value, flag in zip(equation.outvars, outputs, flags, strict=True):
            array, origin = value
            if flag and is_cast(variable) and origin not in OF_ARGUMENTS:
                array = cast(array, policy.dtype)
            is_normalized = own is not policy and origin is Origin.COMPUTED
            origin = Origin.NORMALIZED if is_normalized else origin
            values[variable] = Value(array, origin)
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
