"""Check whether every entry of every leaf is finite, or find the largest magnitude.

The plain forms, `plain_all_finite` and `plain_max_magnitude`, come first. They reduce
each leaf by itself, and run where leaves may be sharded over devices. Where all leaves
lie on one device, `_reduce_groups` at the end of this file gets the same result in less
time: it combines leaves, and reduces few arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from optax_lossscale._ground.axes import hint_at_axes, vary_over
from optax_lossscale._ground.bits import keep_rounding
from optax_lossscale._ground.tree import check_arrays, is_floating, real_parts, widen
from optax_lossscale._ground.types import AxisName, PyTree
from optax_lossscale._scaling.scale import unscale_leaves


def plain_all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether every entry of every array is finite; no array is empty."""
    return jnp.stack([lax.is_finite(array).all() for array in arrays]).all()


def plain_max_magnitude(arrays: Sequence[jax.Array]) -> jax.Array:
    """The largest magnitude of all entries, or infinity if one is not finite."""
    return jnp.stack([_magnitude(array).max() for array in arrays]).max()


def _magnitude(array: jax.Array) -> jax.Array:
    """Magnitudes as float32. NaN is infinity, and a finite float64 remains finite.

    No maximum may see a NaN, since it can lose it: between devices, and on a CPU also
    within one array of 4096 or more entries (XLA of JAX 0.10 to 0.12).
    """
    magnitude = lax.abs(array)
    if array.dtype == jnp.float64:
        magnitude = jnp.minimum(magnitude, float(jnp.finfo(jnp.float32).max))
    infinity = lax.full_like(array, jnp.inf)
    magnitude = lax.select(lax.is_finite(array), magnitude, infinity)
    return magnitude.astype(jnp.float32)


