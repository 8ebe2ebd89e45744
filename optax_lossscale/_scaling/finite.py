"""Check whether every entry of every leaf is finite, or find the largest magnitude."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._ground.axes import hint_at_axes, vary_over
from optax_lossscale._ground.tree import check_arrays, is_floating, real_parts, widen
from optax_lossscale._ground.types import AxisName, PyTree


def all_finite(tree: PyTree, *, axis_name: AxisName | None = None) -> jax.Array:
    """Returns whether no leaf holds a NaN or an infinity.

        all_finite(tree) = all(isfinite(x) for every entry x of every leaf)

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/without_optax.html

    Args:
      tree: Leaves of any dtype and shape. An empty tree is finite, and so is
        every leaf that is not floating.
      axis_name: The axis of `pmap`, `vmap` or `shard_map`, or a tuple of axes, over
        which the answers of all devices are combined, so that all get the same one.
        Only the answer crosses devices.

    Returns:
      `bool[]`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> print(ols.all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.nan])}))
      False
    """
    return is_finite(tree, axis_name)


def max_magnitude(tree: PyTree, *, axis_name: AxisName | None = None) -> jax.Array:
    """Returns the largest magnitude in the tree, or infinity if any entry is nonfinite.

        max_magnitude(tree) = max(isnan(x) ? inf : abs(x) for every entry x)

    NaN becomes infinity before the reduction, because a maximum over devices
    drops NaN. The magnitude of a complex entry is that of its larger part. A finite
    float64 beyond float32's range counts as `finfo(float32).max`.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/choosing_a_rule.html

    Args:
      tree: Leaves of any dtype and shape. An empty tree has magnitude 0, and so
        has every leaf that is not floating.
      axis_name: The axis of `pmap`, `vmap` or `shard_map`, or a tuple of axes, over
        which the answers of all devices are combined, so that all get the same one.
        Only the answer crosses devices.

    Returns:
      `f32[]`, in the unit of the leaves, from 0 to infinity.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> ols.max_magnitude([jnp.array([1.0, -3.0]), jnp.zeros(0)])
      Array(3., dtype=float32)
      >>> ols.max_magnitude([jnp.array([1.0, jnp.nan])])
      Array(inf, dtype=float32)
    """
    return largest_magnitude(tree, axis_name)


def is_finite(
    tree: PyTree, axis_name: AxisName | None, grads_finite: ArrayLike = True
) -> jax.Array:
    """`all_finite`, and also False if a flag is."""
    finite = _are_finite(_of_one_shape(_real_arrays(tree))) & grads_finite
    return on_all_devices(finite, axis_name)


@jax.jit  # Here and below, so that outside `jit` it is one dispatch.
def _are_finite(groups: list[list[jax.Array]]) -> jax.Array:
    # Reference: `[lax.is_finite(a).all() for group in groups for a in group]`.
    parts = [_combined(lax.bitwise_and, lax.is_finite, g).all() for g in groups]
    return jnp.stack([*parts, True]).all()


def largest_magnitude(
    tree: PyTree, axis_name: AxisName | None, grads_finite: ArrayLike = True
) -> jax.Array:
    """`max_magnitude`, and also infinity if a flag is False."""
    # A maximum over devices has no derivative.
    arrays = [lax.stop_gradient(array) for array in _real_arrays(tree)]
    largest = _largest(_of_one_shape(arrays))
    largest = jnp.where(grads_finite, largest, jnp.inf)
    return _over_axes(lax.pmax, largest, axis_name)


@jax.jit
def _largest(groups: list[list[jax.Array]]) -> jax.Array:
    # Reference: `[_magnitude(a).max() for group in groups for a in group]`.
    parts = [_combined(lax.max, _magnitude, group).max() for group in groups]
    return jnp.stack([*parts, jnp.float32(0.0)]).max()


def on_all_devices(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every device."""
    return _over_axes(lax.pmin, flag, axis_name)


def _over_axes(
    over: Callable[..., jax.Array], number: jax.Array, axis_name: AxisName | None
) -> jax.Array:
    """Reduces a scalar over the axes that the caller named."""
    names = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if names is None or names == ():
        return number
    with hint_at_axes(axis_name):
        number = vary_over(number, names) if isinstance(names, tuple) else number
        return jnp.asarray(over(number, names))


def _real_arrays(tree: PyTree) -> list[jax.Array]:
    """All entries of the floating leaves, in float32 or wider."""
    check_arrays(jax.tree.leaves(tree))
    leaves = [widen(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    return [part for leaf in leaves if leaf.size for part in real_parts(leaf)]


# Larger groups take a GPU's compiler seconds, and spill from a TPU's on-chip memory.
_LARGEST_GROUP = 16
# Smaller arrays are concatenated. Where they were combined, XLA read activations again
# to compute gradients of several scales and biases at once: 1 % of a ResNet's step.
_SMALL = 2**14


def _of_one_shape(arrays: list[jax.Array]) -> list[list[jax.Array]]:
    """Groups of arrays of one shape, or of small ones, which are reduced together.

    Reference: `[[array] for array in arrays]`. A reduction is two or three kernels on a
    GPU, and a large network has many arrays of few shapes. Arrays that may be sharded
    are left apart, because combining them could gather them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_part = not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)
    if not (is_part or (mesh.empty and jax.device_count() == 1)):
        return [[array] for array in arrays]
    alike: dict[Any, list[jax.Array]] = {}
    for array in arrays:
        kind = array.dtype if array.size < _SMALL else jax.typeof(array)
        alike.setdefault(kind, []).append(array)
    return [
        same[start : start + _LARGEST_GROUP]
        for same in alike.values()
        for start in range(0, len(same), _LARGEST_GROUP)
    ]


def _combined(
    combine: Callable[..., jax.Array],
    of_entries: Callable[[jax.Array], jax.Array],
    group: list[jax.Array],
) -> jax.Array:
    """What is to be reduced of a group: arrays of one shape, or several small ones."""
    if len(group) > 1 and group[0].size < _SMALL:
        flat = [lax.reshape(array, (array.size,)) for array in group]
        return of_entries(lax.concatenate(flat, 0))
    return reduce(combine, map(of_entries, group))


def _magnitude(array: jax.Array) -> jax.Array:
    """Magnitudes as float32. NaN is infinity, and a finite float64 remains finite.

    No maximum may see a NaN, since it can lose it: between devices, and on a CPU also
    within one array of 4096 or more entries (XLA of JAX 0.10 to 0.12).
    """
    largest = jnp.asarray(jnp.finfo(jnp.float32).max, array.dtype)
    magnitude = jnp.minimum(lax.abs(array), largest)
    return jnp.where(lax.is_finite(array), magnitude, jnp.inf).astype(jnp.float32)
