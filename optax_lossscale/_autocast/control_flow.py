"""Evaluate the programs inside an operation with casts, and rebuild it around them.

Loop carries and branch results keep their declared dtypes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from optax_lossscale._autocast.policy import Policy
from optax_lossscale._autocast.values import (
    OF_MASKS,
    Origin,
    Value,
    as_declared,
    cast,
    is_float32,
)
from optax_lossscale._jaxprs import context_of, evaluate, scan_sizes

HALVES = (jnp.float16, jnp.bfloat16)


class Call(NamedTuple):
    """One operation that holds programs, and the means to evaluate them.

    Attributes:
      run: `interpreter.run`, which evaluates a program. It and `read_by_products` are
        passed in, because importing their modules here would be circular.
      read_by_products: `rounding.read_by_products`.
      equation: The operation.
      operands: The values that it reads.
      policy: The policy for its programs.
      rounded: For each result, whether it is rounded to the low dtype.
    """

    run: Callable[..., list[Value]]
    read_by_products: Callable[..., set[core.Var]]
    equation: Any
    operands: list[Value]
    policy: Policy
    rounded: list[bool]

    @property
    def params(self) -> dict[str, Any]:
        """The operation's parameters."""
        params: dict[str, Any] = self.equation.params
        return params

    @property
    def arrays(self) -> list[Any]:
        """The operands' arrays."""
        return [operand.array for operand in self.operands]

    def trace(self, closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[Value]]:
        """Traces the evaluation of a program; also returns values like its results."""
        results: list[Value] = []

        def body(*arrays: Any) -> list[Any]:
            inputs = values_like(self.operands, arrays)
            outputs = self.run(closed, inputs, self.policy, self.rounded)
            results.extend(_without_arrays(outputs))
            return [output.array for output in outputs]

        return jax.make_jaxpr(body)(*self.arrays), results

    def run_declared(
        self, closed: core.ClosedJaxpr, inputs: Sequence[Value]
    ) -> list[Any]:
        """Evaluates a program and casts its results to their declared dtypes."""
        outputs = [x.array for x in self.run(closed, inputs, self.policy)]
        return as_declared(closed.jaxpr.outvars, outputs)


