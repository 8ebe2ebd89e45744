"""Multiply by the loss scale, and divide it out again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._ground.tree import flags_of, map_floating, real_parts, widen
from optax_lossscale._ground.types import Mask, PyTree
from optax_lossscale._scaling.mistakes import warn_if_constant, warn_of_order
from optax_lossscale._scaling.state import get_loss_scale


def scale(tree: PyTree, state: PyTree) -> PyTree:
    """Multiplies every floating leaf by the loss scale.

    Call it on the loss before you differentiate. With loss scale `s`, for every
    floating leaf `x`,

        scale(x) = widen(x) * s

    where `widen` casts dtypes narrower than float32 to float32, because the product
    would overflow in float16: a loss of 3 times a scale of `2**15` is infinity there.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/without_optax.html

    Args:
      tree: Usually a scalar loss. Floating leaves may have any shape; all other
        leaves are returned unchanged.
      state: A `LossScaleState`, or any pytree that holds exactly one.

    Returns:
      The same tree with floating leaves in float32 or wider.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several.
      TypeError: If `tree` is a function, or holds arrays of other libraries.

    Warns:
      UserWarning: If `optax.MultiSteps` or `optax.apply_if_finite` is around
        `loss_scaled`, or a clip before it in an `optax.chain`; or if the state is a
        constant of the jitted function.

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
            "`tree` must hold arrays, got a function. (Did you mean "
            "`scaled_value_and_grad(loss_fn, state)`?)"
        )
    warn_of_order(state)
    warn_if_constant(state)
    return multiply(tree, state)


def multiply(tree: PyTree, state: PyTree) -> PyTree:
    """`scale`, without the checks for what users may have mistaken."""
    return map_floating(scale_leaves, tree, get_loss_scale(state))


def unscale(tree: PyTree, state: PyTree, *, mask: Mask = None) -> PyTree:
    """Divides the loss scale out of every floating leaf.

    Use it to log or clip the true gradients. If you give these to `update`, pass
    `grads_unscaled=True` too. With loss scale `s`, for every floating leaf `x`,

        unscale(x) = widen(x) * (1 / s)

    where `widen` casts dtypes narrower than float32 to float32. The cast comes first,
    because float16 would flush the small quotients to zero. The reciprocal is exact if
    the scale is a power of two; with any other scale the result may be rounded once
    more than a division would be.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/without_optax.html

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
    return unscale_marked(tree, get_loss_scale(state), flags_of(mask, tree))


def unscale_marked(tree: PyTree, loss_scale: jax.Array, scaled_mask: PyTree) -> PyTree:
    """`unscale` of the parts that a pytree of bools marks."""

    def unscale_part(is_scaled: bool, part: PyTree) -> PyTree:
        return map_floating(unscale_leaves, part, loss_scale) if is_scaled else part

    return jax.tree.map(unscale_part, scaled_mask, tree)


@jax.jit  # Here and below, so that outside `jit` it is one dispatch.
def scale_leaves(leaves: list[ArrayLike], loss_scale: jax.Array) -> list[jax.Array]:
    """Scales a list of floating leaves."""
    return [_product(widen(leaf), loss_scale.astype) for leaf in leaves]


@jax.jit
def unscale_leaves(leaves: list[ArrayLike], loss_scale: jax.Array) -> list[jax.Array]:
    """Unscales a list of floating leaves."""
    # One division for each dtype; XLA on CPU is much slower with one for each leaf.
    reciprocal_in = cache(lambda dtype: 1 / loss_scale.astype(dtype))
    return [_product(widen(leaf), reciprocal_in) for leaf in leaves]


def _product(array: jax.Array, factor_in: Callable[[Any], jax.Array]) -> jax.Array:
    """An array times a factor, which is computed in the dtype of its real parts."""
    # A complex product would turn an infinity in one part into NaN in both.
    parts = [lax.mul(part, factor_in(part.dtype)) for part in real_parts(array)]
    return lax.complex(*parts) if len(parts) == 2 else parts[0]
