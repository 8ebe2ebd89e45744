"""What is a parameter? The one answer, for trees of every framework.

| leaf | in a list, tuple or dict | in any other node, such as an Equinox module |
|---|---|---|
| floating or complex array | parameter | parameter |
| Python float or complex number | parameter, as in JAX | held fixed: it is a setting |
| integer or bool, array or number | held fixed | held fixed |
| key, string, function, any other object | held fixed | held fixed |

A leaf that is held fixed has None in the place of its gradient. The variables of a
module of `flax.nnx` are selected by NNX itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.nnx import (
    flatten,
    is_module,
    is_state,
    is_variable,
    split_state,
)
from optax_lossscale._ground.tree import (
    are_same,
    dtype_of,
    is_absent,
    is_floating,
    is_floating_array,
    is_numeric,
)
from optax_lossscale._ground.types import PyTree


def parameters_of(tree: PyTree) -> PyTree:
    """The tree with None in the place of each leaf that is held fixed.

    A tree without any parameter is returned as it is, for Optax to judge.
    """
    leaves = jax.tree.leaves(tree)
    if all(map(is_floating_array, leaves)):
        return tree
    params = _map_by_node(is_floating, is_floating_array, tree)
    return params if jax.tree.leaves(params) else tree


def _map_by_node(
    is_kept: Callable[[object], bool],
    is_kept_in_module: Callable[[object], bool],
    tree: PyTree,
) -> PyTree:
    """Keeps some leaves of lists, tuples and dicts, and some of other nodes."""

    def keep(node: PyTree) -> PyTree:
        if jax.tree_util.all_leaves([node]):
            return node if is_kept(node) else None
        return jax.tree.map(
            lambda leaf: leaf if is_kept_in_module(leaf) else None, node
        )

    return jax.tree.map(keep, tree, is_leaf=_is_no_container)


def _is_no_container(node: object) -> bool:
    return not (isinstance(node, Mapping | list | tuple) or is_variable(node))


def gradients_of(params: PyTree, grads: PyTree) -> PyTree:
    """The gradients, with None for those of leaves that are held fixed.

    `params` is a tree of parameters and None, or None for no such tree. With
    `allow_int=True`, JAX gives an integer a gradient.
    """
    if params is None:
        kept = jax.tree.map(
            lambda grad: None if is_numeric(grad) and not is_floating(grad) else grad,
            grads,
        )
    else:
        kept = jax.tree.map(
            lambda grad, param: None if param is None else grad,
            grads,
            fast_of(params),
            is_leaf=is_absent,
        )
    are_all_kept = are_same(jax.tree.leaves(kept), jax.tree.leaves(grads))
    return grads if are_all_kept else kept


def fast_of(params: PyTree) -> PyTree:
    """The parameters that are differentiated; `optax.lookahead` has two of each."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def with_zeros(updates: PyTree, tree: PyTree) -> PyTree:
    """Zeros in place of the missing updates of numbers that are held fixed.

    `optax.apply_updates` adds something to every leaf. Numbers and arrays of NumPy in
    a module keep None, because they are its settings, and must not become arrays of
    JAX; Equinox's `apply_updates` knows None.
    """
    if all(map(is_floating_array, jax.tree.leaves(tree))):
        return updates

    def is_integer(leaf: object) -> bool:
        dtype = dtype_of(leaf)
        kinds = jnp.integer, jnp.bool_
        is_array = dtype is not None and any(jnp.issubdtype(dtype, k) for k in kinds)
        return is_array or isinstance(leaf, int)

    def is_integer_of_jax(leaf: object) -> bool:
        return isinstance(leaf, jax.Array) and is_integer(leaf)

    numbers = _map_by_node(is_integer, is_integer_of_jax, tree)

    def fill(update: PyTree, number: PyTree) -> PyTree:
        is_missing = update is None and number is not None
        return jnp.zeros_like(number) if is_missing else update

    return jax.tree.map(fill, updates, numbers, is_leaf=is_absent)


def split_parameters(
    tree: PyTree, wrt: Any, *, allow_int: bool
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The part of an argument to differentiate, and a function that adds the rest.

    An `nnx.State` is reduced to the variables that `wrt` selects, and an `nnx.Module`
    is left to NNX. An argument without any parameter is returned whole, so that JAX
    says what is wrong with it.
    """
    leaves, structure = flatten(tree)
    params = structure.flatten_up_to(parameters_of(tree))

    def split(leaf: PyTree, param: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        if is_state(leaf):
            return split_state(leaf, wrt)
        is_integer = allow_int and dtype_of(leaf) is not None
        if param is not None or is_module(leaf) or is_integer:
            return leaf, lambda trained: trained
        return None, lambda _: leaf

    parts = list(map(split, leaves, params))
    trained, merges = [part for part, _ in parts], [merge for _, merge in parts]
    if are_same(trained, leaves) or all(part is None for part in trained):
        return tree, lambda tree: tree

    def merge(tree: PyTree) -> PyTree:
        pairs = zip(merges, structure.flatten_up_to(tree), strict=True)
        return structure.unflatten([merge(part) for merge, part in pairs])

    return structure.unflatten(trained), merge
