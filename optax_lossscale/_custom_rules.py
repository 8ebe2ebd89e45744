"""Functions with derivative rules of their own: made anew, with the same rules.

The rule is written for float32, so it is traced in that, from the function as it is,
and then evaluated as any other program. Evaluating the body in its place would lose the
rule: the gradient of relu at 0 would be 1/2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_lossscale._casting import Origin, Value, cast, declared
from optax_lossscale._masking import context_of, evaluate
from optax_lossscale._nested import Run, trace_body
from optax_lossscale._operations import Policy
from optax_lossscale._tree import is_floating


def custom_jvp(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    closed = equation.params["call_jaxpr"]
    if not all(is_floating(variable.aval) for variable in equation.outvars):
        return _as_written(equation, operands)
    policy = _policy_inside(closed.jaxpr, policy)
    program, origins = trace_body(run, closed, operands, policy, rounded)
    is_low = [aval.dtype == policy.dtype for aval in program.out_avals]
    differentiable = _differentiable(equation)

    call = jax.custom_jvp(core.jaxpr_as_fun(program))

    @call.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        tangents = [tangents[i] for i in differentiable]
        arrays = [*primals, *tangents]

        def pushforward(*arrays: Any) -> list[Any]:
            function = _function_of(equation, arrays, differentiable)
            primals = [arrays[i] for i in differentiable]
            tangents = list(arrays[len(operands) :])
            outputs, out_tangents = jax.jvp(function, primals, tangents)
            return [*outputs, *out_tangents]

        variables = [*equation.invars, *(equation.invars[i] for i in differentiable)]
        traced = jax.make_jaxpr(pushforward)(*declared(variables, arrays))
        # What the rule reads of its own result is the rounded one.
        values = run(traced, _computed(arrays), policy, [*is_low, *is_low])
        outputs = [value.array for value in values]
        dtypes = [aval.dtype for aval in program.out_avals]
        outputs = [cast(x, d) for x, d in zip(outputs, dtypes * 2, strict=True)]
        return outputs[: len(dtypes)], outputs[len(dtypes) :]

    with context_of(equation):
        outputs = call(*(operand.array for operand in operands))
    return [Value(x, origin) for x, origin in zip(outputs, origins, strict=True)]


def custom_vjp(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    closed = equation.params["call_jaxpr"]
    if not all(is_floating(variable.aval) for variable in equation.outvars):
        return _as_written(equation, operands)
    policy = _policy_inside(closed.jaxpr, policy)
    program, origins = trace_body(run, closed, operands, policy, rounded)
    dtypes = [aval.dtype for aval in program.out_avals]
    differentiable = _differentiable(equation)
    structure, residual_vars = None, list[Any]()

    call = jax.custom_vjp(core.jaxpr_as_fun(program))

    def forward(*arrays: Any) -> tuple[list[Any], list[Any]]:
        nonlocal structure, residual_vars

        def with_residuals(*arrays: Any) -> list[Any]:
            nonlocal structure
            function = _function_of(equation, arrays, differentiable)
            outputs, pullback = jax.vjp(function, *(arrays[i] for i in differentiable))
            residuals, structure = jax.tree.flatten(pullback)
            return [*outputs, *residuals]

        traced = jax.make_jaxpr(with_residuals)(*declared(equation.invars, arrays))
        residual_vars = traced.jaxpr.outvars[len(dtypes) :]
        outputs = [value.array for value in run(traced, _computed(arrays), policy)]
        results = zip(outputs, dtypes, strict=False)
        return [cast(x, dtype) for x, dtype in results], outputs[len(dtypes) :]

    def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        def pull(residuals: list[Any], cotangents: list[Any]) -> Any:
            return jax.tree.unflatten(structure, residuals)(cotangents)

        traced = jax.make_jaxpr(pull)(
            declared(residual_vars, residuals),
            declared(closed.jaxpr.outvars, cotangents),
        )
        inputs = _computed([*residuals, *cotangents])
        grads: list[Any] = [None] * len(operands)
        for i, value in zip(differentiable, run(traced, inputs, policy), strict=True):
            grads[i] = cast(value.array, jnp.result_type(operands[i].array))
        return tuple(grads)

    call.defvjp(forward, backward)
    with context_of(equation):
        outputs = call(*(operand.array for operand in operands))
    return [Value(x, origin) for x, origin in zip(outputs, origins, strict=True)]


def _as_written(equation: Any, operands: Sequence[Value]) -> list[Value]:
    arrays = [operand.array for operand in operands]
    return _computed(evaluate(equation, declared(equation.invars, arrays)))


def _computed(arrays: Sequence[Any]) -> list[Value]:
    return [Value(array, Origin.COMPUTED) for array in arrays]


def _differentiable(equation: Any) -> list[int]:
    """Which operands can be differentiated."""
    return [i for i, atom in enumerate(equation.invars) if is_floating(atom.aval)]


def _function_of(
    equation: Any, arrays: Sequence[Any], places: Sequence[int]
) -> Callable[..., list[Any]]:
    """An operation as a function of some of its operands."""

    def function(*some: Any) -> list[Any]:
        inputs = list(arrays[: len(equation.invars)])
        for i, array in zip(places, some, strict=True):
            inputs[i] = array
        return list(evaluate(equation, inputs))

    return function


def _policy_inside(program: core.Jaxpr, policy: Policy) -> Policy:
    """What holds sensitive operations and has a rule of its own stays in float32."""
    is_sensitive = _holds(program, policy.full)
    return policy._replace(widest=frozenset()) if is_sensitive else policy


def _holds(program: core.Jaxpr, names: frozenset[str]) -> bool:
    return any(
        equation.primitive.name in names
        or any(_holds(inner, names) for inner in _inner_programs(equation))
        for equation in program.eqns
    )


def _inner_programs(equation: Any) -> list[core.Jaxpr]:
    leaves = jax.tree.leaves(list(equation.params.values()))
    programs = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [program for program in programs if isinstance(program, core.Jaxpr)]
