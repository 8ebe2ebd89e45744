"""Add statistics to a program: of the results of every equation, at every depth.

Behind each equation stands a callback that takes its operands and its results. All else
stays in its place, so no kind of control flow needs a rule of its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
from jax.typing import ArrayLike

from optax_lossscale._autocast.jax_internals import KERNELS, name_p
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
)
from optax_lossscale._ground.types import Arrays
from optax_lossscale.diagnostics._operation import (
    Context,
    Entry,
    Run,
    is_below_float32,
    is_floating_atom,
)

Numbers: TypeAlias = jax.Array | list[jax.Array]
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
        self._on_device, self._loops, self._runs = on_device, 0, 0
        self._lock = threading.Lock()  # Several devices call at once.

    def instrument(self, program: Program, context: Context) -> Program:
        """The same program, with statistics."""
        jaxpr = jaxpr_of(program)
        equations: list[core.JaxprEqn] = []
        exact: dict[core.Var, Atom] = {}  # The float32 operand of each cast.
        for equation in jaxpr.eqns:
            inner = context.at(equation)
            if _holds_programs(equation):
                equations.append(self._with_statistics(equation, inner))
                continue
            equations.append(equation)
            if any(map(is_floating_atom, equation.outvars)):
                equations.append(self._statistics_of(equation, inner, exact))
        effects = frozenset[Any]().union(*(x.effects for x in equations))
        return with_equations(program, equations, effects=jaxpr.effects | effects)

    def _with_statistics(
        self, equation: core.JaxprEqn, context: Context
    ) -> core.JaxprEqn:
        """An equation with statistics in the programs that it holds."""
        if equation.primitive in _LOOPS and context.loop is None:
            context = context._replace(loop=self._loops)
            self._loops += 1
        change = functools.partial(self.instrument, context=context)
        params = {x: with_programs(y, change) for x, y in equation.params.items()}
        changed = equation.replace(params=params)
        effects = (x.effects for x in (changed, *programs_of(changed)))
        result: core.JaxprEqn = changed.replace(effects=frozenset().union(*effects))
        return result

    def _statistics_of(
        self, equation: core.JaxprEqn, context: Context, exact: dict[core.Var, Atom]
    ) -> core.JaxprEqn:
        """An equation that hands the numbers of the one before it to Python."""
        entry = Entry(equation, context)
        self.entries.append(entry)
        apply, exact_operands = _reference_of(equation, exact) or (None, [])
        read = (
            list(filter(is_floating_atom, equation.outvars)),
            list(filter(is_floating_atom, equation.invars)),
            exact_operands,  # Before they were rounded.
        )

        def receive(*numbers: Numbers) -> None:
            run = Run(*jax.tree.map(lambda x: np.asarray(x).tolist(), numbers))
            with self._lock:
                entry.add(run, self._runs)
                self._runs += 1

        @jax.jit
        def statistics(results: Arrays, operands: Arrays, exact: Arrays) -> None:
            pair = []
            if apply is not None:
                pair = [results[0], apply(*map(_widened, exact))]
            if self._on_device:
                jax.debug.callback(receive, *_measure(jnp, results, operands, pair))
            else:
                call = lambda *xs: receive(*_measure(np, *xs))  # noqa: E731
                jax.debug.callback(call, results, operands, pair)

        (call,) = jax.make_jaxpr(statistics)(*jax.tree.map(_shape_of, read)).eqns
        measured: core.JaxprEqn = call.replace(invars=jax.tree.leaves(read), outvars=[])
        return measured


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
    if not primitive.multiple_results or primitive in _REDUCTIONS:
        return False
    return primitive.name not in KERNELS and any(True for _ in programs_of(equation))


def _shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype)


def _reference_of(
    equation: core.JaxprEqn, exact: dict[core.Var, Atom]
) -> tuple[Callable[..., jax.Array], list[Atom]] | None:
    """The same operation on operands that were not rounded, if it is a narrow one.

    Of a product, these are what autocast has cast to its operands.
    """
    operands, out = list(equation.invars), aval_of(equation.outvars[0])
    originals = [exact.get(x, x) if isinstance(x, core.Var) else x for x in operands]
    if equation.primitive is name_p:  # As autocast names it.
        exact[equation.outvars[0]] = originals[0]
    if equation.primitive is low_product_p:
        apply = functools.partial(equation.params["product"].apply, out=FLOAT32)
        operands = originals
    elif is_below_float32(out.dtype) and len(equation.outvars) == 1:
        apply = functools.partial(_apply_wide, equation)
        if equation.primitive is primitives.convert_element_type_p:
            exact[equation.outvars[0]] = operands[0]
    else:
        return None
    # Operations on bits, for example, cannot run in float32.
    with contextlib.suppress(TypeError, ValueError, NotImplementedError):
        shape = jax.eval_shape(
            lambda *xs: apply(*map(_widened, xs)), *map(_shape_of, operands)
        )
        if shape.shape == out.shape and shape.dtype == FLOAT32:
            return apply, operands
    return None


def _apply_wide(equation: core.JaxprEqn, *operands: jax.Array) -> jax.Array:
    """The result of an operation with float32 in the place of each narrow dtype."""
    params = {
        name: FLOAT32
        if isinstance(x, np.dtype) and is_below_float32(x)
        else with_programs(x, _wide_program)
        for name, x in equation.params.items()
    }
    return bind(equation.primitive, operands, params)[0]


def _wide_program(program: Program) -> Program:
    """A program for float32, such as the sum of two numbers in a scatter."""
    is_closed = isinstance(program, core.ClosedJaxpr)
    closed = core.ClosedJaxpr(jaxpr_of(program), consts_of(program))
    inputs = [_widened(np.zeros(x.shape, x.dtype)) for x in closed.in_avals]
    wide = jax.make_jaxpr(core.jaxpr_as_fun(closed))(*inputs)
    return wide if is_closed else wide.jaxpr


def _widened(array: ArrayLike) -> ArrayLike:
    """An array in float32 if it is narrower, else the very same object."""
    is_wide = not is_below_float32(jnp.result_type(array))
    return array if is_wide else lax.convert_element_type(array, FLOAT32)


def _measure(
    xp: Any, results: Arrays, operands: Arrays, pair: Arrays
) -> tuple[Numbers, ...]:
    """The arguments of a `Run`, by `jax.numpy` or NumPy. `pair` may be empty."""
    with np.errstate(all="ignore"):
        some = [[_magnitudes_of(xp, x) for x in group] for group in (results, operands)]
        return (*some, _compare(xp, *pair) if pair else [])


def _magnitudes_of(xp: Any, array: jax.Array) -> Any:
    magnitudes = xp.abs(_flat(xp, array))
    is_finite = xp.all(xp.isfinite(magnitudes), axis=0)
    nonfinite = xp.sum(~is_finite, dtype=magnitudes.dtype)
    largest = xp.max(magnitudes, initial=0)
    return xp.stack([largest, xp.min(magnitudes, initial=xp.inf), nonfinite])


def _compare(xp: Any, array: jax.Array, reference: jax.Array) -> Any:
    array, reference = _flat(xp, array), _flat(xp, reference)
    largest = xp.max(xp.abs(reference), initial=0)
    is_nonzero = reference != 0
    nonzero = xp.maximum(xp.sum(is_nonzero, dtype=array.dtype), 1)
    flushed = xp.sum(is_nonzero & (array == 0), dtype=array.dtype)
    unit = xp.where(largest > 0, largest, xp.ones_like(largest))
    difference = xp.sqrt(xp.sum(((array - reference) / unit) ** 2))
    norm = xp.sqrt(xp.sum((reference / unit) ** 2))
    error = xp.where(difference == 0, xp.zeros_like(norm), difference / norm)
    return xp.stack([largest, flushed / nonzero, error])


def _flat(xp: Any, array: jax.Array) -> Any:
    """One or two arrays in the widest dtype in use: the parts of a complex one."""
    array, wide = xp.asarray(array), jnp.result_type(float)
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    parts = [array.real, array.imag] if is_complex else [array]
    return xp.stack([part.astype(wide) for part in parts])
