"""Report in which dtype each operation of a function computes under autocast."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from optax_lossscale._autocast.arguments import partition
from optax_lossscale._autocast.modules import as_partial, call_partial
from optax_lossscale._autocast.notes import Note, collect_notes
from optax_lossscale._autocast.transform import autocast
from optax_lossscale._jaxprs import trace_anew
from optax_lossscale._nnx import modules_of
from optax_lossscale._types import PyTree

_TITLES = ("times", "operation", "computed", "result", "why", "where")


def autocast_report(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> None:
    """Prints the dtype in which each operation computes under `autocast`, and why.

    The function is traced but not run. Operations that agree in every column share a
    line, which says how many there are. The body of a loop and each branch of a
    `lax.cond` count once; a function that is called three times counts three times,
    unless the calls reach `autocast` through one `jax.jit`, which traces it once.

    The column `computed` gives the dtype in which an operation computes, and `result`
    the dtype of its first result: a bias is added in float32, for example, and the sum
    is rounded to float16. `where` is the line of your code, or of your framework's
    layer, that called for the operation.

    Args:
      fun: A function that `autocast` returned, perhaps jitted, or that calls one. For
        any other function, the report shows what `autocast(fun)` would do. For another
        level or dtype, pass `autocast(fun, level="O2")`.
      *args: Its arguments; arrays, or `jax.ShapeDtypeStruct`.
      **kwargs: Its keyword arguments; none are settings of `autocast`.

    Raises:
      TypeError: If `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     return jnp.sum((x @ w) ** 2)
      >>> ols.autocast_report(loss_fn, jnp.ones((3, 2)), jnp.ones((1, 3)))
      times  operation    computed  result   why           where
          1  dot_general  float16   float16  low list      <doctest ...
          1  integer_pow  float32   float32  float32 list  <doctest ...
          1  reduce_sum   float32   float32  float32 list  <doctest ...
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.")
    function = as_partial(fun)
    if modules_of(function):  # As arguments they may change, say their statistics.
        fun, args = call_partial, (function, *args)
    arrays, rest = partition((args, kwargs))

    def call(fun: Callable[..., PyTree]) -> Callable[..., list[Any]]:
        def call_with(*arrays: jax.Array) -> list[Any]:
            args, kwargs = rest.merge(arrays)
            return partition(fun(*args, **kwargs))[0]

        return call_with

    with collect_notes() as notes, trace_anew():
        try:
            jax.eval_shape(call(fun), *arrays)
        except Exception:  # What `low_precision` marks may refuse float32.
            if notes:
                raise
        if not notes:
            jax.eval_shape(call(autocast(fun)), *arrays)
    _print_table([note for _, note in notes.values()])


def _print_table(notes: Sequence[Note]) -> None:
    """Prints a line for all notes that are equal."""
    counts = collections.Counter(notes)
    rows = [_TITLES, *((str(count), *note) for note, count in counts.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for times, *rest in rows:
        cells = [cell.ljust(w) for cell, w in zip(rest, widths[1:], strict=True)]
        print("  ".join([times.rjust(widths[0]), *cells]).rstrip())
