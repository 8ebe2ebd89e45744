"""Evaluate the operations that hold programs: calls, loops, branches, devices.

To add one, write a function of a `Frame`, and a row in `NESTINGS`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import Primitive, primitives
from jax.sharding import PartitionSpec as P

from optax_lossscale._finite import vary_over
from optax_lossscale._jaxprs import context_of, scan_sizes
from optax_lossscale._operations.dependence import (
    INLINED,
    body_of,
    forward_in_loop,
)
from optax_lossscale._operations.statistics import (
    Statistics,
    largest_of_runs,
    never_run,
)
from optax_lossscale._operations.values import (
    Frame,
    Pair,
    Record,
    Tape,
    Value,
    of_pairs,
    pairs_of,
    separate_pairs_of,
)
from optax_lossscale._tree import is_floating


def call(frame: Frame) -> list[Value]:
    """A jitted function, one under `jax.checkpoint`, or one with its own rule."""
    is_recomputed = frame.equation.primitive.name == "remat2"
    is_recomputed &= not any(frame.is_forward)
    context = frame.context
    context = context._replace(is_recomputed=context.is_recomputed or is_recomputed)
    return frame.run(
        body_of(frame.equation),
        frame.operands,
        frame.tape,
        context,
        frame.is_forward,
        frame.is_live,
    )


class _Traced:
    """Programs that are evaluated inside a loop, a branch or a device of JAX.

    What they record there is added to the tape when the operation has run.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.records: list[Record] = []
        self.clock = jnp.asarray(frame.tape.clock, jnp.int32)
        self.are_scaled = [x.is_scaled for x in frame.operands]
        self.context = frame.context
        if self.context.loop is None:
            self.context = self.context._replace(loop=len(frame.tape.starts))
            frame.tape.starts.append(frame.tape.clock)

    def inputs(self, pairs: Sequence[Pair], first: int = 0) -> list[Value]:
        """The values of those operands, from the `first` on, that are passed in."""
        return self._values(pairs, self.are_scaled[first : first + len(pairs)])

    def carried(self, pairs: Sequence[Pair]) -> list[Value]:
        """The values of results, each of which may depend on every operand."""
        return self._values(pairs, [any(self.are_scaled)] * len(pairs))

    def _values(self, pairs: Sequence[Pair], flags: Sequence[bool]) -> list[Value]:
        if self.frame.tape.has_references:
            return of_pairs(pairs, flags)
        return [Value(array, array) for array, _ in pairs]

    def pairs(self, values: Sequence[Value]) -> list[Pair]:
        """The arrays to carry, each floating one with a reference if there are any."""
        is_plain = not self.frame.tape.has_references
        return pairs_of(values) if is_plain else separate_pairs_of(values)

    def run(
        self,
        closed: core.ClosedJaxpr,
        inputs: Sequence[Value],
        clock: Any,
        is_forward: Sequence[bool],
    ) -> tuple[list[Value], Tape]:
        """Evaluates a program inside, on a tape of its own."""
        tape = Tape(clock, has_references=self.frame.tape.has_references)
        results = self.frame.run(closed, inputs, tape, self.context, is_forward)
        self.records = tape.records
        return results, tape

    def finish(
        self, pairs: Sequence[Pair], statistics: Sequence[Statistics], clock: Any
    ) -> list[Value]:
        """Records the operations inside, and returns the results."""
        self.frame.tape.records.extend(self.records)
        self.frame.tape.statistics.extend(statistics)
        self.frame.tape.clock = clock
        return self.carried(pairs)


def scan(frame: Frame) -> list[Value]:
    """A `lax.scan`, or a `fori_loop` with a fixed number of steps."""
    params, closed = frame.equation.params, frame.equation.params["jaxpr"]
    first, size = scan_sizes(params)
    last = first + size
    constants, start = frame.operands[:first], frame.operands[first:last]
    xs = frame.operands[last:]
    is_forward = forward_in_loop(closed.jaxpr, frame.is_forward, first, size)
    traced = _Traced(frame)

    def body(carry: tuple[list[Pair], Any], xs: list[Pair]) -> tuple[Any, Any]:
        pairs, clock = carry
        inputs = [*constants, *traced.carried(pairs), *traced.inputs(xs, last)]
        results, tape = traced.run(closed, inputs, clock, is_forward)
        carry = traced.pairs(results[:size]), tape.clock + 1
        return carry, (traced.pairs(results[size:]), tape.statistics)

    with context_of(frame.equation):
        (carry, clock), (ys, statistics) = lax.scan(
            body,
            (traced.pairs(start), traced.clock),
            pairs_of(xs),
            length=params["length"],
            reverse=params["reverse"],
        )
    statistics = list(map(largest_of_runs, statistics))
    return traced.finish([*carry, *ys], statistics, clock)


