"""Functions with derivative rules of their own: made anew, with the same rules.

The rule is written for float32, so it is traced in that, from the function as it is,
and then evaluated as any other program. Evaluating the body in its place would lose the
rule: the gradient of relu at 0 would be 1/2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from optax_lossscale._autocast.control_flow import Call, computed
from optax_lossscale._autocast.policy import Policy
from optax_lossscale._autocast.values import Value, cast, declared
from optax_lossscale._jaxprs import context_of, equations_of, evaluate
from optax_lossscale._tree import is_floating


def custom_jvp(call: Call) -> list[Value]:
    """A call of a `jax.custom_jvp` function."""
    closed, equation = call.params["call_jaxpr"], call.equation
    call = call._replace(policy=_policy_inside(closed.jaxpr, call.policy))
    program, origins = call.trace(closed)
    run, policy, variables = call.run, call.policy, equation.invars
    dtypes = [aval.dtype for aval in program.out_avals]
    is_low = [dtype == policy.dtype for dtype in dtypes]
    function = jax.custom_jvp(core.jaxpr_as_fun(program))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        places = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        arrays = [*primals, *(tangents[i] for i in places)]

        def pushforward(*arrays: Any) -> list[Any]:
            primals, tangents = arrays[: len(variables)], arrays[len(variables) :]
            as_written = _function_of(equation, primals, places)
            primals = tuple(primals[i] for i in places)
            outputs, out_tangents = jax.jvp(as_written, primals, tangents)
            return [*outputs, *out_tangents]

        atoms = [*variables, *(variables[i] for i in places)]
        traced = jax.make_jaxpr(pushforward)(*declared(atoms, arrays))
        # What the rule reads of its own result is the rounded one.
        values = run(traced, computed(arrays), policy, [*is_low, *is_low])
        outputs = [cast(x.array, d) for x, d in zip(values, dtypes * 2, strict=True)]
        return outputs[: len(dtypes)], outputs[len(dtypes) :]

    function.defjvp(rule, symbolic_zeros=True)
    with context_of(equation):
        return list(map(Value, function(*call.arrays), origins))


def custom_vjp(call: Call) -> list[Value]:
    """A call of a `jax.custom_vjp` function."""
    closed, equation = call.params["call_jaxpr"], call.equation
    call = call._replace(policy=_policy_inside(closed.jaxpr, call.policy))
    program, origins = call.trace(closed)
    run, policy, variables = call.run, call.policy, equation.invars
    dtypes = [aval.dtype for aval in program.out_avals]
    in_dtypes = [jnp.result_type(array) for array in call.arrays]
    function = jax.custom_vjp(core.jaxpr_as_fun(program))

    def forward(*primals: Any) -> tuple[list[Any], jax.tree_util.Partial]:
        arrays = [primal.value for primal in primals]
        # Only what is differentiated: the rule may ask what is.
        places = [
            i
            for i, primal in enumerate(primals)
            if primal.perturbed and is_floating(variables[i].aval)
        ]
        structure = None

        def with_residuals(*arrays: Any) -> list[Any]:
            nonlocal structure
            as_written = _function_of(equation, arrays, places)
            outputs, pullback = jax.vjp(as_written, *(arrays[i] for i in places))
            residuals, structure = jax.tree.flatten(pullback)
            return [*outputs, *residuals]

        traced = jax.make_jaxpr(with_residuals)(*declared(variables, arrays))
        residual_vars = traced.jaxpr.outvars[len(dtypes) :]

        def backward(residuals: Sequence[Any], cotangents: list[Any]) -> list[Any]:
            def pull(residuals: Sequence[Any], cotangents: list[Any]) -> Any:
                return jax.tree.unflatten(structure, residuals)(cotangents)

            traced = jax.make_jaxpr(pull)(
                declared(residual_vars, residuals),
                declared(closed.jaxpr.outvars, cotangents),
            )
            inputs = computed([*residuals, *cotangents])
            grads: list[Any] = [None] * len(variables)
            for i, value in zip(places, run(traced, inputs, policy), strict=True):
                grads[i] = cast(value.array, in_dtypes[i])
            return grads

        outputs = [value.array for value in run(traced, computed(arrays), policy)]
        results = zip(outputs, dtypes, strict=False)
        # What `backward` knows goes with the residuals: JAX may call `forward` again,
        # for other operands to be differentiated, before it calls `backward`.
        residuals = jax.tree_util.Partial(backward, *outputs[len(dtypes) :])
        return [cast(x, dtype) for x, dtype in results], residuals

    def backward(residuals: jax.tree_util.Partial, cotangents: Any) -> tuple[Any, ...]:
        cotangents = [
            jnp.zeros(ct.shape, ct.dtype) if isinstance(ct, SymbolicZero) else ct
            for ct in cotangents
        ]
        return tuple(residuals.func(residuals.args, cotangents))

    function.defvjp(forward, backward, symbolic_zeros=True)
    with context_of(equation):
        return list(map(Value, function(*call.arrays), origins))


def _function_of(
    equation: Any, arrays: Sequence[Any], places: Sequence[int]
) -> Callable[..., list[Any]]:
    """An operation as a function of some of its operands."""

    def function(*some: Any) -> list[Any]:
        inputs = list(arrays)
        for i, array in zip(places, some, strict=True):
            inputs[i] = array
        return list(evaluate(equation, inputs))

    return function


def _policy_inside(program: core.Jaxpr, policy: Policy) -> Policy:
    """What holds sensitive operations and has a rule of its own stays in float32."""
    names = {equation.primitive.name for equation in equations_of(program)}
    return policy.without_narrowing() if names & policy.full else policy
