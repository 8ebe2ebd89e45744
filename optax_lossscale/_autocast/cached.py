"""Operations as jitted functions, so that JAX traces and differentiates each kind once.

A deep model repeats a few kinds of operations many times. JAX remembers the trace, the
derivative and the compiled program of a jitted function. With `inline=True` the program
around it holds the operation itself.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._autocast.float8 import Factors
from optax_lossscale._autocast.policy import LISTED
from optax_lossscale._autocast.product_rules import register_rules
from optax_lossscale._autocast.products import low_product
from optax_lossscale._autocast.values import cast, is_float32
from optax_lossscale._jaxprs import (
    INLINING_KEEPS_LINES,
    bind,
    context_of,
    user_line,
)

_Operation = Callable[..., Sequence[Any]]
register_rules()


def evaluate_cached(
    equation: Any, inputs: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    """Returns the outputs of an equation that holds no program of its own."""
    return _evaluate(_operation, equation, inputs, tuple(params.items()))


def evaluate_product(
    equation: Any,
    inputs: Sequence[Any],
    copies: Sequence[Any],
    params: dict[str, Any],
    low: Any,
    stand_in: tuple[bool, ...],
    float8: Factors,
) -> Sequence[Any]:
    """The same for a product whose operands, if in float32, are rounded."""
    settings = tuple(params.items()), low, len(inputs), stand_in, float8
    return _evaluate(_product, equation, [*inputs, *copies], *settings)


def evaluate_recomputed(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The same in float32; the backward pass recomputes it from the inputs."""
    items = tuple(equation.params.items())
    are_float32 = tuple(map(is_float32, equation.invars))
    return _evaluate(_recomputed_operation, equation, inputs, items, are_float32)


def _evaluate(
    make: Callable[..., _Operation],
    equation: Any,
    inputs: Sequence[Any],
    *settings: Any,
) -> Sequence[Any]:
    function = None
    # Operations that are on no list may hold programs, functions or effects.
    if equation.primitive.name in LISTED:
        with contextlib.suppress(TypeError):  # A parameter cannot be hashed.
            line = user_line(equation) if INLINING_KEEPS_LINES else None
            function = _jitted(line, make, equation.primitive, *settings)
    with context_of(equation):
        return (function or make(equation.primitive, *settings))(*inputs)


@functools.lru_cache(maxsize=4096)
def _jitted(
    line: str | None, make: Callable[..., _Operation], *settings: Any
) -> _Operation:
    """One function for each line, where JAX keeps the line with the trace."""
    return jax.jit(make(*settings), inline=True)


def _operation(primitive: Any, items: tuple[Any, ...]) -> _Operation:
    def operation(*arrays: Any) -> Sequence[Any]:
        return bind(primitive, arrays, dict(items))

    return operation


def _product(
    primitive: Any,
    items: tuple[Any, ...],
    low: Any,
    count: int,
    stand_in: tuple[bool, ...],
    float8: Factors,
) -> _Operation:
    def operation(*arrays: Any) -> Sequence[Any]:
        operands, copies = arrays[:count], arrays[count:]
        settings = low, dict(items), stand_in, float8
        return [low_product(primitive, operands, copies, *settings)]

    return operation


def _recomputed_operation(
    primitive: Any, items: tuple[Any, ...], are_float32: tuple[bool, ...]
) -> _Operation:
    def operation(*arrays: Any) -> Sequence[Any]:
        pairs = zip(arrays, are_float32, strict=True)
        wide = [cast(x, jnp.float32) if flag else x for x, flag in pairs]
        return bind(primitive, wide, dict(items))

    return jax.checkpoint(operation, prevent_cse=False)