def while_loop(frame: Frame) -> list[Value]:
    """A `lax.while_loop`, whose condition is not recorded."""
    params, closed = frame.equation.params, frame.equation.params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    constants, start = frame.operands[:last], frame.operands[last:]
    is_forward = forward_in_loop(
        closed.jaxpr, frame.is_forward, last - first, len(start)
    )
    traced = _Traced(frame)

    def step(pairs: list[Pair], clock: Any) -> tuple[list[Pair], Any, Any]:
        inputs = [*constants[first:], *traced.carried(pairs)]
        results, tape = traced.run(closed, inputs, clock, is_forward)
        return traced.pairs(results), tape.clock + 1, tape.statistics

    def body(carry: Any) -> Any:
        pairs, clock, before = carry
        pairs, clock, statistics = step(pairs, clock)
        return pairs, clock, jax.tree.map(jnp.maximum, before, statistics)

    def condition(carry: Any) -> Any:
        arrays = [x.array for x in constants[:first]] + [x for x, _ in carry[0]]
        return core.jaxpr_as_fun(params["cond_jaxpr"])(*arrays)[0]

    pairs = traced.pairs(start)
    with context_of(frame.equation):
        unused = _unused(jax.eval_shape(step, pairs, traced.clock)[2])
        pairs, clock, statistics = lax.while_loop(
            condition, body, (pairs, traced.clock, unused)
        )
    return traced.finish(pairs, statistics, clock)


def cond(frame: Frame) -> list[Value]:
    """A `lax.cond` or `lax.switch`. In a loop each branch is recorded."""
    index, branches = frame.operands[0].array, frame.equation.params["branches"]
    if not isinstance(index, jax.core.Tracer):
        taken = branches[int(np.clip(index, 0, len(branches) - 1))]
        return frame.run(
            taken, frame.operands[1:], frame.tape, frame.context, frame.is_forward
        )
    traced = _Traced(frame)
    pairs = traced.pairs(frame.operands[1:])
    records: list[Record] = []

    def branch(closed: core.ClosedJaxpr) -> Callable[..., Any]:
        def run_branch(pairs: list[Pair]) -> tuple[list[Pair], Any, Any]:
            inputs = traced.inputs(pairs, 1)
            results, tape = traced.run(closed, inputs, traced.clock, frame.is_forward)
            return traced.pairs(results), tape.clock, tape.statistics

        return run_branch

    functions, unused = list(map(branch, branches)), []
    for function in functions:
        unused.append(_unused(jax.eval_shape(function, pairs)[2]))
        records += traced.records

    def with_all(place: int) -> Callable[..., Any]:
        def run_branch(pairs: list[Pair]) -> tuple[list[Pair], Any, Any]:
            results, clock, statistics = functions[place](pairs)
            return results, clock, [*unused[:place], statistics, *unused[place + 1 :]]

        return run_branch

    places = range(len(branches))
    with context_of(frame.equation):
        results, clock, statistics = lax.switch(index, [*map(with_all, places)], pairs)
    traced.records = records
    return traced.finish(results, [x for some in statistics for x in some], clock)


def shard_map(frame: Frame) -> list[Value]:
    """A `jax.shard_map`. Of the numbers of all devices the largest ones count."""
    params = frame.equation.params
    closed = core.ClosedJaxpr(params["jaxpr"], ())
    # JAX 0.7 says `manual_axes`, later versions `newly_manual_axes`.
    (manual,) = (params[name] for name in params if name.endswith("manual_axes"))
    traced = _Traced(frame)

    def over_devices(number: jax.Array) -> jax.Array:
        largest: jax.Array = lax.pmax(vary_over(number, tuple(manual)), tuple(manual))
        return largest

    def body(pairs: list[Pair]) -> tuple[list[Pair], Any, Any]:
        inputs = traced.inputs(pairs)
        results, tape = traced.run(closed, inputs, traced.clock, frame.is_forward)
        clock, statistics = jax.tree.map(over_devices, (tape.clock, tape.statistics))
        return traced.pairs(results), clock, statistics

    specs = [
        (spec, None if x.reference is x.array else spec)
        for spec, x in zip(params["in_specs"], frame.operands, strict=True)
    ]
    has_references = frame.tape.has_references
    out_specs = [
        (spec, spec if is_floating(x.aval) and has_references else None)
        for spec, x in zip(params["out_specs"], frame.equation.outvars, strict=True)
    ]
    with context_of(frame.equation):
        results, clock, statistics = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=(specs,),
            out_specs=(out_specs, P(), P()),
            axis_names=set(manual),
            check_vma=params["check_vma"],
        )(pairs_of(frame.operands))
    return traced.finish(results, statistics, clock)


NESTINGS: dict[Primitive | str, Callable[[Frame], list[Value]]] = {
    **dict.fromkeys(INLINED, call),
    primitives.scan_p: scan,
    primitives.while_p: while_loop,
    primitives.cond_p: cond,
    "shard_map": shard_map,
}


def _unused(statistics: Sequence[Statistics]) -> list[Statistics]:
    """The statistics of operations that have not run."""
    return list(map(never_run, statistics))
