"""Check whether every entry of every leaf is finite, or find the largest magnitude.

Both read each leaf once, and should cost little more than that:

* Each reduction takes two or three kernels on a GPU. So leaves of one shape are
  combined entry by entry, and the result is reduced. Small leaves are concatenated.
  Large ones are not: XLA would write the concatenated array to memory, or transposed
  copies of the leaves.
* On a CPU the input of a reduction is written to memory. So leaves are also cut into
  pieces, which are combined too, and about one entry of 16 is written.
* Leaves that may be sharded over devices are reduced one by one, because combining them
  could gather them.

No reduction may see a NaN, since a maximum can lose it: between devices, and on a CPU
also within one array of 4096 or more entries (XLA of JAX 0.10 to 0.12). So each NaN
becomes `False` or infinity before anything is reduced.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from optax_lossscale._bits import keep_rounding
from optax_lossscale._scaling import unscale_leaves
from optax_lossscale._tree import is_floating, real_parts, widen
from optax_lossscale._types import AxisName, PyTree

# Arrays that are combined into one. Larger groups take a GPU's compiler seconds, and do
# not stay in a TPU's on-chip memory until the update reads them too.
_GROUP = 16
# Smaller arrays are concatenated.
_SMALL = 2**14


class _Statistic(NamedTuple):
    """A number that is reduced from all entries of all leaves.

    Attributes:
      map_entries: Maps an array, entry by entry, to an array without NaN.
      combine: Combines two such arrays entry by entry.
      reduce: Reduces such an array over some of its axes.
      of_empty: The result for no entries.
      reduce_devices: Reduces the result over devices.
    """

    map_entries: Callable[[jax.Array], jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    reduce: Callable[..., jax.Array]
    of_empty: bool | float
    reduce_devices: Callable[..., jax.Array]

    def reduce_all(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Reduces mapped arrays to one scalar."""
        if not arrays:
            return jnp.asarray(self.of_empty)
        scalars = [self.reduce(array, range(array.ndim)) for array in arrays]
        return self.reduce(_stack(scalars), (0,))


def _magnitude(x: jax.Array) -> jax.Array:
    """Magnitudes as float32, with NaN as infinity."""
    magnitude = lax.select(lax.is_finite(x), lax.abs(x), lax.full_like(x, jnp.inf))
    if x.dtype == jnp.float64:
        float32_max = jnp.finfo(jnp.float32).max.astype(x.dtype)
        clipped = lax.min(magnitude, lax.full_like(x, float32_max))
        magnitude = lax.select(lax.is_finite(x), clipped, magnitude)
    return magnitude.astype(jnp.float32)


