"""List the products of a function: in which dtype each computes, and why."""

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from optax_lossscale._autocast.context import recorded_calls, traced_for
from optax_lossscale._autocast.levels import Settings, make_settings
from optax_lossscale._autocast.modules import (
    as_partial,
    linen_scopes_of,
    trace_call,
)
from optax_lossscale._autocast.programs import aval_of, user_line, where_written
from optax_lossscale._autocast.rewrite import Found, products_of
from optax_lossscale._ground.types import PyTree


class _Row(NamedTuple):
    """What the report says of a product; equal ones share a row."""

    product: str
    dtype: str
    shapes: str
    scope: str
    why: str
    where: str


def autocast_report(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> None:
    """Prints in which dtype each product of a function computes, and why.

    Only products are listed, because `autocast` changes nothing else. The function is
    traced but not run. Products that agree in every column share a row, which says how
    many there are; the body of a loop and each branch count once. Products of gradients
    have the dtype of the product that they belong to.

    * `shapes` are those of the two factors.
    * `scope` names the Linen modules and `jax.named_scope` blocks around it, as they
      can stand in `high`.
    * `why` says for what reason a product stays as it is written.
    * `where` is the line of your code that called for it.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/autocast.html

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
      times  product      dtype    shapes     scope  why  where
          1  dot_general  float16  1x3 * 3x2              <doctest ...
      Everything else runs as it is written.
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.")
    settings = make_settings("float16", "O1", (), recompute=True)
    tree = as_partial(fun), args, kwargs
    scopes = linen_scopes_of(tree)
    with recorded_calls() as calls, traced_for(settings.dtype):
        traced = trace_call(tree, scopes=scopes)  # It is never finished.
        # A function that calls no `autocast` is shown as `autocast` would run it.
        looked_at = list(calls) or [(traced.program.jaxpr, settings)]
    rows = (
        _row(product, own_settings)
        for program, own_settings in looked_at
        for product in (products_of(program, own_settings) if program else ())
    )
    _print_table(collections.Counter(rows))


def _row(found: Found, settings: Settings) -> _Row:
    """The row of a product."""
    equation = found.equation
    factors = [aval_of(atom) for atom in equation.invars[:2]]
    dtypes = [factor.dtype for factor in factors] if found.reason else [settings.dtype]
    shapes = ["x".join(map(str, factor.shape)) for factor in factors]
    # JAX keeps few frames, so perhaps only a call around the product has the line.
    around = [equation, *reversed(found.calls)]
    lines = itertools.chain(map(user_line, around), map(where_written, around))
    return _Row(
        product=equation.primitive.name,
        dtype=" * ".join(dict.fromkeys(map(str, dtypes))),
        shapes=" * ".join(shapes),
        scope="/".join(found.scope),
        why=found.reason or "",
        where=next(filter(None, lines), ""),
    )


def _print_table(counts: collections.Counter[_Row]) -> None:
    """Prints a line for all products that are alike."""
    rows = [(str(count), *row) for row, count in counts.items()]
    print("\n".join(aligned([("times", *_Row._fields), *rows], right=["times"])))
    print("Everything else runs as it is written.")


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[str]) -> list[str]:
    """The lines of a table, from its titles on; columns of numbers are to the right."""
    columns = []
    for column in zip(*rows, strict=True):
        align = str.rjust if column[0] in right else str.ljust
        width = max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
