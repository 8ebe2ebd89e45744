"""The numbers of one operation: those of its results, beside the same in float32."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._tree import real_parts, widen

NEVER = 2**31 - 1  # Later than any iteration of a loop.


class Health(NamedTuple):
    """What an operation hands on to the operations that read its results.

    Attributes:
      nonfinite: `i32[]`. The number of entries that are NaN or infinite.
      diverged: `i32[]`. The number of those that are finite in float32.
      nan: `i32[]`. The number of those that are NaN.
      underflow: `f32[]`. The share of entries that are zero, but not in float32.
      error: `f32[]`. The relative difference from float32.
    """

    nonfinite: jax.Array
    diverged: jax.Array
    nan: jax.Array
    underflow: jax.Array
    error: jax.Array


class Statistics(NamedTuple):
    """The numbers of one operation. Of several runs of it, the largest ones count.

    Attributes:
      magnitudes: `f32[6]`. The largest magnitude, the same in float32, the underflow,
        the error, and by how much these two exceed those of the operands.
      counts: `i32[3]`. The number of nonfinite entries; the number of those that the
        operation made itself; minus the iteration in which it first made one.
    """

    magnitudes: Any
    counts: Any


def is_run(statistics: Statistics) -> bool:
    """Whether the operation ran at all."""
    return bool(statistics.magnitudes[0] >= 0)


def never_run(like: Statistics) -> Statistics:
    """The statistics of an operation in a branch that is not taken."""
    return Statistics(
        jnp.full(like.magnitudes.shape, -jnp.inf, like.magnitudes.dtype),
        jnp.full(like.counts.shape, -NEVER, like.counts.dtype),
    )


def largest_of_runs(stacked: Statistics) -> Statistics:
    """The statistics of an operation from those of all its runs, stacked."""
    magnitudes, counts = stacked
    return Statistics(
        jnp.max(magnitudes, axis=0, initial=-jnp.inf),
        jnp.max(counts, axis=0, initial=-NEVER),
    )


class _Comparison(NamedTuple):
    """Sums and maxima over the entries of an array and of its reference.

    Each is a scalar: the largest magnitudes of both, infinite if an entry is not
    finite; five numbers of entries; the squared norms, in units of the largest entry,
    of the difference and of the reference.
    """

    largest: jax.Array
    reference: jax.Array
    nonfinite: jax.Array
    diverged: jax.Array
    nan: jax.Array
    nonzero: jax.Array
    flushed: jax.Array
    difference: jax.Array
    norm: jax.Array


def measure(
    arrays: Sequence[jax.Array],
    references: Sequence[jax.Array],
    operands: Sequence[Health],
    clock: Any,
) -> tuple[Statistics, Health]:
    """Measures the floating results of an operation.

    Args:
      arrays: The results, of any shape.
      references: The same results in float32; the same objects if never rounded.
      operands: The health of the operands, apart from those that are sound.
      clock: `i32[]`. How many iterations of loops have begun before.
    """
    comparisons = [
        _compare(widen(x), widen(r))
        for array, reference in zip(arrays, references, strict=True)
        for x, r in zip(real_parts(array), real_parts(reference), strict=True)
    ]
    result: tuple[Statistics, Health] = _conclude(comparisons, operands, clock)
    return result


# Two functions, because XLA compiles one for each shape, and one for each number of
# operands. One function for both would be compiled for each pair of these.
@jax.jit
def _compare(x: jax.Array, r: jax.Array) -> _Comparison:
    """Compares the entries of two real arrays, all in one reduction."""
    x, r = x.reshape(-1), r.reshape(-1)
    is_bad, is_bad_reference = ~jnp.isfinite(x), ~jnp.isfinite(r)
    is_finite = ~is_bad & ~is_bad_reference
    # In units of the largest entry, so that no square overflows.
    top = jnp.max(jnp.where(is_finite, jnp.abs(r), 0), initial=0)
    unit = jnp.where(top > 0, top, 1)
    difference = jnp.where(is_finite, (x - r) / unit, 0)
    difference = jnp.where(is_bad ^ is_bad_reference, jnp.inf, difference)
    is_nonzero = r != 0
    columns = _Comparison(
        largest=jnp.where(is_bad, jnp.inf, jnp.abs(x)),
        reference=jnp.where(is_bad_reference, jnp.inf, jnp.abs(r)),
        nonfinite=is_bad.astype(jnp.int32),
        diverged=(is_bad & ~is_bad_reference).astype(jnp.int32),
        nan=jnp.isnan(x).astype(jnp.int32),
        nonzero=is_nonzero.astype(jnp.int32),
        flushed=(is_nonzero & (x == 0)).astype(jnp.int32),
        difference=difference**2,
        norm=jnp.where(is_finite, r / unit, 0) ** 2,
    )
    zeros = _Comparison(*(jnp.zeros((), column.dtype) for column in columns))
    result: _Comparison = lax.reduce(columns, zeros, _add, (0,))
    return result


def _add(one: _Comparison, other: _Comparison) -> _Comparison:
    """The sums and maxima over the entries of two parts of an array."""
    return _Comparison(
        jnp.maximum(one.largest, other.largest),
        jnp.maximum(one.reference, other.reference),
        *(x + y for x, y in zip(one[2:], other[2:], strict=True)),
    )


@jax.jit
def _conclude(
    comparisons: Sequence[_Comparison], operands: Sequence[Health], clock: Any
) -> tuple[Statistics, Health]:
    """The statistics of an operation from the comparisons of all its results."""
    all_parts = _Comparison(*map(_stack, zip(*comparisons, strict=True)))
    underflow = all_parts.flushed / jnp.maximum(all_parts.nonzero, 1)
    error = jnp.sqrt(all_parts.difference) / jnp.sqrt(all_parts.norm)
    # Nothing but zeros in float32: then any other result is infinitely wrong.
    of_zeros = jnp.where(all_parts.difference > 0, jnp.inf, 0.0)
    error = jnp.where(all_parts.norm > 0, error, of_zeros)
    health = Health(
        nonfinite=jnp.sum(all_parts.nonfinite, dtype=jnp.int32),
        diverged=jnp.sum(all_parts.diverged, dtype=jnp.int32),
        nan=jnp.sum(all_parts.nan, dtype=jnp.int32),
        underflow=jnp.max(underflow).astype(jnp.float32),
        error=jnp.max(error).astype(jnp.float32),
    )
    before = worst_of([jax.tree.map(jnp.zeros_like, health), *operands])
    # Operands may be infinite on purpose, as a mask is: then what counts is an overflow
    # that float32 does not have, or a NaN.
    made_nan = jnp.where(before.nan > 0, 0, health.nan)
    made = jnp.maximum(made_nan, health.diverged)
    made = jnp.where(before.diverged > 0, 0, made)
    made = jnp.where(before.nonfinite > 0, made, health.nonfinite)
    added_underflow = _excess(health.underflow, before.underflow)
    added_error = _excess(health.error, before.error)
    is_sound = before.diverged == 0  # Else all that follows is not this operation's.
    magnitudes = [
        jnp.max(all_parts.largest),
        jnp.max(all_parts.reference),
        health.underflow,
        health.error,
        jnp.where(is_sound, added_underflow, 0.0),
        jnp.where(is_sound, added_error, 0.0),
    ]
    minus_first = jnp.where(made > 0, -clock, -NEVER)
    counts = [health.nonfinite, made, minus_first.astype(jnp.int32)]
    return Statistics(_stack(magnitudes), jnp.stack(counts)), health


def _stack(numbers: Sequence[jax.Array]) -> jax.Array:
    """An array of numbers, of the widest of their dtypes."""
    return jnp.stack(numbers, dtype=max((x.dtype for x in numbers), key=_size))


def _size(dtype: Any) -> int:
    return int(dtype.itemsize)


def glance(array: jax.Array, before: jax.Array) -> Statistics:
    """The largest magnitude of a result, and the share that a cast flushed to zero.

    `before` is the operand of the cast, or the result itself if it is none.
    """
    magnitude = jnp.max(jnp.abs(array), initial=0).astype(jnp.float32)
    largest = jnp.where(jnp.isfinite(magnitude), magnitude, jnp.inf)
    flushed = jnp.zeros((), jnp.float32)
    if before is not array:
        is_nonzero = before != 0
        count = jnp.sum(is_nonzero & (array == 0), dtype=jnp.float32)
        flushed = count / jnp.maximum(jnp.sum(is_nonzero, dtype=jnp.float32), 1)
    return Statistics(jnp.stack([largest, flushed]), jnp.zeros((1,), jnp.int32))


@jax.jit
def passed_on(
    statistics: Statistics, health: Health, times: jax.Array
) -> tuple[Statistics, Health]:
    """The same for an operation that moves the entries of an array, or repeats each.

    Reference: `measure` of its result, with `health` among the operands.
    """
    magnitudes = statistics.magnitudes.at[4:].set(0.0)
    health = health._replace(
        nonfinite=health.nonfinite * times,
        diverged=health.diverged * times,
        nan=health.nan * times,
    )
    counts = jnp.stack([health.nonfinite, jnp.int32(0), jnp.int32(-NEVER)])
    return Statistics(magnitudes, counts), health


@jax.jit
def worst_of(operands: Sequence[Health]) -> Health:
    """The largest of each of some numbers, of at least one health."""
    return Health(*(jnp.max(jnp.stack(x)) for x in zip(*operands, strict=True)))


def _excess(new: jax.Array, old: jax.Array) -> jax.Array:
    """By how much a number exceeds another one; infinities are equal."""
    return jnp.where(new > old, new - old, 0.0)
