"""The check: whether every entry of every leaf is finite.

It needs one read of the leaves, and little else should cost anything:

* On a GPU launches are what costs, and each reduction is two kernels. Leaves are read
  in groups, as one concatenated array, which is never written.
* On a TPU or CPU a concatenation would be copied, and on a CPU whatever is reduced is
  first written. Leaves of one shape are laid over each other, entry by entry, and
  reduced as one.
* Where leaves may be sharded, each by itself: anything else might gather them.

No reduction is trusted with a NaN. A maximum drops it between devices, and on a CPU
within one array as well (XLA of JAX 0.10 to 0.12, from 4096 entries on). So a NaN is
`False`, or infinity, before anything is reduced.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from optax_lossscale._state import PyTree
from optax_lossscale._tree import is_floating, real_parts, unscale_leaves, widen

# One axis, or several, of pmap, vmap or shard_map.
AxisName = Hashable

# Of 1000 leaves 17 groups, so 34 kernels; much larger groups are written first.
_CONCATENATED = 60
# More do not stay on a TPU's chip until the update reads them again.
_OVERLAID = 16


class _Statistic(NamedTuple):
    """What is read of the leaves.

    Attributes:
      of_entries: Makes of an array another of its shape, that holds no NaN.
      join: Takes two such entries together.
      reduce: Takes all entries of one array together.
      of_none: The result where there is no entry.
    """

    of_entries: Callable[[jax.Array], jax.Array]
    join: Callable[[jax.Array, jax.Array], jax.Array]
    reduce: Callable[..., jax.Array]
    of_none: bool | float

    def of_all(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Reduces arrays of entries to one scalar."""
        if not arrays:
            return jnp.asarray(self.of_none)
        scalars = [self.reduce(array, range(array.ndim)) for array in arrays]
        return self.reduce(_stacked(scalars), (0,))


def _magnitude(x: jax.Array) -> jax.Array:
    """Magnitudes as float32; infinity for NaN."""
    magnitude = lax.select(lax.is_finite(x), lax.abs(x), lax.full_like(x, jnp.inf))
    if x.dtype == jnp.float64:
        float32_max = jnp.finfo(jnp.float32).max.astype(x.dtype)
        clipped = lax.min(magnitude, lax.full_like(x, float32_max))
        magnitude = lax.select(lax.is_finite(x), clipped, magnitude)
    return magnitude.astype(jnp.float32)


_FINITE = _Statistic(lax.is_finite, lax.bitwise_and, lax.reduce_and, True)
_MAGNITUDE = _Statistic(
    _magnitude,
    # Not `lax.max`: XLA would reduce each array by itself again.
    lambda a, b: lax.select(lax.gt(a, b), a, b),
    lax.reduce_max,
    0.0,
)


def all_finite(tree: PyTree, *, axis_name: AxisName | None = None) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity.

        all_finite(tree) = all(isfinite(x) for every entry x of every leaf)

    Args:
      tree: Leaves of any dtype and shape. An empty tree is finite, and so is
        every leaf that is not floating.
      axis_name: Name, or several, of the axes of `pmap`, `vmap` or
        `shard_map` over which all devices shall agree. Only the answer crosses
        devices.

    Returns:
      `bool[]`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> print(ols.all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.nan])}))
      False
    """
    return is_finite(tree, None, axis_name)


def max_magnitude(tree: PyTree, *, axis_name: AxisName | None = None) -> jax.Array:
    """The largest magnitude in the tree, infinity when anything is nonfinite.

        max_magnitude(tree) = max(isnan(x) ? inf : abs(x) for every entry x)

    NaN becomes infinity before the reduction, because a maximum over devices
    drops NaN. A complex entry counts by the larger of its parts; a finite float64
    beyond float32's range counts as `finfo(float32).max`.

    Args:
      tree: Leaves of any dtype and shape. An empty tree has magnitude 0, and so
        has every leaf that is not floating.
      axis_name: Name, or several, of the axes of `pmap`, `vmap` or
        `shard_map` over which all devices shall agree. Only the answer crosses
        devices.

    Returns:
      `f32[]`, in the unit of the leaves, from 0 to infinity.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> ols.max_magnitude([jnp.array([1.0, -3.0]), jnp.zeros(0)])
      Array(3., dtype=float32)
      >>> ols.max_magnitude([jnp.array([1.0, jnp.nan])])
      Array(inf, dtype=float32)
    """
    return largest_magnitude(tree, None, axis_name)


def is_finite(
    tree: PyTree, loss_scale: jax.Array | None, axis_name: AxisName | None
) -> jax.Array:
    """`all_finite`, of a tree from which the scale is still to be divided out."""
    return _reduce(tree, loss_scale, _FINITE, lax.pmin, axis_name)


def largest_magnitude(
    tree: PyTree, loss_scale: jax.Array | None, axis_name: AxisName | None
) -> jax.Array:
    """`max_magnitude`, of a tree from which the scale is still to be divided out."""
    return _reduce(tree, loss_scale, _MAGNITUDE, lax.pmax, axis_name)


def _reduce(
    tree: PyTree,
    loss_scale: jax.Array | None,
    statistic: _Statistic,
    reduce_devices: Callable[..., Any],
    axis_name: AxisName | None,
) -> jax.Array:
    """Reads all floating leaves, unscaled, as one scalar, the same on all devices."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    leaves = [leaf for leaf in leaves if leaf.size]
    # No derivative of a verdict; a maximum over devices has none anyway.
    leaves = lax.stop_gradient(leaves)
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    # In order, and not a set, so that all processes make the same program.
    axes = tuple(dict.fromkeys(axis for s in shardings for axis in _axes_of(s.spec)))

    def reduce_here(leaves: list[jax.Array], loss_scale: jax.Array | None) -> jax.Array:
        return jnp.asarray(_read(leaves, loss_scale, statistic, _are_local()))

    if len(axes) > 1 and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # On an explicit mesh shardings are known while tracing. One collective over all
        # axes that occur, where XLA would make one for each set of axes.
        on_each_device: Callable[..., jax.Array] = jax.shard_map(
            lambda *args: reduce_devices(reduce_here(*args), axes),
            mesh=next(s.mesh for s in shardings if any(_axes_of(s.spec))),
            in_specs=([sharding.spec for sharding in shardings], PartitionSpec()),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
        )
        result = on_each_device(leaves, loss_scale)
    else:
        result = reduce_here(leaves, loss_scale)
    names = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if names is None or names == ():
        return result
    try:
        if isinstance(names, tuple):
            # One that varies over some of the axes only is refused by JAX 0.12.
            result = jnp.where(lax.axis_index(names) >= 0, result, result)
        return jnp.asarray(reduce_devices(result, names))
    except NameError as error:
        error.add_note(
            f"(`axis_name` must name axes of the `pmap`, `vmap` or `shard_map` around, "
            f"got {axis_name!r}; under `jit` with sharded arrays leave it out.)"
        )
        raise


