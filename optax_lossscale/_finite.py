"""The check: whether every entry of every leaf is finite.

It needs one read of the leaves, and nothing else should cost anything. Infinity is the
largest magnitude, and NaN is made to count as infinity, so one reduction serves as the
check and as the statistic. What is cheap differs:

* On a GPU each reduction is two kernels, and launches are what costs. Leaves are read
  in groups, as one concatenated array, which is never written.
* On a CPU whatever is computed of an entry before a reduction is written to memory
  first. The maximum and the minimum of the raw entries need nothing before; both hand
  a NaN on.
* On a TPU, each leaf by itself: there a concatenation is copied.
* Where leaves may be sharded, as well: to concatenate them would gather them, and a
  maximum over devices drops NaN, so it becomes infinity before.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from optax_lossscale._state import PyTree
from optax_lossscale._tree import inverse, is_floating, widen

# One axis, or several, of pmap, vmap or shard_map.
AxisName = Hashable

# Of 1000 leaves 17 groups, so 34 kernels; much larger groups are written first.
_LEAVES_PER_GROUP = 60


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
    return _reduce(tree, loss_scale, jnp.isfinite, lax.pmin, axis_name)


def largest_magnitude(
    tree: PyTree, loss_scale: jax.Array | None, axis_name: AxisName | None
) -> jax.Array:
    """`max_magnitude`, of a tree from which the scale is still to be divided out."""
    return _reduce(tree, loss_scale, lambda largest: largest, lax.pmax, axis_name)


def _reduce(
    tree: PyTree,
    loss_scale: jax.Array | None,
    finish: Callable[[jax.Array], jax.Array],
    reduce_devices: Callable[..., Any],
    axis_name: AxisName | None,
) -> jax.Array:
    """`finish` of the largest magnitude of all leaves, the same on all devices."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    # No derivative of a verdict; a maximum over devices has none anyway.
    leaves = lax.stop_gradient(leaves)
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    # In order, and not a set, so that all processes make the same program.
    axes = tuple(dict.fromkeys(axis for s in shardings for axis in _axes_of(s.spec)))

    def reduce_here(leaves: list[jax.Array], loss_scale: jax.Array | None) -> jax.Array:
        return finish(_largest(leaves, loss_scale))

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


def _largest(leaves: list[jax.Array], loss_scale: jax.Array | None) -> jax.Array:
    """The largest magnitude, after unscaling, as float32; infinity for NaN.

    Rounding never changes an order, so it is enough to unscale the largest.
    """
    largest = jnp.zeros((), jnp.float32)
    for magnitude in _largest_of_dtypes(leaves, _are_local()):
        wide = widen(magnitude)
        if loss_scale is not None:
            wide *= inverse(loss_scale, wide.dtype)
        if wide.dtype == jnp.float64:
            in_range = jnp.minimum(wide, jnp.finfo(jnp.float32).max.astype(wide.dtype))
            wide = jnp.where(jnp.isfinite(wide), in_range, wide)
        finite_or_inf = jnp.where(jnp.isnan(wide), jnp.inf, wide)
        largest = jnp.maximum(largest, finite_or_inf.astype(jnp.float32))
    return largest


def _are_local() -> bool:
    """Whether arrays are known to lie on one device each, or to be one device's part.

    Inside `jit` the shardings of an automatic mesh are unknown while tracing.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    is_one_device = mesh.size == 1 and not mesh.explicit_axes
    return is_one_device or set(mesh.manual_axes) == set(mesh.axis_names)


@partial(jax.jit, static_argnums=1)  # One call where it is not part of a program.
def _largest_of_dtypes(leaves: list[jax.Array], are_local: bool) -> list[jax.Array]:
    """For every dtype that occurs, the largest magnitude in it; NaN or infinity."""
    of_dtype: dict[Any, list[jax.Array]] = {}
    for leaf in filter(jnp.size, leaves):
        is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        for part in (leaf.real, leaf.imag) if is_complex else (leaf,):
            # Float8 has no reductions; and of one dtype, one collective is enough.
            as_is = are_local and part.dtype.itemsize > 1
            real = part if as_is else widen(part)
            of_dtype.setdefault(real.dtype, []).append(real)
    choose = partial(
        lax.platform_dependent,
        cpu=_largest_of_extremes,
        cuda=_largest_of_groups,
        rocm=_largest_of_groups,
        default=_largest_of_each,
    )
    largest_of = choose if are_local else _largest_of_each
    return [largest_of(*leaves) for leaves in of_dtype.values()]


def _largest_of_each(*leaves: jax.Array) -> jax.Array:
    def largest(leaf: jax.Array) -> jax.Array:
        is_nan = lax.ne(leaf, leaf)
        infinity = lax.full_like(leaf, jnp.inf)
        return _maximum(lax.select_n(is_nan, lax.abs(leaf), infinity))

    return reduce(lax.max, map(largest, leaves))


def _largest_of_groups(*leaves: jax.Array) -> jax.Array:
    flat = [lax.reshape(leaf, (leaf.size,)) for leaf in leaves]
    starts = range(0, len(flat), _LEAVES_PER_GROUP)
    groups = [flat[start : start + _LEAVES_PER_GROUP] for start in starts]
    return _largest_of_each(*(lax.concatenate(group, 0) for group in groups))


def _largest_of_extremes(*leaves: jax.Array) -> jax.Array:
    highest = map(_maximum, leaves)
    lowest = [lax.reduce_min(leaf, range(leaf.ndim)) for leaf in leaves]
    # One array of them all, or XLA repeats what is made of them for each of its uses.
    extremes = [lax.reshape(extreme, (1,)) for extreme in (*highest, *lowest)]
    return _maximum(lax.abs(lax.concatenate(extremes, 0)))


def _maximum(array: jax.Array) -> jax.Array:
    return lax.reduce_max(array, range(array.ndim))
