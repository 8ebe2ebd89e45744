"""What is a parameter? The one answer, for trees of every framework.

Floating and complex arrays are parameters, and so are Python floats in lists, tuples
and dicts, as in JAX. Everything else is held fixed: integers, keys, strings, functions,
and the Python floats of a module, which are its settings. A leaf that is held fixed has
None in the place of its gradient.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._ground.tree import check_arrays, is_floating, is_floating_array
from optax_lossscale._ground.types import PyTree


def parameters_of(tree: PyTree) -> PyTree:
    """The tree with None in the place of each leaf that is held fixed."""

    def is_no_container(node: object) -> bool:
        return not isinstance(node, Mapping | list | tuple)

    def keep(node: PyTree) -> PyTree:
        if jax.tree_util.all_leaves([node]):
            return node if is_floating(node) else None
        return jax.tree.map(lambda x: x if is_floating_array(x) else None, node)

    return jax.tree.map(keep, tree, is_leaf=is_no_container)


def gradients_of(tree: PyTree) -> PyTree:
    """The gradients, with None for those of integers, which JAX may give too."""
    check_arrays(jax.tree.leaves(tree))
    return jax.tree.map(lambda grad: grad if is_floating(grad) else None, tree)


def with_zeros(updates: PyTree, params: PyTree) -> PyTree:
    """Zeros for the integer arrays among the parameters, if these are given.

    `optax.apply_updates` adds an update to every array. It knows None for an update
    only where the parameter is None too.
    """
    if params is None:
        return updates

    def fill(update: PyTree, param: PyTree) -> PyTree:
        is_missing = update is None and isinstance(param, jax.Array | np.ndarray)
        return jnp.zeros_like(param) if is_missing and _is_integer(param) else update

    return jax.tree.map(fill, updates, params, is_leaf=lambda node: node is None)


def _is_integer(array: jax.Array | np.ndarray) -> bool:
    return any(jnp.issubdtype(array.dtype, kind) for kind in (np.integer, np.bool_))
