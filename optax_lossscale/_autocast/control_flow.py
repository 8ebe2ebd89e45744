"""Programs within programs: each is built anew around its evaluated body.

Whatever is carried around a loop, or comes out of a branch, keeps its declared dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from optax_lossscale._autocast.choice import read_by_products
from optax_lossscale._autocast.policy import Policy
from optax_lossscale._autocast.values import Origin, Value, cast, declared, is_cast
from optax_lossscale._jaxprs import context_of, evaluate, scan_sizes

HALVES = (jnp.float16, jnp.bfloat16)


class Call(NamedTuple):
    """An operation that holds programs, and what they are evaluated with."""

    run: Callable[..., list[Value]]
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

    def trace(self, closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[Origin]]:
        """The evaluated program, and where its outputs come from."""
        origins: list[Origin] = []

        def body(*arrays: Any) -> list[Any]:
            inputs = values_like(self.operands, arrays)
            outputs = self.run(closed, inputs, self.policy, self.rounded)
            origins.extend(output.origin for output in outputs)
            return [output.array for output in outputs]

        return jax.make_jaxpr(body)(*self.arrays), origins

    def run_declared(
        self, closed: core.ClosedJaxpr, inputs: Sequence[Value]
    ) -> list[Any]:
        """A program's results, in their declared dtypes."""
        outputs = [x.array for x in self.run(closed, inputs, self.policy)]
        return declared(closed.jaxpr.outvars, outputs)


def values_like(operands: Sequence[Value], arrays: Sequence[Any]) -> list[Value]:
    """Other arrays from where the operands come from."""
    pairs = zip(arrays, operands, strict=True)
    return [Value(array, operand.origin) for array, operand in pairs]


def computed(arrays: Sequence[Any]) -> list[Value]:
    """Arrays as values that are computed."""
    return [Value(array, Origin.COMPUTED) for array in arrays]


def _jit(call: Call) -> list[Value]:
    program, origins = call.trace(call.params["jaxpr"])
    params = {**call.params, "jaxpr": program}
    return list(map(Value, evaluate(call.equation, call.arrays, params), origins))


def _remat(call: Call) -> list[Value]:
    program, origins = call.trace(core.ClosedJaxpr(call.params["jaxpr"], ()))
    body = program.jaxpr
    body = body.replace(constvars=[], invars=[*body.constvars, *body.invars])
    arrays, params = [*program.consts, *call.arrays], {**call.params, "jaxpr": body}
    return list(map(Value, evaluate(call.equation, arrays, params), origins))


def _closed_call(call: Call) -> list[Value]:
    closed = call.params["call_jaxpr"]
    return call.run(closed, call.operands, call.policy, call.rounded)


def _scan(call: Call) -> list[Value]:
    params, closed = call.params, call.params["jaxpr"]
    first, size = scan_sizes(params)
    constants, carried = call.operands[:first], call.operands[first : first + size]
    rounded = [*[False] * size, *call.rounded[size:]]
    inside = read_by_products(closed.jaxpr, call.policy, rounded)
    # Inputs are cast before the loop. What all steps read is not: cast at each step,
    # its gradient is summed over the steps in float32.
    constants = [_held(x) for x in constants]
    halves = [v.aval.dtype in HALVES for v in closed.jaxpr.invars[:first]]
    places = slice(first + size, None)
    given = [
        Value(cast(x.array, call.policy.dtype), x.origin)
        if v in inside and is_cast(v)
        else x
        for x, v in zip(call.operands[places], closed.jaxpr.invars[places], strict=True)
    ]
    variables = closed.jaxpr.outvars[:size]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        read = [
            Value(cast(x.array, v.aval.dtype), x.origin) if is_half else x
            for x, v, is_half in zip(
                constants, closed.jaxpr.invars[:first], halves, strict=True
            )
        ]
        inputs = [*read, *computed(carry), *values_like(given, xs)]
        outputs = [x.array for x in call.run(closed, inputs, call.policy, rounded)]
        return declared(variables, outputs[:size]), outputs[size:]

    with context_of(call.equation):
        carry, ys = lax.scan(
            body,
            declared(variables, [x.array for x in carried]),
            [x.array for x in given],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    return computed([*carry, *ys])


def _held(value: Value) -> Value:
    """What a loop reads at each step: in float32 if it is in half precision."""
    if getattr(value.array, "dtype", None) not in HALVES:
        return value
    return Value(cast(value.array, jnp.float32), Origin.HELD)


def _while(call: Call) -> list[Value]:
    params, operands = call.params, call.operands
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def apply(closed: Any, constants: list[Value], carry: list[Any]) -> list[Any]:
        return call.run_declared(closed, [*constants, *computed(carry)])

    with context_of(call.equation):
        carry = lax.while_loop(
            lambda carry: apply(test, operands[:first], carry)[0],
            lambda carry: apply(body, operands[first:last], carry),
            declared(body.jaxpr.outvars, call.arrays[last:]),
        )
    return computed(carry)


def _cond(call: Call) -> list[Value]:
    def branch(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
        def apply(*arrays: Any) -> list[Any]:
            return call.run_declared(closed, values_like(call.operands[1:], arrays))

        return apply

    index, *arrays = call.arrays
    with context_of(call.equation):
        branches = list(map(branch, call.params["branches"]))
        return computed(lax.switch(index, branches, *arrays))


def _shard_map(call: Call) -> list[Value]:
    params, closed = call.params, core.ClosedJaxpr(call.params["jaxpr"], ())
    # In JAX 0.7 `manual_axes`, later `newly_manual_axes`.
    (manual,) = (params[name] for name in params if name.endswith("manual_axes"))

    def body(*arrays: Any) -> list[Any]:
        inputs = values_like(call.operands, arrays)
        return [x.array for x in call.run(closed, inputs, call.policy)]

    with context_of(call.equation):
        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(manual),
            check_vma=params["check_vma"],
        )
        return computed(mapped(*call.arrays))


NESTED = {
    "checkpoint": _remat,
    "closed_call": _closed_call,
    "cond": _cond,
    "core_call": _closed_call,
    "eval_jaxpr": _closed_call,  # What JAX 0.12 has for it.
    "jit": _jit,
    "pjit": _jit,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
