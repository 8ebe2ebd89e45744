"""Rebuild functions that have derivative rules of their own, with the same rules.

A rule is written for float32. So it is traced in float32, from the original function,
and then evaluated like any other program. If the function's body were evaluated in its
place, the rule would be lost: the gradient of relu at 0 would be 1/2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend import core

from optax_lossscale._autocast.control_flow import Call
from optax_lossscale._autocast.markers import tracing_for
from optax_lossscale._autocast.policy import Policy
from optax_lossscale._autocast.values import (
    OF_PARAMETERS,
    Value,
    as_computed,
    as_declared,
    cast,
    values_like,
)
from optax_lossscale._jaxprs import context_of, equations_of, evaluate, keep_lines
from optax_lossscale._tree import is_floating


def custom_jvp(call: Call) -> list[Value]:
    """A call of a `jax.custom_jvp` function."""
    call, program, results = _low_program(call)
    run, policy, equation = call.run, call.policy, call.equation
    variables, floats = equation.invars, _places_of_floats(equation.outvars)
    dtypes = [aval.dtype for aval in program.out_avals]
    sources = [operand.source for operand in call.operands]
    is_low = [dtype == policy.dtype for dtype in dtypes]
    function = jax.custom_jvp(core.jaxpr_as_fun(program))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        places = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        places = [i for i in places if is_floating(variables[i].aval)]
        arrays = [*primals, *(tangents[i] for i in places)]

        def pushforward(*arrays: Any) -> list[Any]:
            primals, tangents = arrays[: len(variables)], arrays[len(variables) :]
            as_written = _function_of(equation, primals, places)
            primals = tuple(primals[i] for i in places)
            outputs, out_tangents = jax.jvp(as_written, primals, tangents)
            return [*outputs, *(out_tangents[i] for i in floats)]

        atoms = [*variables, *(variables[i] for i in places)]
        with tracing_for(policy.dtype):
            traced = jax.make_jaxpr(pushforward)(*as_declared(atoms, arrays))
        # Where the rule reads the function's result, it must read the rounded one.
        rounded = [*is_low, *(is_low[i] for i in floats)]
        tangent_arrays = arrays[len(variables) :]
        tangent_sources = [sources[i] for i in places]
        inputs = as_computed(primals, sources)
        inputs += as_computed(tangent_arrays, tangent_sources, is_tangent=True)
        with keep_lines():
            values = run(traced, inputs, policy, rounded, rule="forward")
        wanted = [*dtypes, *(dtypes[i] for i in floats)]
        outputs = [cast(x.array, d) for x, d in zip(values, wanted, strict=True)]
        results, given = outputs[: len(dtypes)], iter(outputs[len(dtypes) :])
        return results, [
            next(given) if i in floats else zero_from_primal(result)
            for i, result in enumerate(results)
        ]

    # As in the original, because eager `shard_map` refuses rules with symbolic zeros.
    function.defjvp(rule, symbolic_zeros=equation.params["symbolic_zeros"])
    with context_of(equation):
        return values_like(results, function(*call.arrays))


def custom_vjp(call: Call) -> list[Value]:
    """A call of a `jax.custom_vjp` function."""
    call, program, results = _low_program(call)
    run, policy, equation = call.run, call.policy, call.equation
    variables, floats = equation.invars, _places_of_floats(equation.outvars)
    dtypes = [aval.dtype for aval in program.out_avals]
    sources = [operand.source for operand in call.operands]
    in_dtypes = [jnp.result_type(array) for array in call.arrays]
    # JAX refuses to differentiate by an array that the function closes over. It is an
    # operand here, so ask JAX which operands it differentiates by.
    closes_over = equation.params["num_consts"] > 0
    symbolic_zeros = equation.params["symbolic_zeros"] or closes_over
    function = jax.custom_vjp(core.jaxpr_as_fun(program))

    def forward_rule(*primals: Any) -> tuple[list[Any], jax.tree_util.Partial]:
        arrays, places = primals, _places_of_floats(variables)
        if symbolic_zeros:  # The rule can see which operands are perturbed.
            places = [i for i in places if primals[i].perturbed]
            arrays = tuple(primal.value for primal in primals)

        def with_pullback(*arrays: Any) -> Any:
            as_written = _function_of(equation, arrays, places)

            def with_floats(*some: Any) -> tuple[list[Any], list[Any]]:
                outputs = as_written(*some)
                return [outputs[i] for i in floats], outputs

            primals = [arrays[i] for i in places]
            _, pullback, outputs = jax.vjp(with_floats, *primals, has_aux=True)
            return outputs, pullback

        with tracing_for(policy.dtype):
            traced, (_, pullback) = jax.make_jaxpr(with_pullback, return_shape=True)(
                *as_declared(variables, arrays)
            )
        structure = jax.tree.structure(pullback)
        residual_vars = traced.jaxpr.outvars[len(dtypes) :]

        def pull_back(residuals: Sequence[Any], cotangents: list[Any]) -> list[Any]:
            def as_written(residuals: Sequence[Any], cotangents: list[Any]) -> Any:
                return jax.tree.unflatten(structure, residuals)(cotangents)

            with tracing_for(policy.dtype):
                traced = jax.make_jaxpr(as_written)(
                    as_declared(residual_vars, residuals),
                    as_declared([equation.outvars[i] for i in floats], cotangents),
                )
            inputs = as_computed([*residuals, *cotangents])
            grads: list[Any] = [None] * len(variables)
            wide = [sources[i] in OF_PARAMETERS for i in places]
            with keep_lines():
                values = run(traced, inputs, policy, wide=wide, rule="backward")
            for i, value in zip(places, values, strict=True):
                grads[i] = cast(value.array, in_dtypes[i])
            return grads

        inputs = as_computed(arrays, sources)
        with keep_lines():
            values = run(traced, inputs, policy, rule="forward")
        outputs = [value.array for value in values]
        results = zip(outputs[: len(dtypes)], dtypes, strict=True)
        # JAX may run this rule again, for other perturbed operands, before it runs the
        # backward rule. So `pull_back` travels with the residuals that it belongs to.
        residuals = jax.tree_util.Partial(pull_back, *outputs[len(dtypes) :])
        return [cast(x, dtype) for x, dtype in results], residuals

    def backward_rule(
        residuals: jax.tree_util.Partial, cotangents: Any
    ) -> tuple[Any, ...]:
        cotangents = [
            jnp.zeros(ct.shape, ct.dtype) if isinstance(ct, SymbolicZero) else ct
            for ct in (cotangents[i] for i in floats)
        ]
        return tuple(residuals.func(residuals.args, cotangents))

    function.defvjp(forward_rule, backward_rule, symbolic_zeros=symbolic_zeros)
    with context_of(equation):
        return values_like(results, function(*call.arrays))


def _low_program(call: Call) -> tuple[Call, core.ClosedJaxpr, list[Value]]:
    """The call with the policy for the function's program, and that program, cast."""
    closed = call.params["call_jaxpr"]
    call = call._replace(policy=_policy_inside(closed.jaxpr, call.policy))
    return call, *call.trace(closed)


def _places_of_floats(atoms: Sequence[Any]) -> list[int]:
    """The places of those operands or results that have derivatives."""
    return [i for i, atom in enumerate(atoms) if is_floating(atom.aval)]


def _function_of(
    equation: Any, arrays: Sequence[Any], places: Sequence[int]
) -> Callable[..., list[Any]]:
    """The operation as a function of the operands at some places."""

    def function(*some: Any) -> list[Any]:
        inputs = list(arrays)
        for i, array in zip(places, some, strict=True):
            inputs[i] = array
        # What the rule traces is evaluated under the names and the line of its call.
        return list(evaluate(equation, inputs, is_located=False))

    return function


def _policy_inside(program: core.Jaxpr, policy: Policy) -> Policy:
    """Keeps all but products in float32 if a program holds float32-list operations."""
    names = {equation.primitive.name for equation in equations_of(program)}
    return policy.products_only() if names & policy.full else policy
