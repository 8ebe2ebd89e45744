"""Follow what is known of values through a program, and back through its trace.

A `Rule` says what is known of the results of one operation. Everything else is here:
calls, loops and branches, at every depth.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jax.extend import core
from jax.extend.core.primitives import cond_p, scan_p, while_p

from optax_lossscale._programs.jax_internals import equation_of, origin_of, scan_counts
from optax_lossscale._programs.jaxprs import (
    Atom,
    Program,
    consts_of,
    jaxpr_of,
    programs_of,
)

Fact = TypeVar("Fact", bound=Hashable)


class Rule(Protocol[Fact]):
    """What is known of the results of one operation."""

    @property
    def nothing(self) -> Fact | None:
        """What is known of a value that was computed from nothing of interest.

        All that is computed from such values alone is like them. It is None if an
        operation may be of interest itself.
        """
        ...

    def of_constant(self, value: Any) -> Fact:
        """What is known of a number or an array that a program holds."""
        ...

    def of_operation(
        self, equation: core.JaxprEqn, inputs: Sequence[Fact]
    ) -> Sequence[Fact]:
        """What is known of the results of an equation, from that of its inputs."""
        ...

    def join(self, one: Fact, other: Fact) -> Fact:
        """What is known of a value that is one or the other."""
        ...


class Inside(NamedTuple, Generic[Fact]):
    """What is known of the values in an equation that may hold programs.

    Attributes:
      programs: Its programs, each with what is known of the inputs; none if they are
        not those of the equation.
      outputs: What is known of the results of the equation.
    """

    programs: Sequence[tuple[core.Jaxpr, Sequence[Fact]]]
    outputs: Sequence[Fact]


def follow(program: Program, inputs: Sequence[Fact], rule: Rule[Fact]) -> list[Fact]:
    """What is known of the results of a program, from that of its inputs."""
    jaxpr = jaxpr_of(program)
    consts = map(rule.of_constant, consts_of(program))
    known: dict[core.Var, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update(zip(jaxpr.constvars, consts, strict=False))

    def read(atom: Atom) -> Fact:
        if isinstance(atom, core.Literal):
            return rule.of_constant(atom.val)
        return known[atom] if atom in known else rule.of_constant(None)

    for equation in jaxpr.eqns:
        outputs = look_into(equation, list(map(read, equation.invars)), rule).outputs
        known.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def follow_back(
    arrays: Sequence[Any],
    known: Mapping[int, Fact],
    of_input: Callable[[Any], Fact],
    rule: Rule[Fact],
) -> list[Fact]:
    """What is known of traced arrays, from that of the arrays they were computed from.

    Args:
      arrays: Arrays of the trace, before its program is complete.
      known: What is known of some arrays, by the identity of their origins.
      of_input: What is known of an input of the trace.
      rule: How to follow it.
    """
    outputs: dict[int, Sequence[Fact]] = {}  # By the identity of an equation.

    def read(array: Any) -> Fact:
        origin = origin_of(array)
        if id(origin) in known:
            return known[id(origin)]
        equation, place = equation_of(origin)
        return of_input(origin) if equation is None else outputs[id(equation)][place]

    def equations_before(arrays: Sequence[Any]) -> list[Any]:
        origins = [x for x in map(origin_of, arrays) if id(x) not in known]
        equations = [equation_of(origin)[0] for origin in origins]
        return [x for x in equations if x is not None and id(x) not in outputs]

    rest = equations_before(arrays)
    while rest:
        equation = rest[-1]
        if before := equations_before(equation.in_tracers):
            rest.extend(before)
            continue
        rest.pop()
        if id(equation) not in outputs:
            inputs = list(map(read, equation.in_tracers))
            outputs[id(equation)] = look_into(equation, inputs, rule).outputs
    return list(map(read, arrays))


def equations_before(arrays: Sequence[Any]) -> list[Any]:
    """All equations that traced arrays were computed by."""
    found = dict[int, Any]()
    rest = list(arrays)
    while rest:
        equation, _ = equation_of(origin_of(rest.pop()))
        if equation is not None and id(equation) not in found:
            found[id(equation)] = equation
            rest.extend(equation.in_tracers)
    return list(found.values())


def look_into(equation: Any, inputs: Sequence[Fact], rule: Rule[Fact]) -> Inside[Fact]:
    """What is known of the values in an equation, from what is known of its inputs."""
    params, count = equation.params, len(equation.outvars)
    if rule.nothing is not None and all(fact is rule.nothing for fact in inputs):
        return Inside([], [rule.nothing] * count)
    if equation.primitive is scan_p:
        return _loop(params["jaxpr"], inputs, *scan_counts(params), rule)
    if equation.primitive is while_p:
        tested, fixed = params["cond_nconsts"], params["body_nconsts"]
        body = _loop(params["body_jaxpr"], inputs[tested:], fixed, count, rule)
        condition = jaxpr_of(params["cond_jaxpr"]), [*inputs[:tested], *body.outputs]
        return Inside([condition, *body.programs], body.outputs)
    if equation.primitive is cond_p:
        branches = params["branches"]
        outputs = [follow(branch, inputs[1:], rule) for branch in branches]
        return Inside(
            [(jaxpr_of(branch), inputs[1:]) for branch in branches],
            [functools.reduce(rule.join, each) for each in zip(*outputs, strict=True)],
        )
    programs = list(programs_of(equation))
    sizes = [(len(each.invars), len(each.outvars)) for each in programs]
    if sizes == [(len(inputs), count)]:
        return Inside([(programs[0], inputs)], follow(programs[0], inputs, rule))
    return Inside([], rule.of_operation(equation, inputs))


def _loop(
    body: Program, inputs: Sequence[Fact], fixed: int, carried: int, rule: Rule[Fact]
) -> Inside[Fact]:
    """What is known in and after any number of iterations."""
    consts, rest = inputs[:fixed], inputs[fixed + carried :]
    carry = [*inputs[fixed : fixed + carried]]
    while True:
        inside = [*consts, *carry, *rest]
        outputs = follow(body, inside, rule)
        joined = list(map(rule.join, carry, outputs[:carried]))
        if joined == carry:
            return Inside([(jaxpr_of(body), inside)], [*carry, *outputs[carried:]])
        carry = joined
