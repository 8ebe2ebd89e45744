"""Add statistics to a program: of the results of every equation, at every depth.

Behind each equation stands a callback that takes its operands and its results. All else
stays in its place, so branches, jitted functions and derivative rules need no rule of
their own. Only loops are numbered, and reductions, kernels and closed calls count as
one operation each.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast.jax_internals import KERNELS, is_closed_call, name_p
from optax_lossscale._autocast.products import FLOAT32, low_product_p
from optax_lossscale._autocast.programs import (
    Atom,
    Program,
    aval_of,
    bind,
    consts_of,
    equations_of,
    jaxpr_of,
    programs_of,
    with_equations,
    with_programs,
    with_programs_in,
)
from optax_lossscale._ground.tree import widen
from optax_lossscale._ground.types import Arrays
from optax_lossscale.diagnostics._operation import (
    Context,
    Entry,
    Magnitudes,
    Measured,
    is_below_float32,
    is_floating_atom,
)

_LOOPS = (primitives.scan_p, primitives.while_p)
# They hold functions of two numbers, whose equations are not listed.
_REDUCTIONS = (primitives.reduce_p, primitives.reduce_window_p)


class Instrumenter:
    """Adds statistics to a program and to all programs in it.

    Attributes:
      entries: The equations with floating results, in the order of the program.
    """

    def __init__(self, *, on_device: bool) -> None:
        """Statistics are computed by the devices, or else by NumPy.

        NumPy needs no time to compile. But where one CPU plays several devices, to hand
        it whole arrays can wait forever.
        """
        self.entries: list[Entry] = []
        self._on_device, self._runs = on_device, 0
        self._lock = threading.Lock()  # Several devices call at once.

    def instrument(self, program: Program, context: Context) -> Program:
        """The same program, with statistics."""
        jaxpr = jaxpr_of(program)
        equations: list[core.JaxprEqn] = []
        unrounded: dict[core.Var, Atom] = {}  # What was cast to each narrow variable.
        for equation in jaxpr.eqns:
            own_context = context.at(equation)
            if _holds_programs(equation):
                equations.append(self._instrument_inside(equation, own_context))
                continue
            equations.append(equation)
            operands = [
                unrounded.get(x, x) if isinstance(x, core.Var) else x
                for x in equation.invars
            ]
            if any(map(is_floating_atom, equation.outvars)):
                equations.append(self._statistics_of(equation, own_context, operands))
            if equation.primitive is name_p:  # As autocast names its casts.
                unrounded[equation.outvars[0]] = operands[0]
            elif _is_narrowing(equation):
                unrounded[equation.outvars[0]] = equation.invars[0]
        effects = frozenset[Any]().union(*(x.effects for x in equations))
        return with_equations(program, equations, effects=jaxpr.effects | effects)

    def _instrument_inside(
        self, equation: core.JaxprEqn, context: Context
    ) -> core.JaxprEqn:
        """An equation with statistics in the programs that it holds."""
        if equation.primitive in _LOOPS and context.loop is None:
            context = context._replace(loop=len(self.entries))
        change = functools.partial(self.instrument, context=context)
        changed = with_programs(equation, change)
        inside = (program.effects for program in programs_of(changed))
        effects = frozenset[Any]().union(changed.effects, *inside)
        result: core.JaxprEqn = changed.replace(effects=effects)
        return result

    def _statistics_of(
        self, equation: core.JaxprEqn, context: Context, unrounded: list[Atom]
    ) -> core.JaxprEqn:
        """An equation that hands the numbers of the one before it to Python."""
        entry = Entry(equation, context)
        place = len(self.entries) if context.loop is None else context.loop
        self.entries.append(entry)
        reference, inputs = _reference_of(equation, unrounded)
        read = (
            list(filter(is_floating_atom, equation.outvars)),
            list(filter(is_floating_atom, equation.invars)),
            inputs,
        )

        def receive(measured: Measured) -> None:
            numbers = jax.tree.map(float, measured)
            with self._lock:
                entry.add(numbers, (place, self._runs))
                self._runs += 1

        @jax.jit  # So that all of it is one equation, whose inputs are replaced.
        def statistics(results: Arrays, operands: Arrays, inputs: Arrays) -> None:
            pair = [results[0], reference(*inputs)] if reference else []
            if self._on_device:
                jax.debug.callback(receive, _measure(jnp, results, operands, pair))
            else:
                measure = lambda *xs: receive(_measure(np, *xs))  # noqa: E731
                jax.debug.callback(measure, results, operands, pair)

        (added,) = jax.make_jaxpr(statistics)(*jax.tree.map(_shape_of, read)).eqns
        result: core.JaxprEqn = added.replace(invars=jax.tree.leaves(read))
        return result


def runs_on_several_devices(program: core.ClosedJaxpr, arrays: Arrays) -> bool:
    """Whether the inputs, or an equation at any depth, are spread over devices."""
    leaves = (
        leaf
        for equation in equations_of(program)
        for leaf in jax.tree.leaves(list(equation.params.values()))
    )
    meshes = (getattr(leaf, "mesh", leaf) for leaf in leaves)
    kinds = jax.sharding.Mesh | jax.sharding.AbstractMesh
    return any(len(x.sharding.device_set) > 1 for x in arrays) or any(
        isinstance(mesh, kinds) and mesh.size > 1 for mesh in meshes
    )


def _holds_programs(equation: core.JaxprEqn) -> bool:
    """Whether an equation calls programs, whose equations are listed instead of it."""
    primitive = equation.primitive
    # A scatter holds a function of two numbers too; it has one result.
    if not primitive.multiple_results or primitive in _REDUCTIONS:
        return False
    is_closed = any(map(is_closed_call, equation.params.values()))
    is_call = any(True for _ in programs_of(equation))
    return is_call and not (is_closed or primitive.name in KERNELS)


def _shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype)


def _is_narrowing(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a cast to fewer than 32 bits."""
    is_cast = equation.primitive is primitives.convert_element_type_p
    return is_cast and is_below_float32(aval_of(equation.outvars[0]).dtype)


