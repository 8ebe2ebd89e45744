"""Rewrite a program so that its products run low, and nothing else changes.

    z = dot_general(x, y)    becomes    low = low_product(x, y)
                                        z = convert_element_type(low, float32)

Equations are replaced in place, in the program and in all programs that its equations
hold, such as the body of a loop. So their lines, names, contexts and effects stay, all
dtypes stay, and no kind of control flow needs a rule of its own.
"""

import concurrent.futures
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast import derivatives as derivatives  # Adds rules to JAX.
from optax_lossscale._autocast.between import with_low_gradients
from optax_lossscale._autocast.context import traced_for
from optax_lossscale._autocast.jax_internals import (
    BACKWARD_RULE,
    BATCHING_RULE,
    KERNELS,
    TRACED_RULES,
    TRANSPOSE_RULE,
    pvary_p,
    with_changed_result,
)
from optax_lossscale._autocast.levels import HIGH, Settings
from optax_lossscale._autocast.lookups import wide_lookup
from optax_lossscale._autocast.markers import reason_of_marker
from optax_lossscale._autocast.modules import Traced, trace
from optax_lossscale._autocast.products import (
    FLOAT32,
    PRODUCTS,
    low_product_p,
    product_of,
)
from optax_lossscale._autocast.programs import (
    Atom,
    Program,
    aval_of,
    bind,
    changed_once,
    equations_of,
    hidden_programs_of,
    jaxpr_of,
    programs_of,
    read,
    scope_of,
    with_equations,
    with_programs,
)
from optax_lossscale._ground.tree import are_same
from optax_lossscale._ground.types import PyTree

_DEFAULT_PRECISIONS = (
    None,
    lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.DEFAULT,
)
_REWRITTEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def evaluate(traced: Traced, settings: Settings) -> list[jax.Array]:
    """The results of a traced program, with low products."""
    results = core.jaxpr_as_fun(rewrite(traced.program, settings))(*traced.arrays)
    # Of a literal or a constant JAX returns what it holds, which may be another array.
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]


def rewrite(program: Program, settings: Settings) -> Program:
    """The program with low products, and what is between them."""
    return with_low_gradients(_with_low_products(program, settings), settings.recompute)


def _with_low_products(program: Program, settings: Settings) -> Program:
    """The program with low products; the very same object if it holds none."""
    return changed_once(
        _REWRITTEN, program, settings, lambda: _rewritten(program, settings)
    )


def _rewritten(program: Program, settings: Settings) -> Program:
    jaxpr = jaxpr_of(program)
    equations: list[core.JaxprEqn] = []
    for equation in jaxpr.eqns:
        equations += _equations_for(equation, jaxpr, settings)
    if are_same(equations, jaxpr.eqns):
        return program
    return with_equations(program, equations)


def _equations_for(
    equation: core.JaxprEqn, jaxpr: core.Jaxpr, settings: Settings
) -> list[core.JaxprEqn]:
    """What stands in the place of an equation."""
    if equation.primitive.name in KERNELS:
        return [equation]
    if (lookup := wide_lookup(equation)) is not None:
        return lookup
    inside = _settings_inside(equation, settings)
    if equation.primitive not in PRODUCTS:
        params = {
            name: _rewritten_param(name, param, inside)
            for name, param in equation.params.items()
        }
        if are_same([*params.values()], [*equation.params.values()]):
            if inside.reason is None:
                _warn_of_hidden_products(equation)
            return [equation]
        return [equation.replace(params=params)]
    low, out = settings.dtype, aval_of(equation.outvars[0])
    if inside.reason or reason_to_keep(equation, jaxpr, low):
        return [equation]
    product = product_of(equation, low, low)
    result = core.Var(out.update(dtype=low, weak_type=False))
    params = {"new_dtype": FLOAT32, "weak_type": out.weak_type, "sharding": None}
    return [
        equation.replace(
            primitive=low_product_p, outvars=[result], params={"product": product}
        ),
        equation.replace(
            primitive=primitives.convert_element_type_p, invars=[result], params=params
        ),
    ]


def _settings_inside(equation: core.JaxprEqn, settings: Settings) -> Settings:
    """The settings for an equation, and for the programs that it holds."""
    reason = settings.reason or reason_for_all_inside(equation, settings)
    return settings.inside(equation)._replace(reason=reason)


