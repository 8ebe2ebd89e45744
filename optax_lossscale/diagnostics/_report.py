"""Print the operations that lose most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TextIO

import jax.numpy as jnp

from optax_lossscale._autocast.report import aligned
from optax_lossscale.diagnostics._operation import Operation, first_nonfinite

_NUMBERS = ("largest", "nonfinite", "underflow", "error", "headroom")
_TITLES = ("operation", "pass", "dtype", *_NUMBERS, "where", "scope")
_FEW = 4  # Units in the last place that several roundings may add up to.


def print_operation_report(
    operations: Sequence[Operation], *, limit: int = 20, file: TextIO | None = None
) -> None:
    """Prints which operation made the first nonfinite number, and the worst operations.

    A line for each operation, worst first: those that made NaN or infinity out of
    finite operands, in order of execution, and then those that flushed the largest
    share of their entries to zero, or made the largest error. Operations that only pass
    on what they received, or make no more error than a few roundings do, are left out.

    The columns are attributes of `Operation`. To leave a product in float32, pass its
    line in `where` to `autocast` in `high`.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      operations: What `trace_operations` returned, or a part of it.
      limit: The largest number of lines.
      file: The text file to print to. None means standard output.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w))
      >>> w, x = jnp.full((3, 2), 300.0), jnp.full((1, 3), 200.0)
      >>> operations = ols.diagnostics.trace_operations(loss_fn, w, x)
      >>> ols.diagnostics.print_operation_report(operations)
      1... operations ran, 1 of them made NaN or infinity, and 1 received some.
      The first: dot_general at <doctest ...>:2 (loss_fn), forward pass: 2 of 2 ...
      <BLANKLINE>
      operation    pass     dtype    largest  nonfinite  underflow  error  headroom ...
      dot_general  forward  float16      inf          2       0.0%    inf      -1.5 ...
    """
    worst, lines = _worst(operations), _summary(operations)
    if worst:
        rows = [_TITLES, *map(_cells, worst[:limit])]
        lines += ["", *aligned(rows, right=_NUMBERS)]
    else:
        lines.append("No operation loses more than a few roundings do.")
    if len(worst) > limit:
        lines.append(f"... and {len(worst) - limit} more")
    print("\n".join(lines), file=file)


def _summary(operations: Sequence[Operation]) -> list[str]:
    """What happened, in sentences."""
    made = sum(operation.made_nonfinite > 0 for operation in operations)
    nonfinite = sum(operation.nonfinite > 0 for operation in operations)
    first = first_nonfinite(operations)
    ran = f"{len(operations)} operations ran"
    if not nonfinite:
        return [f"{ran}, and all their results are finite."]
    if first is None:
        return [
            f"{ran}. None made NaN or infinity; {nonfinite} received some from an "
            "argument, or from a constant such as a mask of -infinity. (If the loss is "
            "NaN, look at the arguments.)"
        ]
    received = nonfinite - made
    text = f"{ran}, {made} of them made NaN or infinity, and {received} received some."
    return [text, f"The first: {_describe(first)}"]


def _describe(operation: Operation) -> str:
    """One operation that made nonfinite numbers, and why it did, in sentences."""
    which = "backward" if operation.is_backward else "forward"
    scope = f" in {operation.scope}" if operation.scope else ""
    size = math.prod(operation.shape)
    entries = f"{operation.made_nonfinite} of {size} entries"
    if operation.iteration is not None:
        entries += f", first after {operation.iteration} runs"
    where = f"{operation.where}{scope}, {which} pass"
    what = f"{operation.primitive} at {where}: {entries}."
    if not operation.overflows_only_scaled:
        return f"{what} {operation.cause}"
    lower = math.ceil(-operation.headroom_bits)
    return (
        f"{what} {operation.cause} Only the loss scale makes it overflow: with a scale "
        f"lower by 2**{lower} it fits."
    )


def _worst(operations: Sequence[Operation]) -> list[Operation]:
    """The operations that make nonfinite numbers or lose some, worst first."""
    made = [x for x in operations if x.made_nonfinite]
    others = [
        x
        for x in operations
        if not x.nonfinite and _loss_of(x) > _FEW * float(jnp.finfo(x.dtype).eps)
    ]
    return made + sorted(others, key=_loss_of, reverse=True)


def _loss_of(operation: Operation) -> float:
    """The larger of the share that an operation flushes and the error that it makes."""
    return max(operation.underflow, operation.error)


def _cells(operation: Operation) -> tuple[str, ...]:
    return (
        operation.primitive,
        "backward" if operation.is_backward else "forward",
        operation.dtype.name,
        f"{operation.largest:.3g}",
        str(operation.nonfinite),
        f"{operation.underflow:.1%}",
        f"{operation.error:.1e}",
        f"{operation.headroom_bits:.1f}",
        operation.where,
        operation.scope,
    )
