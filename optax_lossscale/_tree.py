"""Functions on pytrees: scale, unscale, and the check.

What each kind of leaf means, here and in the wrapper; the first two are "floating":

* float16, bfloat16, float8, float32: computed in float32; float64 in float64;
* complex: real and imaginary part, each as above;
* integer, bool, `float0`, keys and other extended dtypes: passed through as they
  are, always finite;
* `None`, `optax.MaskedNode`: no leaves. Empty arrays: finite, magnitude zero.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from optax_lossscale._state import PyTree, get_loss_scale

# One axis, or several, of pmap, vmap or shard_map.
AxisName = Hashable
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
    return _multiply(tree, get_loss_scale(state))


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
        return _multiply(part, loss_scale, reciprocal=True) if is_scaled else part

    return jax.tree.map(unscale_part, resolve_mask(mask, tree), tree)


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

    def all_leaves_finite(leaves: list[jax.Array]) -> jax.Array:
        finite = jnp.asarray(True)
        for leaf in leaves:
            finite &= jnp.isfinite(leaf).all()
        return finite

    return _reduce(tree, all_leaves_finite, lax.pmin, axis_name)


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

    def largest_of_leaves(leaves: list[jax.Array]) -> jax.Array:
        largest = jnp.zeros((), jnp.float32)
        for leaf in leaves:
            largest = jnp.maximum(largest, _leaf_magnitude(leaf))
        return largest

    return _reduce(tree, largest_of_leaves, lax.pmax, axis_name)


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
    array = jnp.asarray(leaf)
    return array.astype(wide_dtype(array.dtype))


def wide_param(param: PyTree) -> PyTree:
    """A parameter, perhaps abstract, as the inner optimizer's `init` shall see it."""
    if isinstance(param, jax.ShapeDtypeStruct) and is_floating(param):
        dtype = wide_dtype(param.dtype)
        return jax.ShapeDtypeStruct(param.shape, dtype, sharding=param.sharding)
    return widen(param) if is_floating(param) else param


def _multiply(
    tree: PyTree, loss_scale: jax.Array, *, reciprocal: bool = False
) -> PyTree:
    def multiply(leaf: PyTree) -> PyTree:
        if not is_floating(leaf):
            return leaf
        array = widen(leaf)
        factor = loss_scale.astype(jnp.finfo(array.dtype).dtype)
        factor = 1 / factor if reciprocal else factor
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            # A complex product would turn an infinite part into NaN in the other.
            return lax.complex(array.real * factor, array.imag * factor)
        return array * factor

    return jax.tree.map(multiply, tree)


def _reduce(
    tree: PyTree,
    reduce_leaves: Callable[[list[jax.Array]], jax.Array],
    reduce_devices: Callable[..., Any],
    axis_name: AxisName | None,
) -> jax.Array:
    """Reduces all floating leaves to one scalar, the same on all devices."""
    leaves = [widen(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    # In order, and not a set, so that all processes make the same program.
    axes = tuple(dict.fromkeys(axis for s in shardings for axis in _axes_of(s.spec)))

    def reduce_here(leaves: list[jax.Array]) -> jax.Array:
        # No derivative of a verdict; a maximum over devices has none anyway.
        return lax.stop_gradient(reduce_leaves(leaves))

    if len(axes) > 1 and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        # On an explicit mesh shardings are known while tracing. One collective over all
        # axes that occur, where XLA would make one for each set of axes.
        on_each_device: Callable[..., jax.Array] = jax.shard_map(
            lambda leaves: reduce_devices(reduce_here(leaves), axes),
            mesh=next(s.mesh for s in shardings if any(_axes_of(s.spec))),
            in_specs=([sharding.spec for sharding in shardings],),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
        )
        result = on_each_device(leaves)
    else:
        result = reduce_here(leaves)
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


def _leaf_magnitude(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.maximum(_leaf_magnitude(array.real), _leaf_magnitude(array.imag))
    magnitude = jnp.where(jnp.isnan(array), jnp.inf, jnp.abs(array))
    largest = jnp.max(magnitude, initial=0)
    float32_max = jnp.finfo(jnp.float32).max.astype(array.dtype)
    in_range = jnp.where(
        jnp.isfinite(largest), jnp.minimum(largest, float32_max), largest
    )
    return in_range.astype(jnp.float32)
