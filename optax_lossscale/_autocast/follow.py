"""Follow what is known of values through a program.

A `Rule` says what is known of the results of one operation. Everything else is here:
calls, loops and branches, at every depth.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from jax.extend import core
from jax.extend.core.primitives import cond_p, scan_p, while_p

from optax_lossscale._autocast.jax_internals import scan_counts
from optax_lossscale._autocast.programs import (
    Atom,
    Program,
    jaxpr_of,
    programs_of,
)

Fact = TypeVar("Fact", bound=Hashable)


class Rule(Protocol[Fact]):
    """What is known of the results of one operation."""

    # What is known of a number or an array that a program holds.
    constant: Fact

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
      programs: Its programs, each with what is known of the inputs; none if these do
        not match the inputs of the equation one to one.
      outputs: What is known of the results of the equation.
    """

    programs: Sequence[tuple[core.Jaxpr, Sequence[Fact]]]
    outputs: Sequence[Fact]


def follow(program: Program, inputs: Sequence[Fact], rule: Rule[Fact]) -> list[Fact]:
    """What is known of the results of a program, from that of its inputs."""
    jaxpr = jaxpr_of(program)
    known: dict[core.Var, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        facts = facts_of(equation.invars, known, rule)
        outputs = look_into(equation, facts, rule).outputs
        known.update(zip(equation.outvars, outputs, strict=True))
    return facts_of(jaxpr.outvars, known, rule)


def facts_of(
    atoms: Sequence[Atom], known: Mapping[core.Var, Fact], rule: Rule[Fact]
) -> list[Fact]:
    """What is known of variables, literals and constants."""
    return [
        rule.constant
        if isinstance(atom, core.Literal)
        else known.get(atom, rule.constant)
        for atom in atoms
    ]


def look_into(equation: Any, inputs: Sequence[Fact], rule: Rule[Fact]) -> Inside[Fact]:
    """What is known of the values in an equation, from what is known of its inputs."""
    params, count = equation.params, len(equation.outvars)
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
