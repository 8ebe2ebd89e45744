"""Add statistics to a program: of the results of every equation, at every depth.

Each program, such as the body of a loop, gets callbacks that take the operands and the
results of the equations before them. All else stays in its place, so no kind of control
flow needs a rule of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast.products import FLOAT32, low_product_p
from optax_lossscale._jax_internals import KERNELS
from optax_lossscale._jaxprs import (
    bind,
    equations_of,
    programs_of,
    scope_of,
    scopes_of,
    user_line,
    where_written,
)

_LOOPS = (primitives.scan_p, primitives.while_p)
# They hold functions of two numbers, whose equations are not listed.
_REDUCTIONS = (primitives.reduce_p, primitives.reduce_window_p)
# The most that waits for a callback; all of it stays in memory until then.
_BYTES = 2**26


class Context(NamedTuple):
    """What surrounds an equation.

    Attributes:
      where: Line and function that called for it.
      scope: Names of the scopes around it.
      is_backward: Whether it belongs to a backward pass.
      is_recomputed: Whether a checkpoint computes it again for the backward pass.
      loop: The number of the outermost loop around it; None outside of loops.
    """

    where: str
    scope: tuple[str, ...] = ()
    is_backward: bool = False
    is_recomputed: bool = False
    loop: int | None = None

    def at(self, equation: core.JaxprEqn) -> Context:
        """What surrounds the programs of an equation."""
        names = scopes_of(equation)
        is_recomputed = self.is_recomputed or "rematted_computation" in names
        is_backward = self.is_backward or "transpose" in names
        return self._replace(
            where=user_line(equation) or self.where or where_written(equation) or "",
            scope=(*self.scope, *scope_of(equation)),
            is_backward=is_backward and not is_recomputed,
            is_recomputed=is_recomputed,
        )


class Record(NamedTuple):
    """An equation with floating results.

    Attributes:
      equation: The equation.
      context: What surrounds it, with its own line and scope.
      results: Its floating results.
      operands: Its floating operands that are variables.
      reference: The same operation on float32 operands, and these, or None.
    """

    equation: core.JaxprEqn
    context: Context
    results: list[Any]
    operands: list[Any]
    reference: tuple[Callable[..., Any], list[Any]] | None


class Measured(NamedTuple):
    """The numbers of one operation, each time that it runs.

    Attributes:
      results: For each result the largest and the smallest magnitude, NaN if an entry
        is, and how many entries are not finite.
      operands: The same for each operand.
      compared: The largest magnitude of the result in float32, the share of its nonzero
        entries that are zero in the result, and the error; None without a reference.
    """

    results: list[list[float]]
    operands: list[list[float]]
    compared: list[float] | None


Receive = Callable[[int, Measured], None]


class Instrumenter:
    """Adds statistics to a program and to all programs in it.

    Attributes:
      records: The equations in the order of the program.
    """

    def __init__(self, receive: Receive, *, on_device: bool) -> None:
        """`receive` is called with the number of a record and what was measured.

        Statistics are computed by the devices or by NumPy, which needs no time to
        compile. But where one CPU plays several devices, to hand them whole arrays can
        wait forever.
        """
        self.records: list[Record] = []
        self._receive, self._on_device, self._loops = receive, on_device, 0

    def instrument(self, program: Any, context: Context) -> Any:
        """The same program, with statistics."""
        jaxpr = getattr(program, "jaxpr", program)
        equations: list[core.JaxprEqn] = []
        pending: list[int] = []
        exact: dict[core.Var, Any] = {}  # The float32 operand of each cast.
        size = 0
        for equation in jaxpr.eqns:
            if holds_programs(equation):
                inner = context.at(equation)
                equations.append(self._with_statistics(equation, inner))
                continue
            equations.append(equation)
            record = _record_of(equation, context, exact)
            if record is not None:
                pending.append(len(self.records))
                self.records.append(record)
                size += sum(x.aval.size * x.aval.dtype.itemsize for x in record.results)
            if size > _BYTES:
                equations.append(self._callback(pending))
                pending, size = [], 0
        if pending:
            equations.append(self._callback(pending))
        effects = frozenset[Any]().union(*(x.effects for x in equations))
        jaxpr = jaxpr.replace(eqns=equations, effects=jaxpr.effects | effects)
        return program.replace(jaxpr=jaxpr) if hasattr(program, "jaxpr") else jaxpr

    def _with_statistics(
        self, equation: core.JaxprEqn, context: Context
    ) -> core.JaxprEqn:
        """An equation with statistics in the programs that it holds."""
        if equation.primitive in _LOOPS and context.loop is None:
            context = context._replace(loop=self._loops)
            self._loops += 1
        effects = set(equation.effects)

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, core.Jaxpr | core.ClosedJaxpr):
                return leaf
            changed = self.instrument(leaf, context)
            effects.update(changed.effects)
            return changed

        params = jax.tree.map(change, equation.params)
        changed: core.JaxprEqn = equation.replace(params=params, effects=effects)
        return changed

    def _callback(self, numbers: Sequence[int]) -> core.JaxprEqn:
        """An equation that hands the statistics of some records to Python."""
        records = [self.records[i] for i in numbers]
        variables: list[Any] = [x for r in records for x in _variables_of(r)]
        variables = list(dict.fromkeys(variables))
        wide = jnp.result_type(float)

        def receive(measured: Any, compared: Any) -> None:
            rows = dict(zip(variables, np.asarray(measured).tolist(), strict=False))
            others = iter(np.asarray(compared).tolist())
            for number, record in zip(numbers, records, strict=True):
                results, operands = (
                    [rows[x] for x in some]
                    for some in (record.results, record.operands)
                )
                row = None if record.reference is None else next(others)
                self._receive(number, Measured(results, operands, row))

        @jax.jit
        def statistics(*arrays: jax.Array) -> None:
            values = dict(zip(variables, arrays, strict=True))
            pairs = [
                (values[r.results[0]], _apply_reference(*r.reference, values))
                for r in records
                if r.reference is not None
            ]
            if self._on_device:
                numbers = _measure(jnp, wide, arrays, pairs)
                jax.debug.callback(receive, *numbers)
            else:
                call = lambda *xs: receive(*_measure(np, wide, *xs))  # noqa: E731
                jax.debug.callback(call, arrays, pairs)

        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in variables]
        (call,) = jax.make_jaxpr(statistics)(*shapes).eqns
        equation: core.JaxprEqn = call.replace(invars=variables, outvars=[])
        return equation


def runs_on_several_devices(program: core.ClosedJaxpr, arrays: Sequence[Any]) -> bool:
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


def holds_programs(equation: core.JaxprEqn) -> bool:
    """Whether an equation calls programs, whose equations are listed instead of it."""
    primitive = equation.primitive
    if not primitive.multiple_results or primitive in _REDUCTIONS:
        return False
    return primitive.name not in KERNELS and any(True for _ in programs_of(equation))


def is_floating(atom: Any) -> bool:
    """Whether a variable is a floating array; a `jax.Ref` is none."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is floating and narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _record_of(
    equation: core.JaxprEqn, context: Context, exact: dict[core.Var, Any]
) -> Record | None:
    """The record of an equation, if it has floating results that anybody reads."""
    results: list[Any] = [x for x in equation.outvars if is_floating(x)]
    if not results:
        return None
    variables = [x for x in equation.invars if isinstance(x, core.Var)]
    operands = [x for x in variables if is_floating(x)]
    reference = _reference_of(equation, exact)
    return Record(equation, context.at(equation), results, operands, reference)