def _axes_of(spec: PartitionSpec) -> Iterator[Hashable]:
    """The mesh axes that a sharding is over."""
    for part in spec:
        yield from part if isinstance(part, tuple) else (part,) if part else ()


def _are_local() -> bool:
    """Whether arrays are known to lie on one device each, or to be one device's part.

    Inside `jit` the shardings of an automatic mesh are unknown while tracing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    is_one_device = mesh.size == 1 and not mesh.explicit_axes
    return is_one_device or set(mesh.manual_axes) == set(mesh.axis_names)


@partial(jax.jit, static_argnums=(2, 3))  # One call where not part of a program.
def _read(
    leaves: list[jax.Array],
    loss_scale: jax.Array | None,
    statistic: _Statistic,
    are_local: bool,
) -> jax.Array:
    def entries_of(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        if loss_scale is None:
            leaves = [widen(leaf) for leaf in leaves]
        else:
            leaves = unscale_leaves(list(leaves), loss_scale)
        return [
            statistic.of_entries(part) for leaf in leaves for part in real_parts(leaf)
        ]

    def read_each(*leaves: jax.Array) -> jax.Array:
        return statistic.of_all(entries_of(leaves))

    def read_overlaid(*leaves: jax.Array) -> jax.Array:
        return statistic.of_all(_overlaid(entries_of(leaves), statistic.join))

    def read_concatenated(*leaves: jax.Array) -> jax.Array:
        return statistic.of_all(entries_of(_concatenated(leaves)))

    if not are_local:
        return read_each(*leaves)
    result: jax.Array = lax.platform_dependent(  # Chosen where it is compiled.
        *leaves, cuda=read_concatenated, rocm=read_concatenated, default=read_overlaid
    )
    return result


def _concatenated(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Leaves of each dtype, flat, in groups."""
    of_dtype: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        of_dtype.setdefault(leaf.dtype, []).append(lax.reshape(leaf, (leaf.size,)))
    return [
        lax.concatenate(group, 0)
        for flat in of_dtype.values()
        for group in _groups(flat, _CONCATENATED)
    ]


def _overlaid(
    arrays: list[jax.Array], join: Callable[[jax.Array, jax.Array], jax.Array]
) -> list[jax.Array]:
    """Arrays of one shape and dtype, joined entry by entry in groups."""
    of_shape: dict[tuple[int, ...], list[jax.Array]] = {}
    for array in arrays:
        of_shape.setdefault(array.shape, []).append(array)
    return [
        reduce(join, group)
        for same in of_shape.values()
        for group in _groups(same, _OVERLAID)
    ]


def _groups(arrays: list[jax.Array], size: int) -> Iterator[list[jax.Array]]:
    for start in range(0, len(arrays), size):
        yield arrays[start : start + size]


def _stacked(scalars: list[jax.Array]) -> jax.Array:
    # As a chain of operations XLA would repeat them all for each use of the result,
    # and take minutes to compile a thousand.
    return lax.concatenate([lax.reshape(scalar, (1,)) for scalar in scalars], 0)
