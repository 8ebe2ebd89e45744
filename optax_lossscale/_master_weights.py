"""Parameters in half precision, and float32 masters for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._checks import check_optimizer
from optax_lossscale._normalization import in_normalization
from optax_lossscale._state import MasterWeightsState
from optax_lossscale._tree import (
    is_floating,
    path_name,
    wide_dtype,
    wide_param,
    widen,
)

_CASTABLE = (jnp.float16, jnp.bfloat16, jnp.float32)


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
        Equinox, or a module. Leaves of other dtypes are returned unchanged.
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
    if jnp.dtype(dtype) not in [jnp.dtype(known) for known in _CASTABLE]:
        raise ValueError(
            f"`dtype` must be float16, bfloat16 or float32, got {jnp.dtype(dtype)}."
        )
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    if keep is None:
        kept = in_normalization(params)
    else:
        kept = [keep(path_name(path), leaf) for path, leaf in paths_and_leaves]

    def cast(leaf: Any) -> Any:
        is_castable = getattr(leaf, "dtype", None) in _CASTABLE
        return jnp.asarray(leaf, dtype) if is_castable else leaf

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

    After every step each parameter is exactly its rounded master. If a parameter
    shrinks a thousandfold or more in one step, float32 may not hold
    `round(m) - params`. Then the master is set to the new value of the parameter.

    It may go around `loss_scaled` or inside it. The results are the same, except that
    inside, the option `check_updates` also skips a step that would take a float16
    parameter to infinity. If anything else changes a half-precision parameter, the next
    update sets it back to its master.

    Args:
      inner: Any Optax optimizer. It sees the masters, and the gradients in float32.

    Returns:
      An optimizer. Its `update` needs `params`, and its updates are float32. Parameters
      in float32 or wider are updated as they would be without the wrapper.

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
        # Copies, so that parameters and state can both be donated.
        master = jax.tree.map(
            lambda x: jnp.array(x, wide_dtype(x.dtype)) if is_floating(x) else x, params
        )
        return MasterWeightsState(master, optimizer.init(master))

    def update(
        grads: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("`update` of `master_weights` needs `params`.")
        # Full-precision parameters may have been changed elsewhere, so their present
        # values are their masters.
        master = jax.tree.map(
            lambda p, m: p if p.dtype == m.dtype else m, params, state.master_params
        )
        grads = jax.tree.map(wide_param, grads)
        updates, inner_state = optimizer.update(
            grads, state.inner_state, master, **extra_args
        )
        moved = optax.apply_updates(master, updates)
        updates = jax.tree.map(_update_to, params, moved, updates)
        master = jax.tree.map(_next_master, params, moved, updates)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _update_to(param: jax.Array, master: jax.Array, update: jax.Array) -> jax.Array:
    """The update that takes a parameter to its rounded master."""
    if param.dtype == master.dtype:
        return update
    return widen(master.astype(param.dtype)) - widen(param)


def _next_master(param: jax.Array, master: jax.Array, update: jax.Array) -> jax.Array:
    """The master, or the new parameter where that is not the rounded master."""
    if param.dtype == master.dtype:
        return master
    becomes = (widen(param) + update).astype(param.dtype)
    return jnp.where(becomes == master.astype(param.dtype), master, widen(becomes))
