"""Rewrite a program so that its products run low, and nothing else changes.

    z = dot_general(x, y)    becomes    low = low_product(x, y)
                                        z = convert_element_type(low, float32)

Equations are replaced in place, in the program and in all programs that its equations
hold, such as the body of a loop. So their lines, names, contexts and effects stay, all
dtypes stay, and no kind of control flow needs a rule of its own.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast import derivatives as derivatives  # Adds rules to JAX.
from optax_lossscale._autocast.between import with_known_factors
from optax_lossscale._autocast.context import traced_for
from optax_lossscale._autocast.jax_internals import (
    BACKWARD_RULE,
    KERNELS,
    TRACED_RULES,
    is_closed_call,
    name_of_rules,
    with_changed_rule,
    with_expansion,
)
from optax_lossscale._autocast.levels import Settings
from optax_lossscale._autocast.lookups import wide_lookup
from optax_lossscale._autocast.loops import with_lean_loops
from optax_lossscale._autocast.modules import Traced, trace
from optax_lossscale._autocast.products import (
    FLOAT32,
    PRODUCTS,
    Product,
    low_product_p,
)
from optax_lossscale._autocast.programs import (
    Program,
    aval_of,
    cast_equation,
    changed_once,
    equations_of,
    jaxpr_of,
    line_in_code,
    programs_of,
    scope_of,
    with_equations,
    with_params,
    with_programs_in,
)
from optax_lossscale._ground.types import PyTree

_DEFAULT_PRECISIONS = (
    None,
    lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.DEFAULT,
)


def evaluate(traced: Traced, settings: Settings) -> list[jax.Array]:
    """The results of a traced program, with low products."""
    results = core.jaxpr_as_fun(rewrite(traced.program, settings))(*traced.arrays)
    # A result that is a literal or a constant may be an array of NumPy.
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]


def rewrite(program: Program, settings: Settings) -> Program:
    """The program with low products, which know their factors, and with lean loops."""
    program = with_known_factors(_with_low_products(program, settings))
    return with_lean_loops(program) if settings.recompute else program


def _with_low_products(program: Program, settings: Settings) -> Program:
    """The program with low products; the very same object if nothing changes."""

    def change() -> Program:
        pairs = (_equations_for(each, settings) for each in jaxpr_of(program).eqns)
        return with_equations(program, list(itertools.chain.from_iterable(pairs)))

    return changed_once(program, settings, change)


def _equations_for(equation: core.JaxprEqn, settings: Settings) -> list[core.JaxprEqn]:
    """What stands in the place of an equation."""
    inside = settings.inside(equation)
    if equation.primitive.name in KERNELS:
        return [equation]
    if settings.casts_arguments and (lookup := wide_lookup(equation)):
        return lookup
    if equation.primitive in PRODUCTS:
        is_kept = inside.reason or reason_to_keep(equation, settings.dtype)
        return [equation] if is_kept else _low_product(equation, settings.dtype)
    if name := name_of_rules(equation):
        if inside.reason or not _has_product(equation):
            return [equation]
        warnings.warn(
            f"`autocast` cannot look into the rules of {name}, so the products in them "
            f"stay as they are written: {line_in_code(equation)}. (Cast them by hand, "
            "or mark the function with `full_precision`.)",
            stacklevel=2,
        )
    params = {
        name: _rewritten_param(name, param, inside)
        for name, param in equation.params.items()
    }
    return [with_params(equation, params)]


def _low_product(equation: core.JaxprEqn, low: jnp.dtype) -> list[core.JaxprEqn]:
    """The low product, and the cast of its result."""
    product = Product(equation.primitive, tuple(equation.params.items()), low, low)
    result = core.Var(aval_of(equation.outvars[0]).update(dtype=low, weak_type=False))
    return [
        equation.replace(
            primitive=low_product_p, outvars=[result], params={"product": product}
        ),
        cast_equation(equation, result, equation.outvars[0]),
    ]


def _has_product(equation: core.JaxprEqn) -> bool:
    programs = map(equations_of, programs_of(equation))
    return any(each.primitive in PRODUCTS for each in itertools.chain(*programs))


def _rewritten_param(name: str, param: Any, settings: Settings) -> Any:
    """A parameter of an equation, with the programs that it holds rewritten."""
    if name in TRACED_RULES:
        return with_changed_rule(param, functools.partial(_low_traced_rule, settings))
    if name == BACKWARD_RULE:
        return with_changed_rule(param, functools.partial(_low_rule, settings))
    if is_closed_call(param):
        return with_expansion(param, _low_rule(settings, param.expand))
    return with_programs_in(param, lambda x: _with_low_products(x, settings))


def _low_traced_rule(settings: Settings, rule: Callable[..., Any]) -> Any:
    """A function of JAX that traces a derivative rule and returns its program first."""

    def low_rule(*args: Any) -> Any:
        with traced_for(settings.traced_dtype):
            program, *others = rule(*args)
        return rewrite(program, settings), *others

    return low_rule


def _low_rule(settings: Settings, rule: Callable[..., Any]) -> Any:
    """A rule that is traced when it is called, such as the backward rule of a function.

    It may compute the forward pass again, as in Equinox's checkpointed loops, and then
    needs the same numbers. So its products are rounded like those of that pass.
    """

    def low_rule(*args: Any) -> PyTree:
        with traced_for(settings.traced_dtype):
            if settings.reason is not None:  # As written: it may read numbers.
                return rule(*args)
            traced = trace(rule, *args)
        return traced.finish(evaluate(traced, settings))

    return low_rule


class Found(NamedTuple):
    """A product in a program.

    Attributes:
      equation: The product.
      scope: The names of the scopes around it.
      reason: Why it stays as it is written, or None if it runs low.
      calls: The equations that hold it, from the outermost inwards.
    """

    equation: core.JaxprEqn
    scope: tuple[str, ...]
    reason: str | None
    calls: tuple[core.JaxprEqn, ...]


def products_of(
    jaxpr: core.Jaxpr,
    settings: Settings,
    scope: tuple[str, ...] = (),
    calls: tuple[core.JaxprEqn, ...] = (),
) -> Iterator[Found]:
    """Yields the products of a program that `rewrite` finds.

    Args:
      jaxpr: The program.
      settings: How it is rewritten.
      scope: The names of the scopes around the program.
      calls: The equations that hold the program, from the outermost inwards.
    """
    for equation in jaxpr.eqns:
        inner_scope = (*scope, *scope_of(equation))
        inside = settings.inside(equation)
        if equation.primitive in PRODUCTS:
            own = inside.reason or reason_to_keep(equation, settings.dtype)
            yield Found(equation, inner_scope, own, calls)
        products = [
            product
            for program in programs_of(equation)
            for product in products_of(program, inside, inner_scope, (*calls, equation))
        ]
        yield from products
        if products and inside.reason is None and name_of_rules(equation):
            yield Found(equation, inner_scope, "rules not looked into", calls)


def reason_to_keep(equation: core.JaxprEqn, low: jnp.dtype) -> str | None:
    """Why a product stays as it is written, or None if it runs low.

    One factor may be low already: JAX would cast it up, and multiply in float32.
    """
    factors = {aval_of(atom).dtype for atom in equation.invars[:2]}
    result = aval_of(equation.outvars[0]).dtype
    others = [*factors - {FLOAT32, low}, *{result} - {FLOAT32}]
    if others or FLOAT32 not in factors:
        return f"written in {(others or [low])[0]}"
    precision = equation.params["precision"]
    for one in precision if isinstance(precision, tuple) else (precision,):
        if one not in _DEFAULT_PRECISIONS:
            return f"precision={getattr(one, 'name', one)}"
    if math.prod(_contracted_sizes(equation)) in (0, 1):
        return "sums of at most one term"
    return "inner product" if _is_inner(equation) else None


def _is_inner(equation: core.JaxprEqn) -> bool:
    """Whether neither factor has an axis of its own, as in a norm or a density.

    A matrix unit gains nothing there.
    """
    if equation.primitive is not primitives.dot_general_p:
        return False
    batch_axes = equation.params["dimension_numbers"][1][0]
    return aval_of(equation.outvars[0]).ndim == len(batch_axes)


def _contracted_sizes(equation: core.JaxprEqn) -> list[int]:
    """The sizes of the axes that a product sums over."""
    x, y = (aval_of(atom).shape for atom in equation.invars[:2])
    if equation.primitive is primitives.conv_general_dilated_p:
        return [y[axis] for axis in equation.params["dimension_numbers"].rhs_spec[1:]]
    if equation.primitive is primitives.dot_general_p:
        numbers = equation.params["dimension_numbers"]
    else:
        numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return [x[axis] for axis in numbers[0][0]]
