"""What surrounds each operation of a program, and its numbers, once it ran."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from optax_lossscale._autocast.loops import ELEMENTWISE
from optax_lossscale._autocast.products import low_product_p
from optax_lossscale._autocast.programs import (
    Atom,
    aval_of,
    bind,
    is_recomputed,
    is_transposed,
    scope_of,
    user_line,
)

_SOLVERS = (primitives.triangular_solve_p, primitives.tridiagonal_solve_p)
# Infinite at -1 or 1, or at whole numbers.
_WITH_POLES = (
    primitives.log1p_p,
    primitives.atanh_p,
    primitives.erf_inv_p,
    primitives.lgamma_p,
    primitives.digamma_p,
)


class Context(NamedTuple):
    """What surrounds an equation.

    Attributes:
      where: Line and function that called for it.
      scope: Names of the scopes around it.
      is_backward: Whether it belongs to a backward pass.
      is_recomputed: Whether a checkpoint computes it again for the backward pass.
      loop: The place of the first operation in the outermost loop around it; None
        outside of loops.
    """

    where: str
    scope: tuple[str, ...] = ()
    is_backward: bool = False
    is_recomputed: bool = False
    loop: int | None = None

    def at(self, equation: core.JaxprEqn) -> Context:
        """The context of an equation and of the programs in it."""
        recomputed = self.is_recomputed or is_recomputed(equation)
        backward = self.is_backward or is_transposed(equation)
        return self._replace(
            where=user_line(equation) or self.where,
            scope=(*self.scope, *scope_of(equation)),
            is_backward=backward and not recomputed,
            is_recomputed=recomputed,
        )


def is_floating_atom(atom: Atom) -> bool:
    """Whether a variable or a literal is a floating array, and no `jax.Ref` to one."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def floating_result(equation: core.JaxprEqn) -> Atom:
    """The first floating result of an operation that has any."""
    return next(filter(is_floating_atom, equation.outvars))


