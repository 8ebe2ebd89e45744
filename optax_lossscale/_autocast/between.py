"""Tell each low product what is known of its factors.

    the gradient of a value that depends on the result of a low product is rounded as
    that result was; every other gradient, as those of parameters, is a float32 sum

Such a value is called an activation. The next product of the backward pass would round
its gradient anyway, and until then it has half the bytes. The low copy of a factor that
is the same in each iteration of a loop is made once.
"""

from collections.abc import Sequence

from jax.extend import core
from jax.extend.core.primitives import scan_p, stop_gradient_p

from optax_lossscale._autocast.follow import facts_of, look_into
from optax_lossscale._autocast.jax_internals import scan_counts
from optax_lossscale._autocast.products import Factor, low_product_p
from optax_lossscale._autocast.programs import (
    Program,
    changed_once,
    is_floating_variable,
    jaxpr_of,
    with_equations,
    with_programs,
)


class FactorRule:
    """Follows what becomes a factor through operations; a `Rule`."""

    constant = Factor()

    def of_operation(
        self, equation: core.JaxprEqn, inputs: Sequence[Factor]
    ) -> Sequence[Factor]:
        is_activation = equation.primitive is low_product_p or (
            equation.primitive is not stop_gradient_p
            and any(x.is_activation for x in inputs)
        )
        pairs = zip(equation.invars, inputs, strict=True)
        of_variables = [x for atom, x in pairs if isinstance(atom, core.Var)]
        is_fixed = bool(of_variables) and all(x.is_fixed for x in of_variables)
        return [
            Factor(is_activation and is_floating_variable(x), is_fixed)
            for x in equation.outvars
        ]

    def join(self, one: Factor, other: Factor) -> Factor:
        return Factor(
            one.is_activation or other.is_activation, one.is_fixed and other.is_fixed
        )


_RULE = FactorRule()


def with_known_factors(
    program: Program, factors: Sequence[Factor] | None = None
) -> Program:
    """The program whose low products know their factors.

    Args:
      program: A program with low products.
      factors: What is known of its inputs; None if nothing is.
    """
    count = len(jaxpr_of(program).invars)
    facts = (Factor(),) * count if factors is None else tuple(factors)

    def change() -> Program:
        jaxpr, equations = jaxpr_of(program), list[core.JaxprEqn]()
        known: dict[core.Var, Factor] = dict(zip(jaxpr.invars, facts, strict=True))
        for equation in jaxpr.eqns:
            inputs = facts_of(equation.invars, known, _RULE)
            inside = look_into(equation, inputs, _RULE)
            known.update(zip(equation.outvars, inside.outputs, strict=True))
            if equation.primitive is low_product_p:
                product = equation.params["product"]._replace(factors=tuple(inputs[:2]))
                equations.append(equation.replace(params={"product": product}))
            else:
                equations.append(_with_programs_inside(equation, inside.programs))
        return with_equations(program, equations)

    return changed_once(program, ("factors", facts), change)


def _with_programs_inside(
    equation: core.JaxprEqn,
    programs: Sequence[tuple[core.Jaxpr, Sequence[Factor]]],
) -> core.JaxprEqn:
    """An equation whose programs know their factors."""
    known = {id(program): factors for program, factors in programs}

    def change(program: Program) -> Program:
        factors = known.get(id(jaxpr_of(program)))
        if equation.primitive is scan_p and factors is not None:
            fixed, _ = scan_counts(equation.params)
            factors = [x._replace(is_fixed=i < fixed) for i, x in enumerate(factors)]
        return with_known_factors(program, factors)

    return with_programs(equation, change)
