"""Run an inner update so that a bad step changes nothing.

Selects before the update, so that the inner optimizer never sees a NaN or an
infinity; selects after it, so that nothing of what it did remains. Always with
`jnp.where`, never `lax.cond`: under `shard_map` its branches diverge silently when
devices disagree (https://github.com/jax-ml/jax/issues/40823).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from optax_lossscale._state import PyTree
from optax_lossscale._tree import is_floating


def mask_inputs(finite: jax.Array, tree: PyTree) -> PyTree:
    """Replaces every floating leaf by zeros on a bad step."""

    def select(leaf: PyTree) -> PyTree:
        if not is_floating(leaf):
            return leaf
        return jnp.where(finite, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(select, tree)


def mask_updates(finite: jax.Array, updates: PyTree) -> PyTree:
    """Replaces updates on a bad step by zeros that leave every bit of a parameter."""

    def select(update: PyTree) -> PyTree:
        zeros = jnp.zeros_like(update)
        # -0.0, because a parameter of -0.0 plus 0.0 is 0.0.
        return jnp.where(finite, update, -zeros if is_floating(update) else zeros)

    return _map_values(select, updates)


def mask_state(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Keeps the old state on a bad step."""

    def select(new: PyTree, old: PyTree) -> PyTree:
        sharding = jax.typeof(new).sharding
        if any(sharding.spec) and jax.typeof(old).sharding != sharding:
            # On an explicit mesh a select wants both alike. The new one is as the
            # bare optimizer leaves it.
            old = jax.sharding.reshard(old, sharding)
        return jnp.where(finite, new, old)

    return _map_values(select, new, old)


def cast_like(new: PyTree, old: PyTree) -> PyTree:
    """Gives every array of the new state the dtype that it has in the old one."""

    def cast(new: PyTree, old: PyTree) -> PyTree:
        dtype = getattr(old, "dtype", None)
        return new if dtype is None or dtype == new.dtype else new.astype(dtype)

    return _map_values(cast, new, old)


def _map_values(function: Callable[..., PyTree], *trees: PyTree) -> PyTree:
    """`jax.tree.map`, but for `float0` leaves, which have no values to select."""

    def apply(leaf: PyTree, *others: PyTree) -> PyTree:
        has_values = getattr(leaf, "dtype", None) != jax.dtypes.float0
        return function(leaf, *others) if has_values else leaf

    return jax.tree.map(apply, *trees)
