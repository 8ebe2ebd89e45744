"""What is known of each operation of a program, once it ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._operations.statistics import NEVER, is_run
from optax_lossscale._operations.values import Tape


class Operation(NamedTuple):
    """One operation of a program: where it stands, and the numbers of its result.

    "In float32" means: in the same program with no number ever rounded to fewer than 32
    bits. Of an operation in a loop, each number is the worst over the iterations.

    Attributes:
      primitive: Name of the JAX primitive, such as `"dot_general"`.
      where: Line and function that asked for it, as `"model.py:12 (Net.__call__)"`: the
        innermost that is not in an installed library. For the backward rule of a
        `jax.custom_vjp`, as in JAX itself, it is the line that called the function.
      scope: Path of the module or `jax.named_scope`, such as `"Net/Dense_0"`; empty if
        there is none.
      is_backward: Whether only gradients depend on its result.
      dtype: The dtype of its result.
      shape: The shape of its result.
      largest: The largest magnitude; infinite if an entry is NaN or infinite.
      float32_largest: The same in float32.
      nonfinite: The number of entries that are NaN or infinite.
      made_nonfinite: The number of nonfinite entries that the operation made itself:
        out of finite operands; or, out of infinite ones such as a mask, its NaN, and
        its entries that are finite in float32.
      underflow: The share of entries that are zero, of those that are not in float32;
        from 0 to 1.
      added_underflow: By how much this share exceeds that of its operands.
      headroom_bits: By how many bits the float32 result can grow before it overflows in
        `dtype`. It is negative if it overflows.
      unscaled_headroom_bits: The same with a loss scale of 1.
      error: The norm of the difference from float32, divided by the norm in float32.
      added_error: By how much this error exceeds that of its operands.
      loop: The number of the outermost loop around it, counted from 0 over the program;
        None outside of loops.
      iteration: In which iteration of that loop it first made a nonfinite number,
        counted from 0, with those of loops inside; None if it made none.
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
    underflow: float
    added_underflow: float
    headroom_bits: float
    unscaled_headroom_bits: float
    error: float
    added_error: float
    loop: int | None
    iteration: int | None

    @property
    def overflows_only_scaled(self) -> bool:
        """Whether the loss scale alone makes it overflow."""
        return self.headroom_bits < 0 <= self.unscaled_headroom_bits


class Badness(NamedTuple):
    """How far gradients are from those in float32; compared in this order.

    Attributes:
      nonfinite: The share of their entries that are finite in float32 only.
      nonfinite_operations: If there are some, the number of operations whose results
        are finite in float32 only, which is lower if these begin later.
      error: The relative error of the other entries; NaN if an entry is not finite in
        float32 either.
    """

    nonfinite: float
    nonfinite_operations: int
    error: float


class Operations(list[Operation]):
    """The operations of a program in order of execution.

    Attributes:
      badness: A function that runs the program again, with some scopes and
        primitives in float32, and measures its gradients.
    """

    def __init__(
        self,
        operations: Iterable[Operation],
        badness: Callable[[Sequence[str]], Badness],
    ) -> None:
        super().__init__(operations)
        self.badness = badness


def operations_of(tape: Tape, loss_scale: float) -> list[Operation]:
    """The operations on a tape, apart from those that ran again or not at all."""
    starts = jax.device_get(tape.starts)
    operations, known = [], set()
    for record, statistics in zip(
        tape.records, jax.device_get(tape.statistics), strict=True
    ):
        if not is_run(statistics):
            continue
        largest, reference, underflow, error, added_underflow, added_error = map(
            float, statistics.magnitudes
        )
        nonfinite, made, minus_first = map(int, statistics.counts)
        headroom = _headroom(reference, record.dtype)
        scale_bits = math.log2(loss_scale) if record.is_scaled else 0.0
        start = 0 if record.loop is None else int(starts[record.loop])
        is_in_loop = record.loop is not None and minus_first > -NEVER
        operation = Operation(
            primitive=record.primitive,
            where=record.where,
            scope="/".join(record.scope),
            is_backward=record.is_backward,
            dtype=record.dtype,
            shape=record.shape,
            largest=largest,
            float32_largest=reference,
            nonfinite=nonfinite,
            made_nonfinite=made,
            underflow=underflow,
            added_underflow=added_underflow,
            headroom_bits=headroom,
            unscaled_headroom_bits=headroom + scale_bits,
            error=error,
            added_error=added_error,
            loop=record.loop,
            iteration=-minus_first - start if is_in_loop else None,
        )
        # `jax.checkpoint` computes parts of the forward pass again.
        # In a loop, they may round otherwise.
        numbers = (f"{x:.1g}" for x in (largest, reference, underflow, error))
        results = (record.where, record.primitive, record.scope, record.shape, *numbers)
        if not (record.is_recomputed and results in known):
            operations.append(operation)
        if not record.is_recomputed:
            known.add(results)
    return operations


def _headroom(largest: float, dtype: Any) -> float:
    """The bits between a magnitude and the largest number of a dtype."""
    if largest == 0:
        return math.inf
    if not math.isfinite(largest):
        return -math.inf
    return math.log2(float(jnp.finfo(dtype).max)) - math.log2(largest)


def first_nonfinite(operations: Iterable[Operation]) -> Operation | None:
    """Returns the operation that made the first NaN or infinity.

    Its operands were finite, and its result was not; or its operands were infinite, as
    a mask may be, and its result is NaN. It is one of the forward pass if that made
    any. If `overflows_only_scaled`, a lower loss scale helps; else look at its line. If
    `headroom_bits` is minus infinity, its result is not finite in float32 either.
    Infinities that a program writes itself, as a mask, do not count.

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
    """
    operations = list(operations)
    places: dict[Any, int] = {}
    for place, operation in enumerate(operations):
        places.setdefault(_block(operation, place), place)
    made = [
        (
            operation.is_backward,
            places[_block(operation, place)],
            operation.iteration or 0,
            place,
        )
        for place, operation in enumerate(operations)
        if operation.made_nonfinite
    ]
    return operations[min(made)[-1]] if made else None


def _block(operation: Operation, place: int) -> Any:
    """What an operation is executed with: its outermost loop, or nothing else."""
    return place if operation.loop is None else ("loop", operation.loop)
