"""Evaluate the programs inside an operation with casts, and rebuild it around them.

Loop carries and branch results keep their declared dtypes.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import jet
from jax.extend import core

from optax_lossscale._autocast.identity import Number, renumber, restore
from optax_lossscale._autocast.notes import is_collecting
from optax_lossscale._autocast.policy import Policy
from optax_lossscale._autocast.values import (
    OF_PARAMETERS,
    Origin,
    Source,
    Value,
    as_computed,
    as_declared,
    as_results,
    cast,
    has_tangent,
    identities,
    is_float32,
    recomputed,
    values_like,
)
from optax_lossscale._jaxprs import context_of, evaluate, keep_lines, scan_sizes

_Traced = tuple[core.ClosedJaxpr, list[Value]]


class _Kept(NamedTuple):
    """A program with casts, values like its results, and the numbers of its inputs."""

    program: core.ClosedJaxpr
    results: list[Value]
    numbers: tuple[Number, ...]


_KEPT: weakref.WeakKeyDictionary[Any, dict[Hashable, _Kept]] = (
    weakref.WeakKeyDictionary()
)
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
      wide: For each result, whether it is part of a parameter's gradient.
    """

    run: Callable[..., list[Value]]
    read_by_products: Callable[..., set[core.Var]]
    equation: Any
    operands: list[Value]
    policy: Policy
    rounded: list[bool]
    wide: list[bool]

    @property
    def params(self) -> dict[str, Any]:
        """The operation's parameters."""
        params: dict[str, Any] = self.equation.params
        return params

    @property
    def arrays(self) -> list[Any]:
        """The operands' arrays."""
        return [operand.array for operand in self.operands]

    def trace(self, closed: core.ClosedJaxpr) -> _Traced:
        """Traces the evaluation of a program; also returns values like its results."""
        results: list[Value] = []

        def apply(inputs: list[Value]) -> list[Any]:
            outputs = self.run(
                closed, inputs, self.policy, self.rounded, wide=self.wide
            )
            results.extend(_without_arrays(outputs))
            return [output.array for output in outputs]

        return _traced(apply, self.operands), results

    def trace_once(self, closed: core.ClosedJaxpr, owner: Any) -> _Traced:
        """The same, kept as long as `owner`, the object that JAX itself keeps.

        JAX gives the same program again when a jitted function is called again, or in
        every layer of a model.
        """
        if is_collecting() or closed.consts:
            return self.trace(closed)
        numbers = renumber(identities(self.operands))
        kinds = tuple(
            (jax.typeof(x.array), x.origin, x.source, x.is_tangent)
            for x in self.operands
        )
        key = (self.policy, *self.rounded, *self.wide, kinds, numbers.pattern)
        kept = _KEPT.setdefault(owner, {})
        if key not in kept:
            pairs = zip(self.operands, numbers.identities, strict=True)
            operands = [x._replace(identity=identity) for x, identity in pairs]
            program, results = self._replace(operands=operands).trace(closed)
            kept[key] = _Kept(program, results, numbers.new)
        program, results, new = kept[key]
        return program, [
            x._replace(identity=restore(identity, new, numbers.old))
            for x, identity in zip(results, identities(results), strict=True)
        ]

    def trace_declared(
        self,
        closed: core.ClosedJaxpr,
        operands: Sequence[Value],
        wide: Sequence[bool] = (),
    ) -> core.ClosedJaxpr:
        """Traces the evaluation of a program whose results keep their dtypes."""

        def apply(inputs: list[Value]) -> list[Any]:
            values = self.run(closed, inputs, self.policy, wide=wide)
            outputs = [value.array for value in values]
            return as_declared(closed.jaxpr.outvars, outputs)

        return _traced(apply, operands)

    def bind(self, arrays: Sequence[Any], **programs: Any) -> Sequence[Any]:
        """Applies the same operation, around other programs, to some arrays."""
        return evaluate(self.equation, arrays, {**self.params, **programs})


def _traced(
    apply: Callable[[list[Value]], list[Any]], operands: Sequence[Value]
) -> core.ClosedJaxpr:
    """The program of a function of values, traced with operands like these."""
    trace = jax.make_jaxpr(lambda *arrays: apply(values_like(operands, arrays)))
    with keep_lines(is_kept=False):
        return trace(*(operand.array for operand in operands))


def _without_arrays(values: Sequence[Value]) -> list[Value]:
    """What is known of the values; their arrays must not leave a trace."""
    return [value._replace(array=None) for value in values]


def jit(call: Call) -> list[Value]:
    """A jitted function inside the program."""
    closed = call.params["jaxpr"]
    program, results = call.trace_once(closed, owner=closed)
    return values_like(results, call.bind(call.arrays, jaxpr=program))


