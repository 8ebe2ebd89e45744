"""Functions on pytrees: scale and unscale.

What each kind of leaf means, here and in the wrapper; the first two are "floating":

* float16, bfloat16, float8, float32: computed in float32; float64 in float64;
* complex: real and imaginary part, each as above;
* integer, bool, `float0`, keys and other extended dtypes: passed through as they
  are, always finite;
* `None`, `optax.MaskedNode`: no leaves. Empty arrays: finite, magnitude zero.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale._state import PyTree, get_loss_scale

Mask = PyTree | Callable[[PyTree], PyTree] | None


def scale(tree: PyTree, state: PyTree) -> PyTree:
    """Multiplies every floating leaf by the loss scale.

    With loss scale `s`, for every floating leaf `x`,

        scale(x) = widen(x) * s

    where `widen` casts to float32 what is narrower: in float16 a loss of 3 times
    `2**15` is infinity already.

    Args:
      tree: Usually a scalar loss. Floating leaves of any shape; others pass
        through unchanged.
      state: A `LossScaleState`, or any pytree that holds exactly one.

    Returns:
      The tree, its floating leaves float32 or wider.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several.
      TypeError: If `tree` is a function.

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
    return map_floating(_scale_leaves, tree, get_loss_scale(state))


def unscale(tree: PyTree, state: PyTree, *, mask: Mask = None) -> PyTree:
    """Divides the loss scale out of every floating leaf.

    With loss scale `s`, for every floating leaf `x`,

        unscale(x) = widen(x) * (1 / s)

    where `widen` casts to float32 what is narrower, and does so first: divided in
    float16, small gradients would be flushed to zero after all. The reciprocal
    is exact for powers of two; other scales may round once more than a division.

    Args:
      tree: Gradients of a scaled loss. Floating leaves of any shape; others pass
        through unchanged.
      state: A `LossScaleState`, or any pytree that holds exactly one.
      mask: As Optax's masks, a pytree of bools that is a prefix of `tree`, or a
        function from `tree` to one: True where leaves are scaled gradients. The
        others are returned untouched. None means True everywhere.

    Returns:
      The tree, its floating leaves float32 or wider.

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
    loss_scale = get_loss_scale(state)

    def unscale_part(is_scaled: bool, part: PyTree) -> PyTree:
        return map_floating(unscale_leaves, part, loss_scale) if is_scaled else part

    return jax.tree.map(unscale_part, resolve_mask(mask, tree), tree)


def is_floating(leaf: object) -> bool:
    """Whether a leaf is a floating or complex array or number."""
    if isinstance(leaf, float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def wide_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype itself, or float32 where that is wider."""
    # Not promote_types, which knows no path from float8 to float32.
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def is_absent(node: object) -> bool:
    """Whether a node stands for a leaf that is not there."""
    return node is None or isinstance(node, optax.MaskedNode)


def resolve_mask(mask: Mask, tree: PyTree) -> PyTree:
    """A mask as a pytree of bools that is a prefix of `tree`."""
    if mask is None:
        return True
    return mask(tree) if callable(mask) else mask


def where_true(mask: PyTree, tree: PyTree) -> PyTree:
    """The parts of a tree where its resolved mask is True, None elsewhere."""
    return jax.tree.map(lambda keep, part: part if keep else None, mask, tree)


def widen(leaf: jax.typing.ArrayLike) -> jax.Array:
    """A floating leaf as float32 or wider, strongly typed."""
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    dtype = wide_dtype(array.dtype)
    if array.dtype == dtype and not array.weak_type:
        return array  # Outside `jit` each call counts.
    return lax.convert_element_type(array, dtype)


def wide_param(param: PyTree) -> PyTree:
    """A parameter, perhaps abstract, as the inner optimizer shall see it."""
    if isinstance(param, jax.ShapeDtypeStruct) and is_floating(param):
        dtype = wide_dtype(param.dtype)
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)
    return widen(param) if is_floating(param) else param


def check_structure(tree: PyTree, params: PyTree, message: str) -> None:
    """Raises unless every leaf that a tree has belongs to one of `params`."""

    def is_matched(leaf: PyTree, param: PyTree) -> bool:
        return is_absent(leaf) or jax.tree_util.all_leaves([param])

    try:
        matched = jax.tree.map(is_matched, tree, params, is_leaf=is_absent)
        detail = "got a leaf where there is a subtree."
    except ValueError as error:
        matched, detail = False, f"got: {error}"
    if not all(jax.tree.leaves(matched)):
        raise ValueError(f"{message}, {detail} (Do they belong to other arguments?)")


def real_parts(array: jax.Array) -> tuple[jax.Array, ...]:
    """Both parts of a complex array; any other by itself."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return (lax.real(array), lax.imag(array)) if is_complex else (array,)


def floating_leaves(tree: PyTree) -> dict[str, Any]:
    """The floating leaves by their paths, such as `"layer/kernel"`."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_floating(leaf):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            # `a/b` may be one key as well as two.
            found[jax.tree_util.keystr(path) if name in found else name] = leaf
    return found


def map_floating(
    function: Callable[..., list[jax.Array]], tree: PyTree, *args: jax.Array
) -> PyTree:
    """Applies a function of a list to all floating leaves at once."""
    leaves, structure = jax.tree.flatten(tree)
    mapped = iter(function([leaf for leaf in leaves if is_floating(leaf)], *args))
    merged = [next(mapped) if is_floating(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, merged)


# With `jit`, one call for all leaves where it is not part of a program.


@jax.jit
def _scale_leaves(leaves: list[Any], loss_scale: jax.Array) -> list[jax.Array]:
    return _multiply(leaves, loss_scale.astype)


@jax.jit
def unscale_leaves(leaves: list[Any], loss_scale: jax.Array) -> list[jax.Array]:
    """`unscale` of a list of floating leaves."""
    # Divided once for a dtype, not once for a leaf.
    return _multiply(leaves, cache(lambda dtype: 1 / loss_scale.astype(dtype)))


def _multiply(
    leaves: list[Any], factor_in: Callable[[jnp.dtype], jax.Array]
) -> list[jax.Array]:
    """Each leaf, widened, times the factor for its dtype."""

    def multiply(leaf: Any) -> jax.Array:
        array = widen(leaf)
        factor = factor_in(jnp.finfo(array.dtype).dtype)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            # A complex product would turn an infinite part into NaN in the other.
            return lax.complex(lax.real(array) * factor, lax.imag(array) * factor)
        return lax.mul(array, factor)

    return [multiply(leaf) for leaf in leaves]
