"""A value whose cotangent is multiplied on its way back."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from optax_lossscale._ground.tree import is_floating, map_floating
from optax_lossscale._ground.types import PyTree

Change: TypeAlias = Callable[[list[jax.Array], jax.Array], list[jax.Array]]


def with_cotangent(tree: PyTree, factor: jax.Array, change: Change) -> PyTree:
    """The same tree. In the backward pass the cotangents of its leaves are changed."""

    def bind(leaves: list[ArrayLike], factor: jax.Array) -> list[jax.Array]:
        settings = {"change": change, "is_tangent": False}
        return [same_value_p.bind(jnp.asarray(x), factor, **settings) for x in leaves]

    return map_floating(bind, tree, factor, is_mapped=_is_floating_array)


def _is_floating_array(leaf: object) -> bool:
    """Whether it can be differentiated: JAX traces even a number, if it is to be."""
    return isinstance(leaf, jax.Array) and is_floating(leaf)


# `jax.custom_derivatives.linear_call` is much the same, but has no rule for `vmap`, and
# changes the cotangents of a second backward pass too.
same_value_p = core.Primitive("same_value")
same_value_p.def_impl(lambda x, factor, **_: x)
same_value_p.def_abstract_eval(lambda x, factor, **_: x)
_lowering = mlir.lower_fun(lambda x, factor, **_: x, multiple_results=False)
mlir.register_lowering(same_value_p, _lowering)


def _jvp(
    primals: Any, tangents: Any, *, change: Change, is_tangent: bool
) -> tuple[jax.Array, Any]:
    """Of the value and its first derivative, only the latter is changed on its way."""
    (x, factor), (dx, _) = primals, tangents
    bind = functools.partial(same_value_p.bind, change=change, is_tangent=True)
    if is_tangent:
        return bind(x, factor), dx
    return x, dx if type(dx) is ad.Zero else bind(dx, factor)


def _transpose(
    cotangent: Any, x: Any, factor: jax.Array, *, change: Change, is_tangent: bool
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [cotangent, None]
    for _ in range(factor.ndim):  # In a batch, each entry has a factor.
        change = jax.vmap(change)
    (changed,) = change([cotangent], factor)
    return [lax.convert_element_type(changed, x.aval.dtype), None]


def _batch(args: Any, axes: Any, **settings: Any) -> tuple[jax.Array, int]:
    """The axes of the factor, which are those of batches, come first in the array."""
    (x, factor), (x_axis, factor_axis) = args, axes
    place = factor.ndim
    if factor_axis is not None:
        place, size = 0, factor.shape[factor_axis]
        factor = jnp.moveaxis(factor, factor_axis, 0)
        if x_axis is None:
            x, x_axis = jnp.broadcast_to(x, (size, *x.shape)), 0
    return same_value_p.bind(jnp.moveaxis(x, x_axis, place), factor, **settings), place


ad.primitive_jvps[same_value_p] = _jvp
ad.primitive_transposes[same_value_p] = _transpose
batching.primitive_batchers[same_value_p] = _batch