class _Statistic(NamedTuple):
    """A number that is reduced from all entries of real arrays.

    Attributes:
      plain: Reduces the arrays to a scalar, each by itself.
      of_empty: The result if there are no arrays.
      map_entries: Maps an array, entry by entry, to an array without NaN.
      combine: Combines two such arrays entry by entry.
      reduce: Reduces such an array over some of its axes.
      reduce_devices: Reduces the result over devices.
    """

    plain: Callable[[Sequence[jax.Array]], jax.Array]
    of_empty: bool | np.float32
    map_entries: Callable[[jax.Array], jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    reduce: Callable[..., jax.Array]
    reduce_devices: Callable[..., jax.Array]


_ALL_FINITE = _Statistic(
    plain=plain_all_finite,
    of_empty=True,
    map_entries=lax.is_finite,
    combine=lax.bitwise_and,
    reduce=lax.reduce_and,
    reduce_devices=lax.pmin,
)
_MAX_MAGNITUDE = _Statistic(
    plain=plain_max_magnitude,
    of_empty=np.float32(0.0),
    map_entries=_magnitude,
    # With `lax.max` XLA would go back to reducing the arrays one by one.
    combine=lambda a, b: lax.select(lax.gt(a, b), a, b),
    reduce=lax.reduce_max,
    reduce_devices=lax.pmax,
)


def all_finite(tree: PyTree, *, axis_name: AxisName | None = None) -> jax.Array:
    """Returns whether no leaf holds a NaN or an infinity.

        all_finite(tree) = all(isfinite(x) for every entry x of every leaf)

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
    return is_finite(tree, divisor=None, axis_name=axis_name)


def max_magnitude(tree: PyTree, *, axis_name: AxisName | None = None) -> jax.Array:
    """Returns the largest magnitude in the tree, or infinity if any entry is nonfinite.

        max_magnitude(tree) = max(isnan(x) ? inf : abs(x) for every entry x)

    NaN becomes infinity before the reduction, because a maximum over devices
    drops NaN. The magnitude of a complex entry is that of its larger part. A finite
    float64 beyond float32's range counts as `finfo(float32).max`. The infinity that
    stands for a NaN is not reported by `jax_debug_infs`.

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
    with jax.debug_infs(False):  # Here an infinity is an answer and no fault.
        return largest_magnitude(tree, divisor=None, axis_name=axis_name)


def is_finite(
    tree: PyTree,
    divisor: jax.Array | None,
    axis_name: AxisName | None,
    grads_finite: jax.Array | None = None,
) -> jax.Array:
    """`all_finite` of a tree that is still to be divided; False for a flag."""
    finite = _reduce(tree, divisor, _ALL_FINITE)
    if grads_finite is not None:
        finite &= grads_finite
    return _reduce_axes(finite, _ALL_FINITE, axis_name)


def largest_magnitude(
    tree: PyTree,
    divisor: jax.Array | None,
    axis_name: AxisName | None,
    grads_finite: jax.Array | None = None,
) -> jax.Array:
    """`max_magnitude` of a tree that is still to be divided; infinite for a flag."""
    largest = _reduce(tree, divisor, _MAX_MAGNITUDE)
    if grads_finite is not None:
        largest = jnp.where(grads_finite, largest, jnp.inf)
    return _reduce_axes(largest, _MAX_MAGNITUDE, axis_name)


def on_all_devices(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether a flag is True on every device."""
    return _reduce_axes(flag, _ALL_FINITE, axis_name)


def _reduce(
    tree: PyTree,
    divisor: jax.Array | None,
    statistic: _Statistic,
) -> jax.Array:
    """Unscales all floating leaves and reduces them to one scalar."""
    entries = jax.tree.leaves(tree)
    check_arrays(entries)
    leaves = [jnp.asarray(leaf) for leaf in entries if is_floating(leaf)]
    leaves = [leaf for leaf in leaves if leaf.size]
    # The result has no useful derivative, and a maximum over devices has none at all.
    leaves = lax.stop_gradient(leaves)
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    # A dict keeps the order, so that all processes make the same program.
    axes = tuple(dict.fromkeys(axis for s in shardings for axis in _axes_of(s.spec)))

    def reduce_here(leaves: list[jax.Array], divisor: jax.Array | None) -> jax.Array:
        # JAX combines no arrays of different shardings on an explicit mesh.
        kinds = map(jax.typeof, leaves)
        is_explicit = any(kind.sharding.mesh.explicit_axes for kind in kinds)
        are_local = _are_local() and not is_explicit
        return jnp.asarray(_reduce_leaves(leaves, divisor, statistic, are_local))

    if len(axes) > 1 and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # On an explicit mesh shardings are known while tracing. This makes one
        # collective over all axes; XLA would make one for each set of axes.
        on_each_device: Callable[..., jax.Array] = jax.shard_map(
            lambda *args: statistic.reduce_devices(reduce_here(*args), axes),
            mesh=next(s.mesh for s in shardings if any(s.spec)),
            in_specs=([sharding.spec for sharding in shardings], PartitionSpec()),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
        )
        return on_each_device(leaves, divisor)
    return reduce_here(leaves, divisor)


def _reduce_axes(
    result: jax.Array, statistic: _Statistic, axis_name: AxisName | None
) -> jax.Array:
    """Reduces a scalar over the axes that the caller named."""
    names = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if names is None or names == ():
        return result
    with hint_at_axes(axis_name):
        if isinstance(names, tuple):
            result = vary_over(result, names)
        return jnp.asarray(statistic.reduce_devices(result, names))


def _axes_of(spec: PartitionSpec) -> Iterator[Hashable]:
    """The mesh axes over which an array is sharded."""
    for part in spec:
        yield from part if isinstance(part, tuple) else (part,) if part else ()


def _are_local() -> bool:
    """Whether arrays can be combined without communication between devices.

    They can if each is known to lie on one device, or to be one device's part. Inside
    `jit` the shardings of an automatic mesh are unknown while tracing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    is_one_device = mesh.size == 1 and not mesh.explicit_axes
    return is_one_device or set(mesh.manual_axes) == set(mesh.axis_names)


@partial(jax.jit, static_argnums=(2, 3))  # So that outside `jit` it is one dispatch.
def _reduce_leaves(
    leaves: list[jax.Array],
    divisor: jax.Array | None,
    statistic: _Statistic,
    are_local: bool,
) -> jax.Array:
    """Unscales floating leaves and reduces them to one scalar on this device."""
    if not leaves:
        return jnp.asarray(statistic.of_empty)
    if not are_local:
        return statistic.plain(_unscaled(leaves, divisor))
    fast = partial(_reduce_groups, divisor=divisor, statistic=statistic)
    result: jax.Array = lax.platform_dependent(  # Chosen when the program is lowered.
        *leaves, cpu=partial(fast, cut=True), default=partial(fast, cut=False)
    )
    return result


def _unscaled(
    leaves: Sequence[jax.Array], divisor: jax.Array | None
) -> list[jax.Array]:
    """Real arrays, in float32 or wider, of all unscaled entries."""
    # A float16 infinity may have been finite before it was rounded.
    leaves = [keep_rounding(leaf) for leaf in leaves]
    if divisor is None:
        leaves = [widen(leaf) for leaf in leaves]
    else:
        leaves = unscale_leaves(leaves, divisor)
    return [part for leaf in leaves for part in real_parts(leaf)]


# Arrays that are combined into one. Larger groups take a GPU's compiler seconds, and do
# not stay in a TPU's on-chip memory until the update reads them too.
_GROUP = 16
# Smaller arrays are concatenated.
_SMALL = 2**14


def _reduce_groups(
    *leaves: jax.Array,
    divisor: jax.Array | None,
    statistic: _Statistic,
    cut: bool,
) -> jax.Array:
    """Reduces leaves that lie on one device, in fewer and cheaper reductions.

    Reference: `statistic.plain(_unscaled(leaves, divisor))`.

    Each reduction takes two or three kernels on a GPU. So leaves of one shape are
    combined entry by entry, and the result is reduced. Small leaves are concatenated.
    Large ones are not: XLA would write the concatenated array to memory, or transposed
    copies of the leaves.

    On a CPU the input of a reduction is written to memory. So there leaves are also cut
    into pieces, which are combined too, and about one entry of 16 is written.

    Combining leaves that are sharded over devices could gather them.
    """
    groups = [_cut(group) if cut else group for group in _groups_of(leaves)]
    mapped = [map(statistic.map_entries, _unscaled(group, divisor)) for group in groups]
    arrays = [reduce(statistic.combine, group) for group in mapped]
    scalars = [statistic.reduce(array, range(array.ndim)) for array in arrays]
    # Not combined one by one: XLA would repeat that chain of operations for each use of
    # the result, and take minutes to compile a chain of a thousand.
    return statistic.reduce(jnp.stack(scalars), (0,))


def _groups_of(leaves: Sequence[jax.Array]) -> Iterator[list[jax.Array]]:
    """Yields groups of arrays of one shape and dtype that hold all entries.

    Small leaves are concatenated to arrays that are groups by themselves.
    """
    small: dict[jnp.dtype, list[jax.Array]] = {}
    large: dict[Hashable, list[jax.Array]] = {}
    for leaf in leaves:
        if _is_small(leaf):
            small.setdefault(leaf.dtype, []).append(lax.reshape(leaf, (leaf.size,)))
        else:
            large.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    for same in small.values():
        yield from ([lax.concatenate(group, 0)] for group in _split(same))
    for same in large.values():
        yield from _split(same)


def _is_small(leaf: jax.Array) -> bool:
    """Whether a leaf has few entries; one with a symbolic shape may have many."""
    return isinstance(leaf.size, int) and leaf.size < _SMALL


def _split(arrays: list[jax.Array]) -> Iterator[list[jax.Array]]:
    """Yields groups of nearly equal size."""
    size = math.ceil(len(arrays) / math.ceil(len(arrays) / _GROUP))
    for start in range(0, len(arrays), size):
        yield arrays[start : start + size]


def _cut(group: list[jax.Array]) -> list[jax.Array]:
    """Cuts each large array of a group into as many pieces as make a full group.

    The last piece of an array may overlap the one before it.
    """
    count, size = _GROUP // len(group), group[0].size
    if count < 2 or not isinstance(size, int) or size < _SMALL:
        return group
    length = math.ceil(size / count)
    starts = [min(i * length, size - length) for i in range(count)]
    flat = [lax.reshape(array, (size,)) for array in group]
    return [lax.slice(a, (start,), (start + length,)) for a in flat for start in starts]