_ALL_FINITE = _Statistic(
    map_entries=lax.is_finite,
    combine=lax.bitwise_and,
    reduce=lax.reduce_and,
    of_empty=True,
    reduce_devices=lax.pmin,
)
_MAX_MAGNITUDE = _Statistic(
    map_entries=_magnitude,
    # With `lax.max` XLA would go back to reducing the arrays one by one.
    combine=lambda a, b: lax.select(lax.gt(a, b), a, b),
    reduce=lax.reduce_max,
    of_empty=0.0,
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
    return is_finite(tree, loss_scale=None, axis_name=axis_name)


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
        return largest_magnitude(tree, loss_scale=None, axis_name=axis_name)


def is_finite(
    tree: PyTree, loss_scale: jax.Array | None, axis_name: AxisName | None
) -> jax.Array:
    """`all_finite` of a tree that is still to be unscaled."""
    return _reduce(tree, loss_scale, _ALL_FINITE, axis_name)


def largest_magnitude(
    tree: PyTree, loss_scale: jax.Array | None, axis_name: AxisName | None
) -> jax.Array:
    """`max_magnitude` of a tree that is still to be unscaled."""
    return _reduce(tree, loss_scale, _MAX_MAGNITUDE, axis_name)


def _reduce(
    tree: PyTree,
    loss_scale: jax.Array | None,
    statistic: _Statistic,
    axis_name: AxisName | None,
) -> jax.Array:
    """Unscales all floating leaves and reduces them to one scalar on all devices."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    leaves = [leaf for leaf in leaves if leaf.size]
    # The result has no useful derivative, and a maximum over devices has none at all.
    leaves = lax.stop_gradient(leaves)
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    # A dict keeps the order, so that all processes make the same program.
    axes = tuple(dict.fromkeys(axis for s in shardings for axis in _axes_of(s.spec)))

    def reduce_here(leaves: list[jax.Array], loss_scale: jax.Array | None) -> jax.Array:
        return jnp.asarray(_reduce_leaves(leaves, loss_scale, statistic, _are_local()))

    if len(axes) > 1 and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # On an explicit mesh shardings are known while tracing. This makes one
        # collective over all axes; XLA would make one for each set of axes.
        on_each_device: Callable[..., jax.Array] = jax.shard_map(
            lambda *args: statistic.reduce_devices(reduce_here(*args), axes),
            mesh=next(s.mesh for s in shardings if any(_axes_of(s.spec))),
            in_specs=([sharding.spec for sharding in shardings], PartitionSpec()),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
        )
        result = on_each_device(leaves, loss_scale)
    else:
        result = reduce_here(leaves, loss_scale)
    return _reduce_axes(result, statistic, axis_name)


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


@contextlib.contextmanager
def hint_at_axes(axis_name: AxisName | None) -> Iterator[None]:
    """Says what an axis name means, in the error if there is no such axis."""
    try:
        yield
    except NameError as error:
        error.add_note(
            "(`axis_name` must name axes of the `pmap`, `vmap` or `shard_map` around, "
            f"got {axis_name!r}; under `jit` with sharded arrays leave it out.)"
        )
        raise


def vary_over(array: jax.Array, names: tuple[Hashable, ...]) -> jax.Array:
    """Makes an array vary over all of the axes, without changing its value.

    JAX 0.12 refuses to reduce an array over several axes if it varies over only some of
    them. `lax.pvary` refuses axes over which the array varies already.
    """
    is_a_device = lax.axis_index(names) >= 0  # True on every device.
    return jnp.where(is_a_device, array, array)


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
    loss_scale: jax.Array | None,
    statistic: _Statistic,
    are_local: bool,
) -> jax.Array:
    """Unscales floating leaves and reduces them to one scalar on this device."""

    def mapped(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        # A float16 infinity may have been finite before it was rounded.
        leaves = [keep_rounding(leaf) for leaf in leaves]
        if loss_scale is None:
            leaves = [widen(leaf) for leaf in leaves]
        else:
            leaves = unscale_leaves(list(leaves), loss_scale)
        return [
            statistic.map_entries(part) for leaf in leaves for part in real_parts(leaf)
        ]

    def reduce_each(*leaves: jax.Array) -> jax.Array:
        return statistic.reduce_all(mapped(leaves))

    def reduce_combined(*leaves: jax.Array, cut: bool) -> jax.Array:
        groups = [_cut(group) if cut else group for group in _groups_of(leaves)]
        return statistic.reduce_all(
            [reduce(statistic.combine, mapped(group)) for group in groups]
        )

    if not are_local:
        return reduce_each(*leaves)
    result: jax.Array = lax.platform_dependent(  # Chosen when the program is lowered.
        *leaves,
        cpu=partial(reduce_combined, cut=True),
        default=partial(reduce_combined, cut=False),
    )
    return result


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


def _stack(scalars: list[jax.Array]) -> jax.Array:
    # Not combined one by one: XLA would repeat that chain of operations for each use of
    # the result, and take minutes to compile a chain of a thousand.
    return lax.concatenate([lax.reshape(scalar, (1,)) for scalar in scalars], 0)