def _warn_of_hidden_products(equation: core.JaxprEqn) -> None:
    """Warns of products in a call that JAX keeps closed, and that holds no program."""
    for program in hidden_programs_of(equation):
        if any(each.primitive in PRODUCTS for each in equations_of(program)):
            names = {type(each).__name__ for each in equation.params.values()}
            warnings.warn(
                f"`autocast` cannot look into {', '.join(sorted(names))}, so its "
                "products stay as they are written. (`autocast_report` lists them.)",
                stacklevel=2,
            )


def _rewritten_param(name: str, param: Any, settings: Settings) -> Any:
    """A parameter of an equation, with the programs that it holds rewritten."""
    if name in TRACED_RULES:
        return with_changed_result(param, functools.partial(_low_traced_rule, settings))
    if name == BACKWARD_RULE and settings.reason is None:
        return with_changed_result(param, functools.partial(_low_rule, settings))
    if name == TRANSPOSE_RULE:
        return _low_traced_rule(settings, param)
    if name == BATCHING_RULE and callable(param):
        return _low_rule(settings, param)
    low_rule = functools.partial(_low_rule, settings)
    return with_programs(param, lambda x: _with_low_products(x, settings), low_rule)


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
    needs the same numbers. So its products are rounded like those of that pass. Where
    products stay, it stays too, and may read numbers that a trace would not have.
    """
    if settings.reason:
        return rule

    @functools.wraps(rule)
    def low_rule(*args: Any) -> PyTree:
        with traced_for(settings.dtype):
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
        inside = _settings_inside(equation, settings)
        if equation.primitive in PRODUCTS:
            own = inside.reason or reason_to_keep(equation, jaxpr, settings.dtype)
            yield Found(equation, inner_scope, own, calls)
        for program in programs_of(equation):
            yield from products_of(program, inside, inner_scope, (*calls, equation))
        hidden = inside._replace(reason=inside.reason or "not looked into")
        for program in hidden_programs_of(equation):
            yield from products_of(program, hidden, inner_scope, (*calls, equation))


def reason_for_all_inside(equation: core.JaxprEqn, settings: Settings) -> str | None:
    """Why an equation and all programs in it stay as they are written, or None."""
    if equation.primitive.name in KERNELS:
        return "in a kernel"
    if settings.is_high(equation):
        return HIGH
    return reason_of_marker(equation)


def reason_to_keep(
    equation: core.JaxprEqn, jaxpr: core.Jaxpr, low: jnp.dtype
) -> str | None:
    """Why a product in a program stays as it is written, or None if it runs low.

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
    return "moves entries only" if _is_move(equation, jaxpr) else None


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


def _is_move(equation: core.JaxprEqn, jaxpr: core.Jaxpr) -> bool:
    """Whether a convolution has a kernel of zeros and single ones, made from nothing.

    Each result then is an entry of the operand, as in `conv_general_dilated_patches`.
    """
    if equation.primitive is not primitives.conv_general_dilated_p:
        return False
    kernel = _constant(equation.invars[1], jaxpr)
    if kernel is None:
        return False
    channels = np.moveaxis(kernel, equation.params["dimension_numbers"].rhs_spec[0], 0)
    is_single = np.count_nonzero(channels.reshape(len(channels), -1), axis=1) <= 1
    return bool(np.all(is_single) and np.all((kernel == 0) | (kernel == 1)))


def _constant(atom: Atom, jaxpr: core.Jaxpr) -> np.ndarray | None:
    """The value of a variable that depends on no input of a program, or None."""
    needed, equations = {atom}, []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append(equation)
            needed.difference_update(equation.outvars)
            needed.update(x for x in equation.invars if isinstance(x, core.Var))
    if needed or any(equation.effects for equation in equations):
        return None
    sizes = [n for e in equations for x in e.outvars for n in aval_of(x).shape]
    if not all(isinstance(size, int) for size in sizes):  # Symbols of `jax.export`.
        return None
    # In a thread of its own, because JAX keeps the mesh of a `jax.shard_map` by thread.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_value, atom, equations[::-1]).result()


def _value(atom: Atom, equations: Sequence[core.JaxprEqn]) -> np.ndarray:
    """The value of a variable that some equations without inputs compute."""
    values: dict[core.Var, jax.Array] = {}
    for equation in equations:
        inputs: Sequence[jax.Array] = [read(x, values) for x in equation.invars]
        # `pvary` returns its operands, and runs in a `jax.shard_map` only.
        if equation.primitive is not pvary_p:
            inputs = bind(equation.primitive, inputs, equation.params)
        values.update(zip(equation.outvars, inputs, strict=True))
    return np.asarray(read(atom, values))