def _reference_of(
    equation: core.JaxprEqn, exact: dict[core.Var, Any]
) -> tuple[Callable[..., Any], list[Any]] | None:
    """The same operation on operands that were not rounded, if it is a narrow one.

    Of a product, these are what autocast has cast to its operands.
    """
    operands: Sequence[Any] = equation.invars
    params, result = equation.params, cast(Any, equation.outvars[0])
    if equation.primitive is low_product_p:
        apply = functools.partial(params["product"].apply, out=FLOAT32)
        operands = [exact.get(x, x) if isinstance(x, core.Var) else x for x in operands]
    elif is_narrow(result.aval.dtype) and len(equation.outvars) == 1:
        apply = functools.partial(_apply_wide, equation)
        if equation.primitive is primitives.convert_element_type_p:
            exact[result] = operands[0]
    else:
        return None
    # Operations on bits, for example, cannot run in float32.
    with contextlib.suppress(Exception):
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in operands]
        shape = jax.eval_shape(lambda *xs: apply(*map(_widened, xs)), *shapes)
        if shape.shape == result.aval.shape and shape.dtype == FLOAT32:
            return apply, list(operands)
    return None


def _apply_wide(equation: core.JaxprEqn, *operands: Any) -> Any:
    """The result of an operation with float32 in the place of each narrow dtype."""
    params = {
        name: FLOAT32 if isinstance(x, np.dtype) and is_narrow(x) else x
        for name, x in equation.params.items()
    }
    return bind(equation.primitive, operands, params)[0]


