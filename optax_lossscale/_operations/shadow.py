"""Evaluate a program twice at once: as it is written, and beside it in float32.

Each operation runs on its operands, and a second time on what these would be if nothing
had ever been rounded to fewer than 32 bits. Both take the same branches and make the
same number of steps in loops. All of it can be traced: loops run as loops of JAX, whose
body is evaluated in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast.policy import MOVES
from optax_lossscale._autocast.products import low_product_p
from optax_lossscale._autocast.written import product_of
from optax_lossscale._jaxprs import (
    evaluate,
    scope_of,
    scopes_of,
    user_line,
    where_written,
)
from optax_lossscale._operations.dependence import needed
from optax_lossscale._operations.nesting import NESTINGS
from optax_lossscale._operations.reference import (
    in_float32,
    is_rounding_to_float8,
    is_saturation,
)
from optax_lossscale._operations.statistics import (
    Health,
    Statistics,
    glance,
    measure,
    passed_on,
    worst_of,
)
from optax_lossscale._operations.values import (
    Context,
    Frame,
    Record,
    Tape,
    Value,
    as_argument,
    is_float,
    is_narrow,
    of_number,
)

_SAME_NUMBERS = (
    *(primitives.broadcast_in_dim_p, primitives.reshape_p, primitives.squeeze_p),
    *(primitives.transpose_p, primitives.convert_element_type_p),
)
_UNUSED = Value(None, None)  # Of a program that does nothing with it.


def run(
    closed: core.ClosedJaxpr,
    operands: Sequence[Value],
    tape: Tape,
    context: Context,
    is_forward: Sequence[bool],
    is_live: Sequence[bool] = (),
) -> list[Value]:
    """Evaluates a program, and records its operations.

    Args:
      closed: The program.
      operands: A value for each of its inputs.
      tape: Where its operations are recorded.
      context: What surrounds it.
      is_forward: For each of its results, whether more than gradients depend on it.
      is_live: For each of its results, whether anything depends on it. If empty,
        something depends on each.
    """
    program = closed.jaxpr
    values: dict[core.Var, Value] = {}

    def read(atom: Any) -> Value:
        if isinstance(atom, core.Literal):
            return of_number(atom.val)
        return values.get(atom, _UNUSED)

    of_array = as_argument if tape.has_references else lambda array: Value(array, array)
    values.update(zip(program.constvars, map(of_array, closed.consts), strict=True))
    values.update(zip(program.invars, operands, strict=True))
    is_live = is_live or [True] * len(program.outvars)
    live = needed(program, is_live, for_effects=True)
    forward = needed(program, is_forward)
    for equation, dead in zip(program.eqns, _last_reads(program), strict=True):
        if live.isdisjoint(equation.outvars) and not equation.effects:
            continue
        flags = [variable in forward for variable in equation.outvars]
        inputs = [read(atom) for atom in equation.invars]
        are_live = [variable in live for variable in equation.outvars]
        outputs = _apply(Frame(run, equation, inputs, tape, context, flags, are_live))
        values.update(zip(equation.outvars, outputs, strict=True))
        for variable in dead:  # So that their memory is free.
            values.pop(variable, None)
    return [read(atom) for atom in program.outvars]


def _last_reads(program: core.Jaxpr) -> list[set[core.Var]]:
    """For each equation, the variables that no later one reads."""
    seen = {atom for atom in program.outvars if isinstance(atom, core.Var)}
    dead = []
    for equation in reversed(program.eqns):
        atoms = [*equation.invars, *equation.outvars]
        variables = {atom for atom in atoms if isinstance(atom, core.Var)}
        dead.append(variables - seen)
        seen |= variables
    return dead[::-1]


def _apply(frame: Frame) -> list[Value]:
    """Evaluates one operation and returns its results."""
    primitive = frame.equation.primitive
    evaluate_programs = NESTINGS.get(primitive) or NESTINGS.get(primitive.name)
    if is_rounding_to_float8(frame.equation):  # It is part of the product.
        arrays = [operand.array for operand in frame.operands]
        return [Value(array, array) for array in evaluate(frame.equation, arrays)]
    if evaluate_programs is None or is_saturation(frame.equation):
        return _apply_alone(frame)
    where = user_line(frame.equation) or frame.context.where
    scope = (*frame.context.scope, *scope_of(frame.equation))
    context = frame.context._replace(
        where=where, scope=scope, is_transposed=_is_transposed(frame)
    )
    return evaluate_programs(frame._replace(context=context))


def _apply_alone(frame: Frame) -> list[Value]:
    """Evaluates and records an operation that holds no programs."""
    equation, operands, tape = frame.equation, frame.operands, frame.tape
    arrays = list(evaluate(equation, [x.array for x in operands]))
    if not tape.has_references:
        return _glance(frame, arrays)
    references = in_float32(equation, operands, arrays)
    is_scaled = any(x.is_scaled for x in operands)
    floats = [i for i, array in enumerate(arrays) if is_float(array)]
    known = [x.health for x in operands if x.health is not None]
    statistics = None
    if not floats:  # A comparison, say: it passes on that it compared NaN.
        health = worst_of(known) if known else None
    else:
        results, exact = [arrays[i] for i in floats], [references[i] for i in floats]
        moved = _moved(equation, operands, arrays)
        statistics, health = moved or measure(results, exact, known, tape.clock)
        tape.records.append(_record(frame, arrays[floats[0]], is_scaled))
        tape.statistics.append(statistics)
    kept = statistics if len(arrays) == 1 else None
    return [
        Value(array, reference, health, is_scaled, kept)
        for array, reference in zip(arrays, references, strict=True)
    ]


def _glance(frame: Frame, arrays: Sequence[Any]) -> list[Value]:
    """Records an operation whose result has fewer than 32 bits, unless it only moves.

    It runs once only.
    """
    equation, values = frame.equation, [Value(array, array) for array in arrays]
    if not arrays:
        return values
    first = arrays[0]
    if is_narrow(first) and equation.primitive.name not in MOVES:
        is_cast = _name_of(equation) == "convert_element_type"
        before = frame.operands[0].array if is_cast else first
        frame.tape.records.append(_record(frame, first, is_scaled=False))
        frame.tape.statistics.append(glance(first, before))
    return values


def _moved(
    equation: core.JaxprEqn, operands: Sequence[Value], arrays: Sequence[Any]
) -> tuple[Statistics, Health] | None:
    """The numbers of an operation whose result has the entries of its operand.

    They need not be measured again. None for any other operation.
    """
    if equation.primitive not in _SAME_NUMBERS or len(operands) != 1:
        return None
    (operand,), (array,) = operands, arrays
    old, new = (jnp.result_type(x) for x in (operand.array, array))
    is_widened = is_narrow(operand.array) and new == jnp.float32
    size, old_size = jnp.size(array), jnp.size(operand.array)
    if operand.statistics is None or operand.health is None or not old_size:
        return None
    if new != old and not is_widened:
        return None
    times = np.int32(size // old_size)
    result: tuple[Statistics, Health]
    result = passed_on(operand.statistics, operand.health, times)
    return result


def _record(frame: Frame, result: Any, is_scaled: bool) -> Record:
    """The record of an operation with a first floating result."""
    equation, context = frame.equation, frame.context
    where = user_line(equation) or context.where or where_written(equation) or ""
    return Record(
        primitive=_name_of(equation),
        where=where,
        scope=(*context.scope, *scope_of(equation)),
        is_backward=not any(frame.is_forward),
        is_transposed=_is_transposed(frame),
        is_scaled=is_scaled,
        is_recomputed=context.is_recomputed and not is_scaled,
        dtype=jnp.result_type(result),
        shape=jnp.shape(result),
        loop=context.loop,
    )


def _is_transposed(frame: Frame) -> bool:
    """Whether an operation belongs to a backward pass."""
    scopes = scopes_of(frame.equation)
    if "rematted_computation" in scopes:  # `jax.checkpoint` repeats it there.
        return False
    return frame.context.is_transposed or "transpose" in scopes


def _name_of(equation: core.JaxprEqn) -> str:
    """The name of a primitive as users know it."""
    if equation.primitive is low_product_p:
        return str(product_of(equation.params["jaxpr"]).primitive.name)
    if is_saturation(equation):
        return "convert_element_type"
    return str(equation.primitive.name)