def is_below_float32(dtype: jax.typing.DTypeLike) -> bool:
    """Whether a dtype is floating and narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


class Operation(NamedTuple):
    """One operation of a program: where it stands, and the numbers of its result.

    "In float32" means: the same operation on float32 operands, which for products are
    those that `autocast` did not round. Only operations in fewer than 32 bits have such
    a result beside their own. Of an operation that ran several times, as in a loop, or
    on several devices, each number is the worst.

    Attributes:
      primitive: Name of the JAX primitive, such as `"dot_general"`.
      where: Line and function that asked for it, as `"model.py:12 (Net.__call__)"`: the
        innermost that is not in an installed library. For the backward rule of a
        `jax.custom_vjp`, as in JAX itself, it is the line that called the function.
      scope: Path of the Linen module or `jax.named_scope`, such as `"Net/Dense_0"`;
        empty if there is none.
      is_backward: Whether it belongs to the backward pass.
      dtype: The dtype in which it computes: of a low product the low one, also where
        its result is a float32 sum; else that of its result.
      shape: The shape of its result.
      largest: The largest magnitude; infinite if an entry is NaN or infinite.
      float32_largest: The same in float32.
      nonfinite: The number of entries that are NaN or infinite.
      made_nonfinite: The same if the operation made them: out of finite operands, or
        NaN out of infinite operands. Else 0.
      cause: Why it made them, as the report says it; empty if it made none.
      underflow: The share of entries that are zero, of those that are not in float32;
        from 0 to 1.
      headroom_bits: By how many bits the float32 result can grow before it overflows in
        the dtype of the result. It is negative if it overflows.
      unscaled_headroom_bits: The same with a loss scale of 1.
      error: The norm of the difference from float32, divided by the norm in float32.
      iteration: How often it had run before it first made a nonfinite number; None if
        it made none, or is not in a loop.
      order: By this, operations are sorted by when they first made a nonfinite number:
        the place of the operation in the program, or that of the outermost loop around
        it, and how many results of the whole program came before that one. It is empty
        if it made none.
    """

    primitive: str
    where: str
    scope: str
    is_backward: bool
    dtype: np.dtype
    shape: tuple[int, ...]
    largest: float
    float32_largest: float
    nonfinite: int
    made_nonfinite: int
    cause: str
    underflow: float
    headroom_bits: float
    unscaled_headroom_bits: float
    error: float
    iteration: int | None
    order: tuple[int, ...]

    @property
    def overflows_only_scaled(self) -> bool:
        """Whether the loss scale alone makes it overflow."""
        return self.headroom_bits < 0 <= self.unscaled_headroom_bits


class Magnitudes(NamedTuple):
    """The magnitudes of an array.

    Attributes:
      largest: The largest one; infinite if an entry is NaN.
      smallest: The smallest one.
      nonfinite: How many entries are NaN or infinite.
      nan: How many are NaN. Both parts of a complex number count.
    """

    largest: float
    smallest: float
    nonfinite: float
    nan: float


class Measured(NamedTuple):
    """What was measured of one run of an operation.

    Attributes:
      results: The magnitudes of each floating result.
      operands: The magnitudes of each floating operand, literals included.
      in_float32: The largest magnitude of the result in float32, the share of its
        nonzero entries that are zero in the result, and the error; else empty.
    """

    results: list[Magnitudes]
    operands: list[Magnitudes]
    in_float32: list[float]


class Entry:
    """An operation of a program that runs, with the worst of its numbers until now.

    Attributes:
      equation: The operation in the program.
      context: Its line, its scope, and what surrounds it.
      runs: How often it ran.
      worst: Its numbers, by the names of the fields of `Operation`.
      first: What was measured of the run that made the first nonfinite numbers, how
        many runs there were before it, and its `order`.
    """

    def __init__(self, equation: core.JaxprEqn, context: Context) -> None:
        self.equation, self.context = equation, context
        self.runs, self.worst = 0, dict[str, Any]()
        self.first: tuple[Measured, int, tuple[int, ...]] | None = None

    def add(self, measured: Measured, order: tuple[int, ...]) -> None:
        """Counts one more run."""
        largest = _largest_of(measured.results)
        exact, underflow, error = measured.in_float32 or (largest, 0.0, 0.0)
        if not math.isfinite(exact):  # Then nothing was lost by rounding.
            exact, underflow, error = math.inf, 0.0, 0.0
        nonfinite = int(sum(x.nonfinite for x in measured.results))
        numbers = {
            "largest": largest,
            "float32_largest": exact,
            "nonfinite": nonfinite,
            "made_nonfinite": nonfinite if _is_made(measured) else 0,
            "underflow": underflow,
            "error": math.inf if math.isnan(error) else error,
        }
        if numbers["made_nonfinite"] and self.first is None:
            self.first = measured, self.runs, order
        self.runs += 1
        self.worst = {x: max(n, self.worst.get(x, n)) for x, n in numbers.items()}

    def operation(self, loss_scale: float) -> Operation:
        """What is known of it, once the program ran."""
        equation, context = self.equation, self.context
        primitive, result = equation.primitive, aval_of(floating_result(equation))
        dtype = result.dtype
        if primitive is low_product_p:
            product = equation.params["product"]
            primitive, dtype = product.primitive, np.dtype(product.low)
        headroom = _headroom(self.worst["float32_largest"], result.dtype)
        scale_bits = math.log2(loss_scale) if context.is_backward else 0.0
        measured, iteration, order = self.first or (None, None, ())
        return Operation(
            primitive=primitive.name,
            where=context.where,
            scope="/".join(context.scope),
            is_backward=context.is_backward,
            dtype=dtype,
            shape=result.shape,
            cause="" if measured is None else _cause(equation, measured),
            headroom_bits=headroom,
            unscaled_headroom_bits=headroom + scale_bits,
            iteration=None if context.loop is None else iteration,
            order=order,
            **self.worst,
        )


def operations_of(entries: Iterable[Entry], loss_scale: float) -> list[Operation]:
    """All operations that ran, but those that `jax.checkpoint` repeated."""
    operations, of_forward_pass = [], set[Hashable]()
    for entry in entries:
        if not entry.runs:
            continue
        operation = entry.operation(loss_scale)
        key = operation[:3], operation.shape
        if entry.context.is_recomputed and key in of_forward_pass:
            continue
        if not entry.context.is_backward:
            of_forward_pass.add(key)
        operations.append(operation)
    return operations


def _largest_of(arrays: Sequence[Magnitudes]) -> float:
    """The largest magnitude of some arrays; infinite if one holds NaN."""
    return max((x.largest for x in arrays), default=0.0)


def _is_made(measured: Measured) -> bool:
    """Whether an operation made its nonfinite results, and did not receive them."""
    if any(x.nan for x in measured.operands):
        return False
    is_nan = any(x.nan for x in measured.results)
    return is_nan or math.isfinite(_largest_of(measured.operands))


def _headroom(largest: float, dtype: np.dtype) -> float:
    """The bits between a magnitude and the largest number of a dtype."""
    with np.errstate(divide="ignore"):
        return math.log2(float(jnp.finfo(dtype).max)) - float(np.log2(largest))


def _cause(equation: core.JaxprEqn, measured: Measured) -> str:
    """Why an operation made a nonfinite number."""
    result = floating_result(equation)
    is_product = equation.primitive is low_product_p
    low = equation.params["product"].low if is_product else aval_of(result).dtype
    top, received = float(jnp.finfo(low).max), _largest_of(measured.operands)
    if not math.isfinite(received):
        return "An operand was infinite, and the result is NaN."
    if is_product and received > top:
        return f"An operand was too large for {low}: {received:.3g}, beyond {top:g}."
    is_narrow = is_below_float32(aval_of(result).dtype)
    exact = measured.in_float32[0] if measured.in_float32 else math.inf
    if is_narrow and exact < math.inf:
        in_float32 = f"In float32 its largest entry is {exact:.3g}"
        if exact <= top:
            return f"{in_float32}, so the compiler has changed the order of operations."
        return f"{in_float32}, beyond {top:g}, the largest number of {low}."
    if equation.primitive in _SOLVERS:
        return "The matrix was singular, or nearly so."
    if equation.primitive in ELEMENTWISE and _is_nonfinite_at_zero(equation, measured):
        return "An operand was zero."
    is_nan = any(x.nan for x in measured.results)
    if is_nan or equation.primitive in _WITH_POLES:
        return "It is not defined for its operands, which were finite."
    return f"An operand was too large: up to {received:.3g}."


def _is_nonfinite_at_zero(equation: core.JaxprEqn, measured: Measured) -> bool:
    """Whether it is nonfinite for the smallest entries of its operands, one a zero."""
    magnitudes = iter(x.smallest for x in measured.operands)
    smallest = [next(magnitudes) if is_floating_atom(x) else 1 for x in equation.invars]
    operands = [
        x.val if isinstance(x, core.Literal) else jnp.asarray(number, aval_of(x).dtype)
        for x, number in zip(equation.invars, smallest, strict=True)
    ]
    (result,) = bind(equation.primitive, operands, equation.params)
    return 0 in smallest and not bool(jnp.isfinite(result))


def first_nonfinite(operations: Iterable[Operation]) -> Operation | None:
    """Returns the operation that made the first NaN or infinity.

    Its operands were finite, and its result was not; or its operands were infinite, as
    a mask may be, and its result is NaN. It is one of the forward pass if that made
    any. `cause` says what its operands were. If `overflows_only_scaled`, a lower loss
    scale helps; else look at its line. Infinities that a program writes itself, as a
    mask, do not count.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      operations: What `trace_operations` returned, or a part of it.

    Returns:
      The operation, or None if none made a NaN or an infinity. An argument may still
      hold some.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w))
      >>> w, x = jnp.full((3, 2), 300.0), jnp.full((1, 3), 200.0)
      >>> operations = ols.diagnostics.trace_operations(loss_fn, w, x)
      >>> first = ols.diagnostics.first_nonfinite(operations)
      >>> print(first.primitive, first.where, f"{first.headroom_bits:.2f}")
      dot_general <doctest ...>:2 (loss_fn) -1.46
      >>> first.cause
      'In float32 its largest entry is 1.8e+05, beyond 65504, the largest number ...'
    """
    made = [x for x in operations if x.made_nonfinite]
    return min(made, key=lambda x: (x.is_backward, x.order), default=None)
