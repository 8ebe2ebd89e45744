"""Float32 masters of parameters in half precision."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._ground.bits import keep_rounding, same_bits
from optax_lossscale._ground.checks import check_flag, check_optimizer
from optax_lossscale._ground.parameters import gradients_of, parameters_of, with_zeros
from optax_lossscale._ground.states import (
    MASTER_WEIGHTS_STATES,
    CompactMasterWeightsState,
    LossScaleState,
    MasterWeightsState,
)
from optax_lossscale._ground.tree import (
    cast_abstract,
    copy_wide,
    dtype_of,
    find_by_type,
    is_absent,
    is_float8,
    path_name,
    unwrapped,
    widen,
)
from optax_lossscale._ground.types import PyTree
from optax_lossscale._masters.remainders import (
    REMAINDERS,
    first_remainder,
    join_master,
    remainder_of,
    round_master,
)

_State: TypeAlias = MasterWeightsState | CompactMasterWeightsState


def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps, *, compact: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Trains half-precision parameters through float32 masters of them.

    Use `tx = loss_scaled(master_weights(optimizer))`, or `master_weights` alone for
    bfloat16, and call `tx.init` with parameters that `cast_params` has cast. Without
    masters, an update that is small beside its parameter (in float16, less than 2**-11
    of it) would be rounded away. With masters `m`, and the inner optimizer's updates
    `u` of the masters, a step is

        m      = m + u
        update = round(m) - params        so that params + update = round(m)

    Add the updates with `optax.apply_updates`. Equinox's `apply_updates` makes the
    parameters float32, so after each step cast the model back:
    `cast_params(eqx.apply_updates(model, updates))`, with the same `dtype` and `keep`
    as at the start. Nothing else may change the updates: schedules and clips go inside.
    If something else changes a half-precision parameter, the next update sets it back
    to its master. `full_masters` returns the masters, `set_full_masters` replaces them.

    **Compact masters.** With `compact=True` the state holds only the 16 bits that each
    parameter lacks. A parameter and its master then take 4 bytes instead of 6. Neither
    the parameters nor the state are complete without the other, so save both. In
    bfloat16 each master is kept to the bit. In float16, magnitudes below `2**-16` are
    rounded to multiples of `2**-40`, and those beyond 65536 become infinite.
    `docs/guides/half_precision_parameters.md` compares both forms.

    Args:
      inner: Any Optax optimizer. It sees the masters, and the gradients in float32.
      compact: Whether to hold 16 bits for each float16 or bfloat16 parameter, instead
        of a float32 copy. (Parameters in float8 have a float32 master all the same.)

    Returns:
      An optimizer. Its `update` needs `params`, and its updates are float32 (for
      parameters in float8, float8). Parameters in float32 or wider are updated as they
      would be without the wrapper.

    Raises:
      TypeError: If `inner` is not an optimizer, or `compact` is not a bool.
      ValueError: From `update`, without `params`, with the state of the other form, or,
        if masters are compact, with a parameter in another dtype than at first.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> params = jnp.float16(1.0)
      >>> tx = ols.master_weights(optax.sgd(1e-4))
      >>> updates, state = tx.update(jnp.float16(1.0), tx.init(params), params)
      >>> updates, state.master_params  # The third such step moves the parameter.
      (Array(0., dtype=float32), Array(0.9999, dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.1
      (https://arxiv.org/abs/1710.03740). Compact masters:
      `DistributedFusedAdam(store_param_remainders=True)` of NVIDIA apex, which loses a
      bit of some masters (https://github.com/NVIDIA/apex/issues/1842), and
      https://github.com/pytorch/pytorch/issues/127189.
    """
    optimizer = check_optimizer("inner", inner)
    is_compact = check_flag("compact", compact)
    state_type = MASTER_WEIGHTS_STATES[is_compact]
    first_stored = _first_remainder if is_compact else copy_wide

    def init(params: optax.Params) -> _State:
        params = parameters_of(params)
        # Not made from the same masters, which some optimizers store themselves.
        inner_state = optimizer.init(jax.tree.map(widen, params))
        return state_type(jax.tree.map(first_stored, params), inner_state)

    def update(
        updates: optax.Updates,
        state: _State,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, _State]:
        if params is None:
            raise ValueError("`update` of `master_weights` needs `params`.")
        _check_form(state, is_compact)
        stored, inner_state = state
        original_params, params = params, parameters_of(params)
        updates = gradients_of(params, updates)
        params = jax.tree.map(array_of, params)
        if is_compact:
            jax.tree_util.tree_map_with_path(
                lambda path, *leaves: check_dtype(path_name(path), *leaves),
                params,
                stored,
                is_leaf=is_absent,
            )
        master = jax.tree.map(master_of, params, stored, is_leaf=is_absent)
        updates, inner_state = optimizer.update(
            jax.tree.map(widen, updates), inner_state, master, **extra_args
        )
        keeps_bits = bool(find_by_type(inner_state, LossScaleState))
        structure: Any = jax.tree.structure(updates, is_leaf=is_absent)
        columns = map(structure.flatten_up_to, (updates, params, master, stored))
        pairs = [
            _round_update(*leaves, keeps_bits=keeps_bits)
            for leaves in zip(*columns, strict=True)
        ]
        updates = structure.unflatten(update for update, _ in pairs)
        stored = structure.unflatten(each for _, each in pairs)
        updates = with_zeros(updates, original_params)
        return updates, state_type(stored, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def array_of(param: PyTree) -> PyTree:
    """Makes an array of a Python number or a wrapped array."""
    is_number = isinstance(param, complex | float | int)
    return jnp.asarray(param) if is_number else unwrapped(param)


def _first_remainder(param: PyTree) -> PyTree:
    """What is stored for a parameter at first if masters are compact."""
    if is_float8(param):
        return copy_wide(param)  # It lacks more than 16 bits.
    dtype = REMAINDERS.get(dtype_of(param))
    if dtype is None:
        return optax.MaskedNode()
    if isinstance(param, jax.ShapeDtypeStruct):
        return jnp.zeros_like(cast_abstract(param, dtype))
    return first_remainder(unwrapped(param))


def is_remainder(param: PyTree, stored: PyTree) -> bool:
    # `np.dtype(np.float64) == None` is True.
    remainder = REMAINDERS.get(dtype_of(param))
    return remainder is not None and dtype_of(stored) == remainder


def _is_rounded(param: PyTree, stored: PyTree) -> bool:
    """Whether a parameter is a stored master, rounded to a narrower dtype."""
    are_absent = is_absent(param) or is_absent(stored)
    return not are_absent and dtype_of(param) != dtype_of(stored)


def master_of(param: PyTree, stored: PyTree) -> PyTree:
    """The master of a parameter, for which a master or a remainder is stored.

    Full-precision parameters may have been changed elsewhere, so their present values
    are their masters.
    """
    if not _is_rounded(param, stored):
        return param
    if not is_remainder(param, stored):
        return stored
    if isinstance(stored, jax.ShapeDtypeStruct):
        return cast_abstract(stored, jnp.float32)
    return join_master(param, jnp.asarray(stored))


def round_to(master: PyTree, param: PyTree, stored: PyTree) -> PyTree:
    """The rounded master, in the dtype of the parameter."""
    if is_remainder(param, stored):
        return round_master(master.astype(jnp.float32), param.dtype)
    return keep_rounding(master.astype(param.dtype))


def _round_update(
    update: PyTree, param: PyTree, master: PyTree, stored: PyTree, *, keeps_bits: bool
) -> tuple[PyTree, PyTree]:
    """The update that takes a parameter to its rounded master, and what is stored then.

    What is stored belongs to the value that the parameter will have, which may not be
    the rounded master. With `keeps_bits` a parameter that is its rounded master already
    is updated by -0.0. So a step that is skipped inside changes no bit of it, be it
    -0.0 or infinite. (In a step that is skipped outside, all updates are -0.0.)
    """
    if is_absent(update):  # Parameters without a gradient have no update.
        return update, stored
    master = optax.apply_updates(master, update)
    if not _is_rounded(param, stored):
        return update, stored if is_absent(stored) else master
    rounded = round_to(master, param, stored)
    update = widen(rounded) - widen(param)
    if is_float8(param):
        update = keep_rounding(update.astype(param.dtype))
    if keeps_bits:
        nothing = jnp.full_like(update, -0.0)
        update = jnp.where(same_bits(rounded, param), nothing, update)
    becomes = param + update if is_float8(param) else widen(param) + update
    becomes = keep_rounding(becomes.astype(param.dtype))
    if is_remainder(param, stored):
        return update, remainder_of(master, becomes)
    is_rounded_master = becomes == master.astype(param.dtype)
    return update, jnp.where(is_rounded_master, master, widen(becomes))


def _check_form(state: _State, is_compact: bool) -> None:
    """Refuses the state of full masters where they are compact, and vice versa."""
    if isinstance(state, MASTER_WEIGHTS_STATES[is_compact]):
        return
    if isinstance(state, MASTER_WEIGHTS_STATES):
        hint = "To convert it: `full_masters` and `set_full_masters`."
    else:
        hint = (
            "Pass what `init` or the last `update` returned. To add masters to a run, "
            "make a new state with `init`, and replace its `inner_state`."
        )
    raise ValueError(
        f"`state` must be one of `master_weights` with `compact={is_compact}`, got a "
        f"{type(state).__name__}. ({hint})"
    )


def check_dtype(name: str, param: PyTree, stored: PyTree) -> None:
    """Refuses a parameter for which a compact state does not store what it needs."""
    got, dtype = dtype_of(stored), dtype_of(param)
    expected = np.dtype(np.float32) if is_float8(param) else REMAINDERS.get(dtype)
    if is_absent(param) or got == expected:
        return
    if got is None:
        has = "no master"
        hint = (
            "Was the state made from float32 parameters, or with another `keep`? Make "
            "it from these ones, then call `set_full_masters`. Is it frozen? Pass only "
            "what is trained."
        )
    elif got in REMAINDERS.values():
        has = "a remainder of another dtype"
        hint = (
            "Has the model not been cast back, or to another dtype? Equinox's "
            "`apply_updates` does not keep dtypes. Or are these the masters?"
        )
    else:
        has = f"an array in {got}"
        hint = "Has something else cast or restored the state?"
    raise ValueError(
        "`params` must have the dtypes of which the state was made, got parameter "
        f"{name!r} of shape {jnp.shape(param)} in {dtype}, for which the state has "
        f"{has}. ({hint})"
    )
