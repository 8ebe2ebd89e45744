"""Multiply by the loss scale, and divide it out again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._ground.states import LossScaleState, Unscaled
from optax_lossscale._ground.tree import (
    check_arrays,
    find_by_type,
    flags_of,
    map_floating,
    where_true,
    widen,
)
from optax_lossscale._ground.types import Mask, PyTree
from optax_lossscale._scaling.state import find_loss_scale_state, get_loss_scale


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
    return multiply(tree, state)


def multiply(tree: PyTree, state: PyTree) -> PyTree:
    """`scale`, without the checks for what users may have mistaken."""
    loss_scale = get_loss_scale(state)
    if loss_scale.ndim:
        raise ValueError(
            f"the loss scale must be a scalar, got shape {loss_scale.shape}, one for "
            "each device or ensemble member. (Call this inside `pmap` or `vmap`.)"
        )
    check_arrays(jax.tree.leaves(tree))
    return map_floating(_scale_leaves, tree, loss_scale)


def warn_of_outer_wrappers(state: PyTree) -> None:
    """Warns of wrappers of Optax that must be inside `loss_scaled`, not outside.

    The warning shows the line that called the caller.
    """
    for _, outer in find_by_type(state, tuple(_WRONG_OUTSIDE)):
        inner = [state for _, state in find_by_type(outer, LossScaleState)]
        if any(not isinstance(state.rule_state, Unscaled) for state in inner):
            name, consequence = _WRONG_OUTSIDE[type(outer)]
            warnings.warn(
                f"`{name}` must not be outside `loss_scaled`: {consequence}. (Write "
                f"`loss_scaled({name}(...))`.)",
                stacklevel=3,
            )


_WRONG_OUTSIDE = {
    optax.MultiStepsState: (
        "optax.MultiSteps",
        "after one overflow, the sum that it accumulates stays NaN",
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "it hides overflows, so the loss scale never backs off",
    ),
}


def unscale(tree: PyTree, state: PyTree, *, mask: Mask = None) -> PyTree:
    """Divides the loss scale out of every floating leaf.

    With loss scale `s`, for every floating leaf `x`,

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
      ValueError: If `state` holds no `LossScaleState`, or several, or if a leaf is one
        that `unscale` returned for the same state: as in PyTorch, gradients are
        unscaled once. (Arrays that were computed from such a leaf, or that another
        jitted function returned, are not recognized.)

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> state = ols.static_loss_scale(2.0**15).init()
      >>> ols.unscale(jnp.float16(98304.0 / 2), state)
      Array(1.5, dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740).
    """
    state = find_loss_scale_state(state)
    is_scaled = flags_of(mask, tree)
    check_scaled(tree, state, is_scaled)
    unscaled = divide_out(tree, get_loss_scale(state), is_scaled)
    if not isinstance(state.rule_state, Unscaled):
        pairs = zip(*map(jax.tree.leaves, (tree, unscaled)), strict=True)
        divided = [leaf for old, leaf in pairs if leaf is not old]
        _returned.update({(id(leaf), id(state.loss_scale)): leaf for leaf in divided})
    return unscaled


# What `unscale` has returned, by its identity and that of the scale, as long as
# somebody holds it.
_returned: WeakValueDictionary[tuple[int, int], jax.Array] = WeakValueDictionary()


def check_scaled(tree: PyTree, state: LossScaleState, is_scaled: PyTree) -> None:
    """Refuses what `unscale` has returned for the same state."""
    for leaf in jax.tree.leaves(where_true(is_scaled, tree)):
        if _returned.get((id(leaf), id(state.loss_scale))) is leaf:
            raise ValueError(
                "the gradients must be scaled, got an array that `unscale` has "
                "returned. (After `unscale`, call `tx.update(..., "
                "grads_unscaled=True)`.)"
            )


def divide_out(tree: PyTree, loss_scale: jax.Array, is_scaled: PyTree = True) -> PyTree:
    """`unscale` of the parts that are scaled, without the check."""
    check_arrays(jax.tree.leaves(where_true(is_scaled, tree)))

    def divide(flag: bool, part: PyTree) -> PyTree:
        return map_floating(unscale_leaves, part, loss_scale) if flag else part

    return jax.tree.map(divide, is_scaled, tree)


@jax.jit  # Here and below, so that outside `jit` it is one dispatch.
def _scale_leaves(leaves: list[ArrayLike], loss_scale: jax.Array) -> list[jax.Array]:
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
