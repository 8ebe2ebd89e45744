"""What each kind of leaf means, and functions on the leaves of a pytree.

Throughout the package, "floating" covers the first two of these kinds:

* float16, bfloat16, float8, float32: computed in float32; float64 in float64;
* complex: real and imaginary part, each as above;
* integer, bool, `float0`, keys and other extended dtypes: returned unchanged, and
  always finite;
* `None` and `optax.MaskedNode`: no leaves;
* empty arrays: finite, with magnitude zero.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale._types import Mask, PyTree


def is_floating(leaf: object) -> bool:
    """Whether a leaf is a floating or complex array or number."""
    if isinstance(leaf, float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_absent(node: object) -> bool:
    """Whether a node stands for a leaf that is missing."""
    return node is None or isinstance(node, optax.MaskedNode)


def wide_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns float32 for narrower floating dtypes, and any other one unchanged."""
    # Not by `promote_types`, which has no path from float8 to float32.
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def widen(leaf: jax.typing.ArrayLike) -> jax.Array:
    """Casts a floating leaf to float32 or wider, strongly typed."""
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    dtype = wide_dtype(array.dtype)
    if array.dtype == dtype and not array.weak_type:
        return array  # Saves a call for each leaf outside `jit`.
    return lax.convert_element_type(array, dtype)


def wide_param(param: PyTree) -> PyTree:
    """Widens a parameter, which may be abstract, for the inner optimizer."""
    if isinstance(param, jax.ShapeDtypeStruct) and is_floating(param):
        dtype = wide_dtype(param.dtype)
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)
    return widen(param) if is_floating(param) else param


def real_parts(array: jax.Array) -> tuple[jax.Array, ...]:
    """Both parts of a complex array; a real array alone."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return (lax.real(array), lax.imag(array)) if is_complex else (array,)


def map_floating(
    function: Callable[..., list[jax.Array]], tree: PyTree, *args: jax.Array
) -> PyTree:
    """Replaces floating leaves by the results of a function of the list of them."""
    leaves, structure = jax.tree.flatten(tree)
    mapped = iter(function([leaf for leaf in leaves if is_floating(leaf)], *args))
    merged = [next(mapped) if is_floating(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, merged)


def floating_leaves(tree: PyTree) -> dict[str, Any]:
    """The floating leaves by their paths, such as `"layer/kernel"`."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_floating(leaf):
            name = path_name(path)
            # A key may itself hold a slash, so that two paths read the same.
            found[jax.tree_util.keystr(path) if name in found else name] = leaf
    return found


def path_name(path: Any) -> str:
    """The name of a path in a pytree, such as `"layer/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def find_by_type(tree: PyTree, kind: type) -> list[tuple[Any, Any]]:
    """Path and value of every node of a type, except those inside another one."""

    def is_one(node: object) -> bool:
        return isinstance(node, kind)

    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_one)[0]
    return [(path, node) for path, node in nodes if is_one(node)]


def unwrap(tree: PyTree) -> PyTree:
    """Replaces wrapped arrays, such as Flax's `nnx.Variable`, by the arrays."""

    def is_wrapped(node: object) -> bool:
        return hasattr(node, "__jax_array__")

    return jax.tree.map(
        lambda node: jnp.asarray(node) if is_wrapped(node) else node,
        tree,
        is_leaf=is_wrapped,
    )


def resolve_mask(mask: Mask, tree: PyTree) -> PyTree:
    """The pytree of bools, a prefix of `tree`, that a mask stands for."""
    if mask is None:
        return True
    return mask(tree) if callable(mask) else mask


def where_true(mask: PyTree, tree: PyTree) -> PyTree:
    """Keeps the parts of a tree where its resolved mask is True; None elsewhere."""
    return jax.tree.map(lambda keep, part: part if keep else None, mask, tree)


def check_structure(tree: PyTree, params: PyTree, message: str) -> None:
    """Raises unless each leaf of a tree belongs to a leaf of `params`."""

    def is_matched(leaf: PyTree, param: PyTree) -> bool:
        return is_absent(leaf) or jax.tree_util.all_leaves([param])

    try:
        matched = jax.tree.map(is_matched, tree, params, is_leaf=is_absent)
        detail = "got a leaf where there is a subtree."
    except ValueError as error:
        matched, detail = False, f"got: {error}"
    if not all(jax.tree.leaves(matched)):
        raise ValueError(
            f"{message}, {detail} (Do they belong to other arguments? Check `argnums`.)"
        )