def _variables_of(record: Record) -> list[core.Var]:
    """What is measured for a record, and what its reference reads."""
    atoms = [*record.results, *record.operands]
    atoms += record.reference[1] if record.reference else []
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _apply_reference(
    apply: Callable[..., Any], operands: Sequence[Any], values: dict[core.Var, Any]
) -> Any:
    return apply(
        *(_widened(values[x] if isinstance(x, core.Var) else x.val) for x in operands)
    )


def _widened(array: Any) -> Any:
    """An array in float32 if it is narrower, else the very same object."""
    is_wide = not is_narrow(jnp.result_type(array))
    return array if is_wide else lax.convert_element_type(array, FLOAT32)


def _measure(xp: Any, wide: Any, arrays: Sequence[Any], pairs: Any) -> tuple[Any, Any]:
    """The statistics of arrays, and of results beside their references.

    `xp` is `jax.numpy` or NumPy.
    """
    with np.errstate(all="ignore"):
        measured = [_magnitudes_of(xp, _flat(xp, wide, x)) for x in arrays]
        compared = [_compare(xp, *(_flat(xp, wide, x) for x in pair)) for pair in pairs]
        return xp.stack(measured), xp.stack([*compared, measured[0]])


def _magnitudes_of(xp: Any, array: Any) -> Any:
    magnitudes = xp.abs(array)
    nonfinite = xp.sum(~xp.isfinite(magnitudes), dtype=magnitudes.dtype)
    largest = xp.max(magnitudes, initial=0)
    return xp.stack([largest, xp.min(magnitudes, initial=xp.inf), nonfinite])


def _compare(xp: Any, array: Any, reference: Any) -> Any:
    largest = xp.max(xp.abs(reference), initial=0)
    is_nonzero = reference != 0
    nonzero = xp.maximum(xp.sum(is_nonzero, dtype=array.dtype), 1)
    flushed = xp.sum(is_nonzero & (array == 0), dtype=array.dtype)
    unit = xp.where(largest > 0, largest, xp.ones_like(largest))
    difference = xp.sqrt(xp.sum(((array - reference) / unit) ** 2))
    norm = xp.sqrt(xp.sum((reference / unit) ** 2))
    error = xp.where(difference == 0, xp.zeros_like(norm), difference / norm)
    return xp.stack([largest, flushed / nonzero, error])


def _flat(xp: Any, wide: Any, array: Any) -> Any:
    """An array in the widest dtype in use, with the parts of a complex one apart."""
    array = xp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(wide)
    return xp.stack([array.real.astype(wide), array.imag.astype(wide)])
