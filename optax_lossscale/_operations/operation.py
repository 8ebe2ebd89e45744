"""What is known of each operation of a program, once it ran."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_lossscale._autocast.products import low_product_p
from optax_lossscale._jaxprs import bind
from optax_lossscale._operations.instrument import Measured, Record, is_narrow


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
      scope: Path of the module or `jax.named_scope`, such as `"Net/Dense_0"`; empty if
        there is none.
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
      loop: The number of the outermost loop around it, counted from 0 over the program;
        None outside of loops.
      iteration: How often it had run before it first made a nonfinite number; None if
        it made none, or is not in a loop.
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
    loop: int | None
    iteration: int | None

    @property
    def overflows_only_scaled(self) -> bool:
        """Whether the loss scale alone makes it overflow."""
        return self.headroom_bits < 0 <= self.unscaled_headroom_bits


class _Worst(NamedTuple):
    """The worst numbers of an operation over its runs."""

    runs: int = 0
    largest: float = 0.0
    float32_largest: float = 0.0
    nonfinite: int = 0
    underflow: float = 0.0
    error: float = 0.0
    made: int = 0
    first: int | None = None
    cause: Measured | None = None

    def with_run(self, measured: Measured) -> _Worst:
        """The worst numbers after one more run."""
        largest = _largest_of(measured.results)
        reference, underflow, error = measured.compared or (largest, 0.0, 0.0)
        reference = math.inf if math.isnan(reference) else reference
        if math.isinf(reference):  # Then nothing was lost by rounding.
            underflow = error = 0.0
        nonfinite = int(sum(row[2] for row in measured.results))
        made = nonfinite if _is_made(measured) else 0
        is_first = made > 0 and self.first is None
        return _Worst(
            runs=self.runs + 1,
            largest=max(self.largest, largest),
            float32_largest=max(self.float32_largest, reference),
            nonfinite=max(self.nonfinite, nonfinite),
            underflow=max(self.underflow, underflow),
            error=max(self.error, math.inf if math.isnan(error) else error),
            made=max(self.made, made),
            first=self.runs if is_first else self.first,
            cause=measured if is_first else self.cause,
        )


def _largest_of(rows: Sequence[Sequence[float]]) -> float:
    """The largest magnitude of some arrays; infinite if one holds NaN."""
    return max((math.inf if math.isnan(x) else x for x, *_ in rows), default=0.0)


def _is_made(measured: Measured) -> bool:
    """Whether an operation made its nonfinite results, and did not receive them."""
    is_nan = any(math.isnan(row[0]) for row in measured.results)
    if any(math.isnan(row[0]) for row in measured.operands):
        return False
    return is_nan or math.isfinite(_largest_of(measured.operands))


class Collector:
    """The worst numbers of each operation of a program that runs."""

    def __init__(self) -> None:
        self._worst: dict[int, _Worst] = collections.defaultdict(_Worst)
        self._lock = threading.Lock()  # Several devices call at once.

    def receive(self, number: int, measured: Measured) -> None:
        """Takes the numbers of one run of an operation."""
        with self._lock:
            self._worst[number] = self._worst[number].with_run(measured)

    def operations(
        self, records: Sequence[Record], loss_scale: float
    ) -> list[Operation]:
        """All operations that ran, but those that `jax.checkpoint` repeated."""
        operations, counts = [], collections.Counter[Any]()
        for number, record in enumerate(records):
            if number in self._worst:
                operation = _operation(record, self._worst[number], loss_scale)
                key = operation[:3], operation.shape
                if record.context.is_recomputed and counts[key] > 0:
                    counts[key] -= 1
                    continue
                counts[key] += not record.context.is_backward
                operations.append(operation)
        return operations


def _operation(record: Record, worst: _Worst, loss_scale: float) -> Operation:
    equation, context, aval = record.equation, record.context, record.results[0].aval
    primitive, dtype = equation.primitive, aval.dtype
    if primitive is low_product_p:
        product = equation.params["product"]
        primitive, dtype = product.primitive, np.dtype(product.low)
    headroom = _headroom(worst.float32_largest, aval.dtype)
    scale_bits = math.log2(loss_scale) if context.is_backward else 0.0
    is_in_loop = context.loop is not None
    return Operation(
        primitive=primitive.name,
        where=context.where,
        scope="/".join(context.scope),
        is_backward=context.is_backward,
        dtype=dtype,
        shape=aval.shape,
        largest=worst.largest,
        float32_largest=worst.float32_largest,
        nonfinite=worst.nonfinite,
        made_nonfinite=worst.made,
        cause="" if worst.cause is None else _cause(equation, worst.cause),
        underflow=worst.underflow,
        headroom_bits=headroom,
        unscaled_headroom_bits=headroom + scale_bits,
        error=worst.error,
        loop=context.loop,
        iteration=worst.first if is_in_loop else None,
    )


def _headroom(largest: float, dtype: Any) -> float:
    """The bits between a magnitude and the largest number of a dtype."""
    if largest == 0:
        return math.inf
    if not math.isfinite(largest):
        return -math.inf
    return math.log2(float(jnp.finfo(dtype).max)) - math.log2(largest)


def _cause(equation: core.JaxprEqn, measured: Measured) -> str:
    """Why an operation made a nonfinite number."""
    result: Any = equation.outvars[0]
    dtype = result.aval.dtype
    is_product = equation.primitive is low_product_p
    low = equation.params["product"].low if is_product else dtype
    top, received = float(jnp.finfo(low).max), _largest_of(measured.operands)
    if not math.isfinite(received):
        return "An operand was infinite, and the result is NaN."
    if is_product and received > top:
        return f"An operand was too large for {low}: {received:.3g}, beyond {top:g}."
    if measured.compared is not None and is_narrow(dtype):
        in_float32 = f"In float32 its largest entry is {measured.compared[0]:.3g}"
        if measured.compared[0] <= top:
            return f"{in_float32}, so the compiler has changed the order of operations."
        if measured.compared[0] < math.inf:
            return f"{in_float32}, beyond {top:g}, the largest number of {low}."
    if _is_nonfinite_at_zero(equation, measured):
        return "An operand was zero."
    if any(math.isnan(row[0]) for row in measured.results):
        return "It is not defined for its operands, which were finite."
    return f"An operand was too large: up to {received:.3g}."


def _is_nonfinite_at_zero(equation: core.JaxprEqn, measured: Measured) -> bool:
    """Whether an operation on numbers is not finite where its operands have zeros."""
    rows = iter(measured.operands)
    numbers = []
    atoms: Sequence[Any] = equation.invars
    for atom in atoms:
        if isinstance(atom, core.Literal):
            numbers.append(jnp.asarray(atom.val))
        else:
            has_zero = next(rows, [1.0, 1.0])[1] == 0
            numbers.append(jnp.asarray(0 if has_zero else 1, atom.aval.dtype))
    # Only elementwise operations take numbers in place of arrays.
    with contextlib.suppress(Exception):
        (result,) = bind(equation.primitive, numbers, equation.params)
        return not bool(jnp.isfinite(result))
    return False


def first_nonfinite(operations: Iterable[Operation]) -> Operation | None:
    """Returns the operation that made the first NaN or infinity.

    Its operands were finite, and its result was not; or its operands were infinite, as
    a mask may be, and its result is NaN. It is one of the forward pass if that made
    any. `cause` says what its operands were. If `overflows_only_scaled`, a lower loss
    scale helps; else look at its line. Infinities that a program writes itself, as a
    mask, do not count.

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
    operations = list(operations)
    starts: dict[int, int] = {}  # Of each loop, the place of its first operation.
    for place, operation in enumerate(operations):
        if operation.loop is not None:
            starts.setdefault(operation.loop, place)
    made = [
        (x.is_backward, starts.get(_loop_of(x), place), x.iteration or 0, place)
        for place, x in enumerate(operations)
        if x.made_nonfinite
    ]
    return operations[min(made)[-1]] if made else None


def _loop_of(operation: Operation) -> int:
    return -1 if operation.loop is None else operation.loop