def _reference_of(
    equation: core.JaxprEqn, unrounded: list[Atom]
) -> tuple[Callable[..., jax.Array] | None, list[Atom]]:
    """The same operation in float32, and its inputs, if it is a narrow one.

    The inputs of a product are `unrounded`: what autocast has cast to its operands.
    """
    out, inputs = aval_of(equation.outvars[0]), list(equation.invars)
    if equation.primitive is low_product_p:
        apply = equation.params["product"]._replace(out=FLOAT32).apply
        inputs = unrounded
    elif is_below_float32(out.dtype) and len(equation.outvars) == 1:
        apply = functools.partial(_apply_wide, equation)
    else:
        return None, []

    def reference(*arrays: jax.Array) -> Any:
        return apply(*map(widen, arrays))

    # Operations on bits, for example, cannot run in float32.
    with contextlib.suppress(TypeError, ValueError, NotImplementedError):
        shape = jax.eval_shape(reference, *map(_shape_of, inputs))
        if shape.shape == out.shape and shape.dtype == FLOAT32:
            return reference, inputs
    return None, []


def _apply_wide(equation: core.JaxprEqn, *operands: jax.Array) -> jax.Array:
    """The result of an operation with float32 in the place of each narrow dtype."""
    params = {
        name: FLOAT32
        if isinstance(x, np.dtype) and is_below_float32(x)
        else with_programs_in(x, _wide_program)
        for name, x in equation.params.items()
    }
    return bind(equation.primitive, operands, params)[0]


def _wide_program(program: Program) -> Program:
    """A program for float32, such as the sum of two numbers in a scatter."""
    is_closed = isinstance(program, core.ClosedJaxpr)
    closed = core.ClosedJaxpr(jaxpr_of(program), consts_of(program))
    inputs = [widen(np.zeros(x.shape, x.dtype)) for x in closed.in_avals]
    wide = jax.make_jaxpr(core.jaxpr_as_fun(closed))(*inputs)
    return wide if is_closed else wide.jaxpr


def _measure(xp: Any, results: Arrays, operands: Arrays, pair: Arrays) -> Measured:
    """The numbers of one run, by `jax.numpy` or NumPy. `pair` may be empty."""
    with np.errstate(all="ignore"):
        return Measured(
            results=[_magnitudes_of(xp, x) for x in results],
            operands=[_magnitudes_of(xp, x) for x in operands],
            in_float32=_compare(xp, *pair) if pair else [],
        )


def _magnitudes_of(xp: Any, array: jax.Array) -> Magnitudes:
    parts = _parts_of(xp, array)
    magnitudes = _absolute(xp, parts)
    is_finite = xp.all(xp.isfinite(parts), axis=0)
    return Magnitudes(
        largest=xp.max(magnitudes, initial=0),
        smallest=xp.min(magnitudes, initial=xp.inf),
        nonfinite=xp.sum(~is_finite, dtype=parts.dtype),
        nan=xp.sum(xp.isnan(parts), dtype=parts.dtype),
    )


def _compare(xp: Any, array: jax.Array, reference: jax.Array) -> Any:
    array, reference = _parts_of(xp, array), _parts_of(xp, reference)
    largest = xp.max(_absolute(xp, reference), initial=0)
    is_nonzero = reference != 0
    nonzero = xp.maximum(xp.sum(is_nonzero, dtype=array.dtype), 1)
    flushed = xp.sum(is_nonzero & (array == 0), dtype=array.dtype)
    unit = xp.where(largest > 0, largest, xp.ones_like(largest))
    difference = xp.sqrt(xp.sum(((array - reference) / unit) ** 2))
    norm = xp.sqrt(xp.sum((reference / unit) ** 2))
    error = xp.where(difference == 0, xp.zeros_like(norm), difference / norm)
    return [largest, flushed / nonzero, error]


def _absolute(xp: Any, array: jax.Array) -> Any:
    """The magnitude of each entry, infinite for NaN, which a maximum may drop."""
    return xp.where(xp.isnan(array), xp.inf, xp.abs(array))


def _parts_of(xp: Any, array: jax.Array) -> Any:
    """One or two arrays in the widest dtype in use: the parts of a complex one."""
    array, wide = xp.asarray(array), jnp.result_type(float)
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    parts = [array.real, array.imag] if is_complex else [array]
    return xp.stack([part.astype(wide) for part in parts])
