"""Parameters in half precision, and float32 masters for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._bits import keep_rounding
from optax_lossscale._checks import check_optimizer
from optax_lossscale._normalization import in_normalization
from optax_lossscale._state import MasterWeightsState
from optax_lossscale._tree import (
    cast_abstract,
    copy_wide,
    dtype_of,
    is_absent,
    is_narrow,
    path_name,
    wide_param,
    widen,
)
from optax_lossscale._types import PyTree

_CASTABLE = tuple(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32)))


def cast_params(
    params: optax.Params,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    keep: Callable[[str, Any], bool] | None = None,
) -> optax.Params:
    """Casts parameters to a dtype, except for those that are kept.

        x.astype(dtype)  for every float32, float16 or bfloat16 leaf x that is not kept

    Use it before training at level O2: parameters then take half the memory, and
    normalization layers stay in float32. Train them with `master_weights`, or small
    updates are rounded away.

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
    if dtype is None or jnp.dtype(dtype) not in _CASTABLE:
        name = None if dtype is None else jnp.dtype(dtype)
        raise ValueError(f"`dtype` must be float16, bfloat16 or float32, got {name}.")
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if keep is None:
        kept = in_normalization(params)
    else:
        kept = [keep(path_name(path), leaf) for path, leaf in paths_and_leaves]

    def cast(leaf: Any) -> Any:
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


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Updates half-precision parameters through a float32 copy of them.

    Use it for parameters in float16 or bfloat16, where an update that is small beside
    its parameter (in float16, less than 2**-11 of it) would be rounded away. With
    float32 masters `m`, and the inner optimizer's updates `u` of the masters, a step is

        m      = m + u
        update = round(m) - params        so that params + update = round(m)

    After every step each parameter is exactly its rounded master, on a GPU too, where
    XLA leaves out casts to half precision and back unless told not to. If a parameter
    shrinks a thousandfold or more in one step, float32 may not hold
    `round(m) - params`. Then the master is set to the new value of the parameter.

    Add the updates with `optax.apply_updates`, which keeps the parameters' dtypes.
    Equinox's `apply_updates` makes them float32, so after each step cast the model
    back: `cast_params(eqx.apply_updates(model, updates))`, with the same `dtype` and
    `keep` as at the start.

    It may go around `loss_scaled` or inside it. The results are the same, except that
    inside, the option `check_updates` also skips a step that would take a float16
    parameter to infinity. If anything else changes a half-precision parameter, the next
    update sets it back to its master.

    Args:
      inner: Any Optax optimizer. It sees the masters, and the gradients in float32.

    Returns:
      An optimizer. Its `update` needs `params`, and its updates are float32 (for
      parameters in float8, float8). Parameters in float32 or wider, and Python numbers,
      are updated as they would be without the wrapper.

    Raises:
      TypeError: If `inner` is not an optimizer.
      ValueError: From `update`, without `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> params = jnp.float16(1.0)
      >>> tx = ols.master_weights(optax.sgd(1e-4))
      >>> updates, state = tx.update(jnp.float16(1.0), tx.init(params), params)
      >>> updates, state.master_params  # The third such step moves the parameter.
      (Array(0., dtype=float32), Array(0.9999, dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1
      (https://arxiv.org/abs/1710.03740).
    """
    optimizer = check_optimizer("inner", inner)

    def init(params: optax.Params) -> MasterWeightsState:
        # Not made from the same masters, which some optimizers store themselves.
        inner_state = optimizer.init(jax.tree.map(wide_param, params))
        return MasterWeightsState(jax.tree.map(copy_wide, params), inner_state)

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("`update` of `master_weights` needs `params`.")
        params = jax.tree.map(_as_array, params)
        # Full-precision parameters may have been changed elsewhere, so their present
        # values are their masters.
        master = jax.tree.map(
            lambda p, m: m if _is_rounded(p, m) else p, params, state.master_params
        )
        updates, inner_state = optimizer.update(
            jax.tree.map(wide_param, updates), state.inner_state, master, **extra_args
        )
        moved = jax.tree.map(_move, updates, master, is_leaf=is_absent)
        updates = jax.tree.map(_update_to, updates, params, moved, is_leaf=is_absent)
        master = jax.tree.map(
            _next_master, updates, params, moved, state.master_params, is_leaf=is_absent
        )
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _as_array(param: PyTree) -> PyTree:
    """Makes an array of a Python number."""
    is_number = isinstance(param, complex | float | int)
    return jnp.asarray(param) if is_number else param


def _move(update: PyTree, master: PyTree) -> PyTree:
    """The updated master; parameters without a gradient have no update."""
    return master if is_absent(update) else optax.apply_updates(master, update)


def _is_rounded(param: PyTree, master: PyTree) -> bool:
    """Whether a parameter is its master, rounded to a narrower dtype."""
    return dtype_of(param) != dtype_of(master)


def _update_to(update: PyTree, param: PyTree, master: PyTree) -> PyTree:
    """The update that takes a parameter to its rounded master."""
    if is_absent(update) or not _is_rounded(param, master):
        return update
    difference = widen(keep_rounding(master.astype(param.dtype))) - widen(param)
    if is_narrow(param):
        return keep_rounding(difference.astype(param.dtype))
    return difference


def _next_master(
    update: PyTree, param: PyTree, master: PyTree, last_master: PyTree
) -> PyTree:
    """The master, or the new parameter where that is not the rounded master."""
    if is_absent(update):
        return last_master  # Not `master`, which may be the parameter's own buffer.
    if not _is_rounded(param, master):
        return master
    becomes = param + update if is_narrow(param) else widen(param) + update
    becomes = keep_rounding(becomes.astype(param.dtype))
    return jnp.where(becomes == master.astype(param.dtype), master, widen(becomes))
