"""Parameters in half precision."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.checks import check_float_dtype
from optax_lossscale._ground.normalization import in_normalization
from optax_lossscale._ground.tree import (
    cast_abstract,
    dtype_of,
    keep_rounding,
    path_name,
)
from optax_lossscale._ground.types import PyTree

_CASTABLE = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32)))


def cast_params(
    params: optax.Params,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    keep: Callable[[str, PyTree], bool] | None = None,
) -> optax.Params:
    """Casts parameters to a dtype, except for those that are kept.

    Use it before training at level O2: parameters then take half the memory, and
    normalization layers stay in float32. Train them with `master_weights`, or small
    updates are rounded away.

        x.astype(dtype)  for every float32, float16 or bfloat16 leaf x that is not kept

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/half_precision_parameters.html

    Args:
      params: A pytree of arrays of any shape, such as the parameters of Flax, Haiku or
        Equinox, or a module. `jax.ShapeDtypeStruct` leaves are cast like arrays, and
        keep their shardings. Leaves of other dtypes are returned unchanged.
      dtype: float16 or bfloat16, or float32 to cast back.
      keep: A function of a leaf's path, such as `"layer/kernel"`, and the leaf. Where
        it returns True the leaf is not cast. None keeps normalization layers, which are
        recognized by the name of their class or of a key in the path: `LayerNorm_0`,
        `batch_norm`, `norm1`, `ln_f`.

    Returns:
      The same tree, with every leaf of these dtypes that is not kept cast to `dtype`.

    Raises:
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `dtype` is not one of the three.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> params = {"Dense_0": {"bias": jnp.ones(2)}, "LayerNorm_0": jnp.ones(2)}
      >>> ols.cast_params(params)
      {'Dense_0': {'bias': Array([1., 1.], dtype=float16)},
       'LayerNorm_0': Array([1., 1.], dtype=float32)}

    References:
      `opt_level="O2"` of NVIDIA apex (https://nvidia.github.io/apex/amp.html).
    """
    dtype = jnp.dtype(check_float_dtype("dtype", dtype))
    if dtype not in _CASTABLE:
        raise ValueError(f"`dtype` must be float16, bfloat16 or float32, got {dtype}.")
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if keep is None:
        kept = in_normalization(params)
    else:
        kept = [keep(path_name(path), leaf) for path, leaf in paths_and_leaves]

    def cast(leaf: PyTree) -> PyTree:
        if dtype_of(leaf) not in _CASTABLE:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return cast_abstract(leaf, dtype)
        return keep_rounding(jnp.asarray(leaf, dtype))

    leaves = [
        leaf if is_kept else cast(leaf)
        for (_, leaf), is_kept in zip(paths_and_leaves, kept, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
