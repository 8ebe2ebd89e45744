"""What surrounds an operation of a program, and which of its arrays count."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_lossscale._jaxprs import (
    aval_of,
    scope_of,
    scopes_of,
    user_line,
    where_written,
)

Atom: TypeAlias = core.Var | core.Literal


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


def is_floating_array(atom: Atom) -> bool:
    """Whether a variable or a literal is a floating array; a `jax.Ref` is none."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def is_narrow_array(atom: Atom) -> bool:
    """Whether it is an array of a floating dtype narrower than float32."""
    return is_floating_array(atom) and is_below_float32(aval_of(atom).dtype)


def is_below_float32(dtype: Any) -> bool:
    """Whether a dtype is floating and narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
