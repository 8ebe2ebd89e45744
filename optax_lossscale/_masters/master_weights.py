"""Float32 masters of parameters in half precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.checks import check_optimizer
from optax_lossscale._ground.parameters import gradients_of, parameters_of, with_zeros
from optax_lossscale._ground.states import MasterWeightsState
from optax_lossscale._ground.tree import copy_wide, dtype_of, is_absent, widen
from optax_lossscale._ground.types import PyTree


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Trains half-precision parameters through float32 masters of them.

    Use `tx = loss_scaled(master_weights(optimizer))`, or `master_weights` alone for
    bfloat16, and call `tx.init` with parameters that `cast_params` has cast. Without
    masters, an update that is small beside its parameter (in float16, less than 2**-11
    of it) would be rounded away. With masters `m`, and the inner optimizer's updates
    `u` of the masters, a step is

        m      = m + u
        update = round(m) - params        so that params + update = round(m)

    Add the updates with `optax.apply_updates` (Equinox's makes the parameters float32).
    Nothing else may change the updates: schedules and clips go inside. If something
    else changes a half-precision parameter, the next update sets it back to its master.
    `optax.tree.get(opt_state, "master_params")` returns the masters.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/half_precision_parameters.html

    Args:
      inner: Any Optax optimizer. It sees the masters, and the gradients in float32.

    Returns:
      An optimizer. Its `update` needs `params`, and its updates are float32. Parameters
      in float32 or wider are updated as they would be without the wrapper.

    Raises:
      TypeError: If `inner` is not an optimizer.
      ValueError: From `update`, without `params`, or with another optimizer's state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> params = jnp.float16(1.0)
      >>> tx = ols.master_weights(optax.sgd(1e-4))
      >>> updates, state = tx.update(jnp.float16(1.0), tx.init(params), params)
      >>> updates, state.master_params  # The third such step moves the parameter.
      (Array(-0., dtype=float32), Array(0.9999, dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1
      (https://arxiv.org/abs/1710.03740).
    """
    optimizer = check_optimizer("inner", inner)

    def init(params: optax.Params) -> MasterWeightsState:
        params = parameters_of(params)
        # A separate copy, since some optimizers store what they are given, and both are
        # donated.
        inner_state = optimizer.init(jax.tree.map(widen, params))
        return MasterWeightsState(jax.tree.map(copy_wide, params), inner_state)

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("`update` of `master_weights` needs `params`.")
        if not isinstance(state, MasterWeightsState):
            raise ValueError(
                "`state` must be one of `master_weights`, got one of type "
                f"{type(state).__name__}. (To add masters to a run, make a new state "
                "with `init`, and replace its `inner_state`.)"
            )
        own = parameters_of(params)
        masters = jax.tree.map(_master_of, own, state.master_params)
        grads = jax.tree.map(widen, gradients_of(updates))
        updates, inner_state = optimizer.update(
            grads, state.inner_state, masters, **extra_args
        )
        masters = jax.tree.map(_add, updates, masters, is_leaf=is_absent)
        updates = jax.tree.map(_difference, updates, masters, own, is_leaf=is_absent)
        return with_zeros(updates, params), MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_half(param: PyTree) -> bool:
    dtype = dtype_of(param)
    return dtype is not None and jnp.finfo(dtype).bits < 32


def _master_of(param: PyTree, master: PyTree) -> PyTree:
    """The stored master, or a full-precision parameter as it is now."""
    return master if _is_half(param) else param


def _add(update: PyTree, master: PyTree) -> PyTree:
    return master if is_absent(update) else optax.apply_updates(master, update)


def _difference(update: PyTree, master: PyTree, param: PyTree) -> PyTree:
    """The update that takes a half-precision parameter to its rounded master."""
    if is_absent(update) or not _is_half(param):
        return update
    rounded = widen(master.astype(param.dtype))
    # Adding -0.0 changes no bit of a parameter, be it -0.0 or infinite.
    param = widen(param)
    return jnp.where(rounded == param, -0.0, rounded - param)
