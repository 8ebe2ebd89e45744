"""What happens between products: in the backward pass, and from loop to loop.

    the gradient of a value that depends on the result of a low product is rounded as
    that result was; every other gradient, as those of parameters, is a float32 sum

Such a value is called an activation. The next product of the backward pass would round
its gradient anyway, and until then it has half the bytes. In a loop, the low copy of a
factor that is the same in each iteration is made once.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast.follow import look_into
from optax_lossscale._autocast.jax_internals import scan_counts
from optax_lossscale._autocast.loops import body_that_saves_less
from optax_lossscale._autocast.products import Factor, low_product_p
from optax_lossscale._autocast.programs import (
    Program,
    changed_once,
    is_floating_variable,
    jaxpr_of,
    programs_of,
    with_equations,
    with_programs,
)
from optax_lossscale._ground.tree import are_same


class FactorRule:
    """Follows what becomes a factor through operations; a `Rule`."""

    nothing: Factor | None = None

    def of_constant(self, value: Any) -> Factor:
        return Factor()

    def of_operation(
        self, equation: core.JaxprEqn, inputs: Sequence[Factor]
    ) -> Sequence[Factor]:
        is_activation = equation.primitive is low_product_p or (
            equation.primitive is not primitives.stop_gradient_p
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
_KNOWN: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def with_low_gradients(
    program: Program,
    recompute: bool,
    factors: tuple[Factor, ...] = (),
    loop: core.JaxprEqn | None = None,
) -> Program:
    """The program whose products know their factors, and whose loops save less.

    Args:
      program: A program with low products.
      recompute: Whether loops may compute cheap operations again.
      factors: What is known of its inputs; empty if nothing is.
      loop: The scan whose body it is.
    """
    factors = factors or (Factor(),) * len(jaxpr_of(program).invars)

    def change() -> Program:
        changed = _changed(program, recompute, factors)
        return body_that_saves_less(loop, changed) if loop and recompute else changed

    return changed_once(_KNOWN, program, (recompute, factors, loop is None), change)


def _changed(program: Program, recompute: bool, factors: Sequence[Factor]) -> Program:
    jaxpr, equations = jaxpr_of(program), list[core.JaxprEqn]()
    known: dict[Any, Factor] = dict(zip(jaxpr.invars, factors, strict=True))
    for equation in jaxpr.eqns:
        inputs = [
            Factor() if isinstance(x, core.Literal) else known.get(x, Factor())
            for x in equation.invars
        ]
        inside = look_into(equation, inputs, _RULE)
        known.update(zip(equation.outvars, inside.outputs, strict=True))
        if equation.primitive is low_product_p:
            product = equation.params["product"]._replace(factors=tuple(inputs[:2]))
            equation = equation.replace(params={"product": product})
        elif any(True for _ in programs_of(equation)):
            equation = _changed_call(equation, recompute, inside.programs)
        equations.append(equation)
    if are_same(equations, jaxpr.eqns):
        return program
    return with_equations(program, equations)


def _changed_call(
    equation: core.JaxprEqn,
    recompute: bool,
    programs: Sequence[tuple[core.Jaxpr, Sequence[Factor]]],
) -> core.JaxprEqn:
    """An equation with its programs changed."""
    known = {id(program): factors for program, factors in programs}
    loop = equation if equation.primitive is primitives.scan_p else None

    def change(program: Program) -> Program:
        factors = known.get(id(jaxpr_of(program)), ())
        if loop:
            fixed, _ = scan_counts(equation.params)
            factors = [x._replace(is_fixed=i < fixed) for i, x in enumerate(factors)]
        return with_low_gradients(program, recompute, tuple(factors), loop)

    changed = {
        name: with_programs(param, change) for name, param in equation.params.items()
    }
    if are_same([*changed.values()], [*equation.params.values()]):
        return equation
    result: core.JaxprEqn = equation.replace(params=changed)
    return result