def values_like(operands: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """The operands with other arrays."""
    pairs = zip(arrays, operands, strict=True)
    return [operand._replace(array=array) for array, operand in pairs]


def _without_arrays(values: Sequence[Value]) -> list[Value]:
    """What is known of the values; their arrays must not leave a trace."""
    return [value._replace(array=None) for value in values]


def as_computed(arrays: Sequence[Any]) -> list[Value]:
    """Values of arrays that some operation computed."""
    return [Value(array, Origin.COMPUTED) for array in arrays]


def as_results(results: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """The results of a loop or of devices; a mask in them is still one."""
    return [
        Value(array, result.origin if result.origin in OF_MASKS else Origin.COMPUTED)
        for result, array in zip(results, arrays, strict=True)
    ]


def jit(call: Call) -> list[Value]:
    """A jitted function inside the program."""
    program, results = call.trace(call.params["jaxpr"])
    params = {**call.params, "jaxpr": program}
    return values_like(results, evaluate(call.equation, call.arrays, params))


def remat(call: Call) -> list[Value]:
    """A function under `jax.checkpoint`."""
    program, results = call.trace(core.ClosedJaxpr(call.params["jaxpr"], ()))
    body = program.jaxpr
    body = body.replace(constvars=[], invars=[*body.constvars, *body.invars])
    arrays, params = [*program.consts, *call.arrays], {**call.params, "jaxpr": body}
    return values_like(results, evaluate(call.equation, arrays, params))


def inline(call: Call) -> list[Value]:
    """A `closed_call` or `eval_jaxpr`, whose program is evaluated in place."""
    closed = call.params["call_jaxpr"]
    return call.run(closed, call.operands, call.policy, call.rounded)


def scan(call: Call) -> list[Value]:
    """A `lax.scan`, or a `fori_loop` with a fixed number of steps."""
    params, closed = call.params, call.params["jaxpr"]
    first, size = scan_sizes(params)
    variables, carry_variables = closed.jaxpr.invars, closed.jaxpr.outvars[:size]
    # Carries keep their declared dtypes, so only the other outputs are rounded.
    rounded = [*[False] * size, *call.rounded[size:]]
    by_products = call.read_by_products(closed.jaxpr, call.policy, rounded)

    constants = [_loop_constant(x) for x in call.operands[:first]]
    carry = [operand.array for operand in call.operands[first : first + size]]
    xs = [
        Value(cast(operand.array, call.policy.dtype), operand.origin)
        if variable in by_products and is_float32(variable)
        else operand
        for operand, variable in zip(
            call.operands[first + size :], variables[first + size :], strict=True
        )
    ]

    results: list[Value] = []

    def body(carry: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        constants_now = map(_declared_half, constants, variables[:first])
        inputs = [*constants_now, *as_computed(carry), *values_like(xs, arrays)]
        values = call.run(closed, inputs, call.policy, rounded)
        results[:] = _without_arrays(values)
        outputs = [value.array for value in values]
        return as_declared(carry_variables, outputs[:size]), outputs[size:]

    with context_of(call.equation):
        carry, ys = lax.scan(
            body,
            as_declared(carry_variables, carry),
            [x.array for x in xs],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    return [*as_computed(carry), *as_results(results[size:], ys)]


def _loop_constant(value: Value) -> Value:
    """Widens a half-precision value that a loop reads at each step.

    It is cast back at each step, so that its gradient is summed in float32.
    """
    if getattr(value.array, "dtype", None) not in HALVES:
        return value
    return Value(cast(value.array, jnp.float32), Origin.LOOP_CONSTANT)


def _declared_half(value: Value, variable: Any) -> Value:
    """Casts a loop constant that is declared in half precision back to its dtype."""
    is_half = variable.aval.dtype in HALVES
    return (
        Value(cast(value.array, variable.aval.dtype), value.origin)
        if is_half
        else value
    )


def while_loop(call: Call) -> list[Value]:
    """A `lax.while_loop`."""
    params, operands = call.params, call.operands
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def apply(closed: Any, constants: list[Value], carry: list[Any]) -> list[Any]:
        return call.run_declared(closed, [*constants, *as_computed(carry)])

    with context_of(call.equation):
        carry = lax.while_loop(
            lambda carry: apply(test, operands[:first], carry)[0],
            lambda carry: apply(body, operands[first:last], carry),
            as_declared(body.jaxpr.outvars, call.arrays[last:]),
        )
    return as_computed(carry)


def cond(call: Call) -> list[Value]:
    """A `lax.cond` or `lax.switch`."""

    def branch(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
        def apply(*arrays: Any) -> list[Any]:
            return call.run_declared(closed, values_like(call.operands[1:], arrays))

        return apply

    index, *arrays = call.arrays
    with context_of(call.equation):
        branches = list(map(branch, call.params["branches"]))
        return as_computed(lax.switch(index, branches, *arrays))


def shard_map(call: Call) -> list[Value]:
    """A `jax.shard_map`."""
    params, closed = call.params, core.ClosedJaxpr(call.params["jaxpr"], ())
    # JAX 0.7 says `manual_axes`, later versions `newly_manual_axes`.
    (manual,) = (params[name] for name in params if name.endswith("manual_axes"))

    results: list[Value] = []

    def body(*arrays: Any) -> list[Any]:
        inputs = values_like(call.operands, arrays)
        values = call.run(closed, inputs, call.policy)
        results[:] = _without_arrays(values)
        return [value.array for value in values]

    with context_of(call.equation):
        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(manual),
            check_vma=params["check_vma"],
        )
        arrays = mapped(*call.arrays)
        return as_results(results, arrays)
