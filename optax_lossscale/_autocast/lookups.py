"""Lookups in low arrays, whose gradients are sums.

The gradient of a row that many indices name is a sum with as many terms. In float16 it
stops growing at 2048 times its largest term, and nothing overflows. So a lookup reads a
float32 copy, and its gradient is a float32 sum:

    z = gather(x, i)    becomes    z = low(gather(float32(x), i))

No bit of `z` changes, and XLA reads only the rows it needs, because it moves the casts
behind the lookup. A slice that starts at an index, and unique indices, are no
exception: an outer `vmap` makes lookups of many equal indices of them.

Sums into indices, such as those of `jax.ops.segment_sum` and of gradients that the
function itself computes, are float32 sums in the same way. So are the counts of equal
entries in the gradient of a maximum into indices.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import (
    dynamic_slice_p,
    gather_p,
)

from optax_lossscale._autocast.products import FLOAT32
from optax_lossscale._autocast.programs import Atom, aval_of, cast_equation

_LOOKUPS = (gather_p, dynamic_slice_p)
_INTO_INDICES = {
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-max": lax.max,
    "scatter-min": lax.min,
}


def wide_lookup(equation: core.JaxprEqn) -> list[core.JaxprEqn] | None:
    """A lookup, or a sum into indices, by way of float32; None for other equations."""
    operation = _INTO_INDICES.get(equation.primitive.name)
    if operation is None and equation.primitive not in _LOOKUPS:
        return None
    low = aval_of(equation.invars[0]).dtype
    if low not in (jnp.float16, jnp.bfloat16):
        return None
    inputs = [_in_float32(x) if aval_of(x).dtype == low else x for x in equation.invars]
    (result,) = equation.outvars
    wide = _in_float32(result)
    params = equation.params
    if operation is not None:
        params = {**params, "update_jaxpr": _of_two(operation)}
    pairs = zip(equation.invars, inputs, strict=True)
    return [
        *(cast_equation(equation, old, new) for old, new in pairs if new is not old),
        equation.replace(invars=inputs, outvars=[wide], params=params),
        cast_equation(equation, wide, result),
    ]


def _in_float32(atom: Atom) -> core.Var:
    variable: core.Var = core.Var(aval_of(atom).update(dtype=FLOAT32, weak_type=False))
    return variable


@functools.cache
def _of_two(operation: Callable[..., jax.Array]) -> core.Jaxpr:
    """The program that combines two float32 entries."""
    program: core.Jaxpr = jax.make_jaxpr(operation)(*[jnp.float32(0)] * 2).jaxpr
    return program