def remat(call: Call) -> list[Value]:
    """A function under `jax.checkpoint`."""
    body = call.params["jaxpr"]
    program, results = call.trace_once(core.ClosedJaxpr(body, ()), owner=body)
    body = program.jaxpr
    body = body.replace(constvars=[], invars=[*body.constvars, *body.invars])
    outputs = call.bind([*program.consts, *call.arrays], jaxpr=body)
    return values_like(results, outputs)


def _jet_of_remat(
    primals: Sequence[Any], series: Sequence[Any], *, jaxpr: core.Jaxpr, **params: Any
) -> tuple[list[Any], list[Any]]:
    """The Taylor series of a function under `jax.checkpoint`, itself under one."""
    function = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))

    def apply(primals: Sequence[Any], series: Sequence[Any]) -> Any:
        # The rules of `jet` give and take coefficients without factorials.
        return jet.jet(function, primals, series, factorial_scaled=False)

    del params["differentiated"]
    outputs, out_series = jax.checkpoint(apply, **params)(primals, series)
    return outputs, out_series


if hasattr(core.primitives, "remat_p"):  # JAX 0.7 does not export it.
    # JAX has no such rule, and autocast recomputes float32 results in checkpoints.
    rules: dict[core.Primitive, Any] = jet.jet_rules
    rules.setdefault(core.primitives.remat_p, _jet_of_remat)


def inline(call: Call) -> list[Value]:
    """A `closed_call` or `eval_jaxpr`, whose program is evaluated in place."""
    closed = call.params["call_jaxpr"]
    return call.run(closed, call.operands, call.policy, call.rounded, wide=call.wide)


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
        recomputed(operand, cast(operand.array, call.policy.dtype), operand.origin)
        if variable in by_products
        and is_float32(variable)
        and operand.source not in OF_PARAMETERS
        else operand
        for operand, variable in zip(
            call.operands[first + size :], variables[first + size :], strict=True
        )
    ]

    # Any part of the carry may depend on a tangent after some steps.
    is_tangent = has_tangent(call.operands)
    results: list[Value] = []

    def body(carry: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        constants_now = map(_declared_half, constants, variables[:first])
        carried = as_computed(carry, is_tangent=is_tangent)
        inputs = [*constants_now, *carried, *values_like(xs, arrays)]
        values = call.run(closed, inputs, call.policy, rounded, wide=call.wide)
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
    carried = as_computed(carry, is_tangent=is_tangent)
    return [*carried, *as_results(results[size:], ys)]


def _loop_constant(value: Value) -> Value:
    """Widens a half-precision value that a loop reads at each step.

    It is cast back at each step, so that its gradient is summed in float32.
    """
    if getattr(value.array, "dtype", None) not in HALVES:
        return value
    wide = cast(value.array, jnp.float32)
    constant = recomputed(value, wide, Origin.LOOP_CONSTANT)
    return constant._replace(source=Source.ARGUMENTS)


def _declared_half(value: Value, variable: Any) -> Value:
    """Casts a loop constant that is declared in half precision back to its dtype."""
    dtype = variable.aval.dtype
    if dtype not in HALVES:
        return value
    return recomputed(value, cast(value.array, dtype), value.origin)


def while_loop(call: Call) -> list[Value]:
    """A `lax.while_loop`.

    Not by `lax.while_loop` itself, which refuses a condition for each of a batch.
    """
    params, body = call.params, call.params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    carry = as_declared(body.jaxpr.outvars, call.arrays[last:])
    is_tangent = has_tangent(call.operands)
    constants = call.operands[:last]
    carried = as_computed(carry, is_tangent=is_tangent)
    outputs = call.bind(
        [*call.arrays[:last], *carry],
        cond_jaxpr=call.trace_declared(
            params["cond_jaxpr"], [*constants[:first], *carried]
        ),
        body_jaxpr=call.trace_declared(body, [*constants[first:], *carried], call.wide),
    )
    return as_computed(outputs, is_tangent=is_tangent)


def cond(call: Call) -> list[Value]:
    """A `lax.cond`, `lax.switch` or `lax.platform_dependent`.

    Not by `lax.switch`, which would forget the platforms of the branches.
    """
    operands = call.operands[1:]
    branches = [
        call.trace_declared(x, operands, call.wide) for x in call.params["branches"]
    ]
    outputs = call.bind(call.arrays, branches=tuple(branches))
    return as_computed(outputs, is_tangent=has_tangent(operands))


def shard_map(call: Call) -> list[Value]:
    """A `jax.shard_map`."""
    params, closed = call.params, core.ClosedJaxpr(call.params["jaxpr"], ())
    # JAX 0.7 says `manual_axes`, later versions `newly_manual_axes`.
    (manual,) = (params[name] for name in params if name.endswith("manual_axes"))

    results: list[Value] = []

    def body(*arrays: Any) -> list[Any]:
        inputs = values_like(call.operands, arrays)
        values = call.run(closed, inputs, call.policy, wide=call.wide)
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
