"""Multiply by the loss scale, and divide it out again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._ground.tree import (
    check_arrays,
    flags_of,
    map_floating,
    where_true,
    widen,
)
from optax_lossscale._ground.types import Mask, PyTree
from optax_lossscale._scaling.mistakes import (
    warn_if_constant,
    warn_of_links_before,
    warn_of_outer_wrappers,
)
from optax_lossscale._scaling.state import get_loss_scale


def scale(tree: PyTree, state: PyTree) -> PyTree:
    """Multiplies every floating leaf by the loss scale.

    Call it on the loss before you differentiate. With loss scale `s`, for every
    floating leaf `x`,

        scale(x) = widen(x) * s

    where `widen` casts dtypes narrower than float32 to float32, because the product
    would overflow in float16: a loss of 3 times a scale of `2**15` is infinity there.

    Args:
      tree: Usually a scalar loss. Floating leaves may have any shape; all other
        leaves are returned unchanged.
      state: A `LossScaleState`, or any pytree that holds exactly one.

    Returns:
      The same tree with floating leaves in float32 or wider.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several, or its scale has an
        entry for each device.
      TypeError: If `tree` is a function.

    Warns:
      UserWarning: If `optax.MultiSteps` or `optax.apply_if_finite` is outside
        `loss_scaled`, where both break it.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> state = ols.static_loss_scale(2.0**15).init()
      >>> ols.scale(jnp.float16(3.0), state)
      Array(98304., dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740).
    """
    if callable(tree) and jax.tree_util.all_leaves([tree]):
        raise TypeError(
            f"`tree` must hold arrays, got the function {tree!r}. (Did you mean "
            "`scaled_value_and_grad(loss_fn, state)`?)"
        )
    warn_of_outer_wrappers(state)
    warn_of_links_before(state)
    warn_if_constant(state)
    return multiply(tree, state)


def multiply(tree: PyTree, state: PyTree) -> PyTree:
    """`scale`, without the checks for what users may have mistaken."""
    loss_scale = one_loss_scale(state)
    check_arrays(jax.tree.leaves(tree))
    return map_floating(scale_leaves, tree, loss_scale)


def one_loss_scale(state: PyTree) -> jax.Array:
    """The loss scale of a state that is not that of several members."""
    loss_scale = get_loss_scale(state)
    if loss_scale.ndim:
        raise ValueError(
            f"the loss scale must be a scalar, got shape {loss_scale.shape}, one for "
            "each device or ensemble member. (Call this inside `pmap` or `vmap`.)"
        )
    return loss_scale


def unscale(tree: PyTree, state: PyTree, *, mask: Mask = None) -> PyTree:
    """Divides the loss scale out of every floating leaf.

    Use it to log or clip the true gradients. If you give these to `update`, pass
    `grads_unscaled=True` too. With loss scale `s`, for every floating leaf `x`,

        unscale(x) = widen(x) * (1 / s)

    where `widen` casts dtypes narrower than float32 to float32. The cast comes first,
    because float16 would flush the small quotients to zero. The reciprocal is exact if
    the scale is a power of two; with any other scale the result may be rounded once
    more than a division would be. On a GPU, gradients that the same program cast to
    float16 may be read as they were before. (`loss_scaled` checks the rounded ones.)

    Args:
      tree: Gradients of a scaled loss. Floating leaves may have any shape; all other
        leaves are returned unchanged.
      state: A `LossScaleState`, or any pytree that holds exactly one.
      mask: Marks the scaled gradients, in the form of Optax's masks: a pytree of bools
        that is a prefix of `tree`, or a function that makes one from `tree`. Leaves
        marked False are returned untouched. None means True everywhere.

    Returns:
      The same tree with the unscaled leaves in float32 or wider.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> state = ols.static_loss_scale(2.0**15).init()
      >>> ols.unscale(jnp.float16(98304.0 / 2), state)
      Array(1.5, dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740).
    """
    return divide_out(tree, get_loss_scale(state), flags_of(mask, tree))


def divide_out(tree: PyTree, loss_scale: jax.Array, is_scaled: PyTree) -> PyTree:
    """`unscale` of the parts that are scaled, without the check."""
    check_arrays(jax.tree.leaves(where_true(is_scaled, tree)))

    def divide(flag: bool, part: PyTree) -> PyTree:
        return map_floating(unscale_leaves, part, loss_scale) if flag else part

    return jax.tree.map(divide, is_scaled, tree)


@jax.jit  # Here and below, so that outside `jit` it is one dispatch.
def scale_leaves(leaves: list[ArrayLike], loss_scale: jax.Array) -> list[jax.Array]:
    return _combine(lax.mul, leaves, loss_scale.astype)


@jax.jit
def unscale_leaves(leaves: list[ArrayLike], loss_scale: jax.Array) -> list[jax.Array]:
    """Unscales a list of floating leaves."""
    # One division for each dtype; XLA on CPU is much slower with one for each leaf.
    return _combine(lax.mul, leaves, cache(lambda dtype: 1 / loss_scale.astype(dtype)))


@jax.jit
def divide_leaves(leaves: list[ArrayLike], loss_scale: jax.Array) -> list[jax.Array]:
    """Unscales as other systems do, which differs in the last bit for some scales."""
    return _combine(lax.div, leaves, loss_scale.astype)


def _combine(
    operation: Callable[..., jax.Array],
    leaves: list[ArrayLike],
    factor_in: Callable[[jnp.dtype], jax.Array],
) -> list[jax.Array]:
    """Widens each leaf, and multiplies or divides it by the factor for its dtype."""

    def combine(leaf: ArrayLike) -> jax.Array:
        array = widen(leaf)
        factor = factor_in(jnp.finfo(array.dtype).dtype)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            # A complex product would turn an infinity in one part into NaN in both.
            parts = lax.real(array), lax.imag(array)
            return lax.complex(*(operation(part, factor) for part in parts))
        return operation(array, factor)

    return [combine(leaf) for leaf in leaves]
