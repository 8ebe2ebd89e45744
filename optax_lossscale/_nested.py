"""Programs within programs: each is built anew around its evaluated body.

Whatever is carried around a loop, or comes out of a branch, keeps its declared dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.extend import core

from optax_lossscale._choice import read_by_products, scan_sizes
from optax_lossscale._masking import context_of, evaluate
from optax_lossscale._operations import Policy
from optax_lossscale._values import Origin, Value, cast, declared, is_cast

Run: TypeAlias = Callable[..., list[Value]]


def trace_body(
    run: Run,
    closed: core.ClosedJaxpr,
    operands: Sequence[Value],
    policy: Policy,
    rounded: Sequence[bool] = (),
) -> tuple[core.ClosedJaxpr, list[Origin]]:
    """The evaluated program, and where its outputs come from."""
    origins: list[Origin] = []

    def body(*arrays: Any) -> list[Any]:
        inputs = [Value(x, o.origin) for x, o in zip(arrays, operands, strict=True)]
        outputs = run(closed, inputs, policy, rounded)
        origins.extend(output.origin for output in outputs)
        return [output.array for output in outputs]

    return jax.make_jaxpr(body)(*(operand.array for operand in operands)), origins


def _jit(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    program, origins = trace_body(
        run, equation.params["jaxpr"], operands, policy, rounded
    )
    arrays = [operand.array for operand in operands]
    outputs = evaluate(equation, arrays, {**equation.params, "jaxpr": program})
    return [Value(x, origin) for x, origin in zip(outputs, origins, strict=True)]


def _remat(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    closed = core.ClosedJaxpr(equation.params["jaxpr"], ())
    program, origins = trace_body(run, closed, operands, policy, rounded)
    body = program.jaxpr
    body = body.replace(constvars=[], invars=[*body.constvars, *body.invars])
    arrays = [*program.consts, *(operand.array for operand in operands)]
    outputs = evaluate(equation, arrays, {**equation.params, "jaxpr": body})
    return [Value(x, origin) for x, origin in zip(outputs, origins, strict=True)]


def _scan(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    params, closed = equation.params, equation.params["jaxpr"]
    first, size = scan_sizes(params)
    last = first + size
    rounded = [*[False] * size, *rounded[size:]]
    inside = read_by_products(closed.jaxpr, policy, rounded)
    # Inputs are cast before the loop. Weights are not: cast at each step, their
    # gradients are summed over the steps in float32.
    operands = [
        Value(cast(x.array, policy.dtype), x.origin)
        if v in inside and is_cast(v) and i >= last
        else x
        for i, (x, v) in enumerate(zip(operands, closed.jaxpr.invars, strict=True))
    ]
    arrays = [operand.array for operand in operands]
    carry_vars = closed.jaxpr.outvars[:size]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        inputs = [
            *operands[:first],
            *(Value(x, Origin.COMPUTED) for x in carry),
            *(Value(x, o.origin) for x, o in zip(xs, operands[last:], strict=True)),
        ]
        outputs = [x.array for x in run(closed, inputs, policy, rounded)]
        return declared(carry_vars, outputs[:size]), outputs[size:]

    with context_of(equation):
        carry, ys = lax.scan(
            body,
            declared(carry_vars, arrays[first:last]),
            arrays[last:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    return [Value(x, Origin.COMPUTED) for x in (*carry, *ys)]


def _while(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    params = equation.params
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, last = (
        params["cond_nconsts"],
        params["cond_nconsts"] + params["body_nconsts"],
    )

    def apply(closed: Any, constants: list[Value], carry: list[Any]) -> list[Any]:
        inputs = [*constants, *(Value(x, Origin.COMPUTED) for x in carry)]
        outputs = [x.array for x in run(closed, inputs, policy)]
        return declared(closed.jaxpr.outvars, outputs)

    with context_of(equation):
        carry = lax.while_loop(
            lambda carry: apply(test, operands[:first], carry)[0],
            lambda carry: apply(body, operands[first:last], carry),
            declared(body.jaxpr.outvars, [x.array for x in operands[last:]]),
        )
    return [Value(x, Origin.COMPUTED) for x in carry]


def _cond(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    def branch(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
        def apply(*arrays: Any) -> list[Any]:
            inputs = [
                Value(x, o.origin) for x, o in zip(arrays, operands[1:], strict=True)
            ]
            outputs = [x.array for x in run(closed, inputs, policy)]
            return declared(closed.jaxpr.outvars, outputs)

        return apply

    index, *arrays = (operand.array for operand in operands)
    with context_of(equation):
        branches = [branch(closed) for closed in equation.params["branches"]]
        outputs = lax.switch(index, branches, *arrays)
    return [Value(x, Origin.COMPUTED) for x in outputs]


def _closed_call(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    return run(equation.params["call_jaxpr"], operands, policy, rounded)


def _shard_map(
    run: Run,
    equation: Any,
    operands: list[Value],
    policy: Policy,
    rounded: list[bool],
) -> list[Value]:
    params = equation.params
    closed = core.ClosedJaxpr(params["jaxpr"], ())
    # In JAX 0.7 `manual_axes`, later `newly_manual_axes`.
    (manual,) = (params[name] for name in params if name.endswith("manual_axes"))

    def body(*arrays: Any) -> list[Any]:
        inputs = [Value(x, o.origin) for x, o in zip(arrays, operands, strict=True)]
        return [x.array for x in run(closed, inputs, policy)]

    with context_of(equation):
        outputs = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(manual),
            check_vma=params["check_vma"],
        )(*(operand.array for operand in operands))
    return [Value(x, Origin.COMPUTED) for x in outputs]


NESTED = {
    "checkpoint": _remat,
    "closed_call": _closed_call,
    "cond": _cond,
    "core_call": _closed_call,
    "jit": _jit,
    "pjit": _jit,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
