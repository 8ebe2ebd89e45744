"""How the inner optimizer of `loss_scaled` sees the parameters: in float32 or wider."""

import jax
import optax

from optax_lossscale._ground.parameters import fast_of
from optax_lossscale._ground.states import (
    MASTER_WEIGHTS_STATES,
    CompactMasterWeightsState,
)
from optax_lossscale._ground.tree import check_structure, find_by_type, widen


def init_inner(
    optimizer: optax.GradientTransformationExtraArgs, params: optax.Params
) -> optax.OptState:
    """The state of the inner optimizer, for float32 parameters.

    Compact masters depend on the dtypes of the parameters themselves.
    """

    def is_compact(node: object) -> bool:
        return isinstance(node, CompactMasterWeightsState)

    state = optimizer.init(jax.tree.map(widen, params))
    if not find_by_type(state, CompactMasterWeightsState):
        return state
    # Dropped first, so that no moments are held twice.
    state = jax.tree.map(
        lambda node: None if is_compact(node) else node, state, is_leaf=is_compact
    )
    own_state = optimizer.init(params)
    try:
        return jax.tree.map(
            lambda own, wide: own if is_compact(own) else wide,
            own_state,
            state,
            is_leaf=is_compact,
        )
    except ValueError as error:
        raise ValueError(
            "the state of `inner` must have the same structure for float32 parameters "
            f"if it holds compact masters, got: {error}. (Do masks or labels depend on "
            "the dtypes? Compute them from the parameters first.)"
        ) from error


def check_params(params: optax.Params | None, grads: optax.Updates) -> None:
    """Refuses gradients that do not belong to these parameters."""
    if params is not None:
        message = "`updates` must have the tree structure of `params`"
        check_structure(grads, fast_of(params), message)


def wide_params(
    params: optax.Params | None, inner_state: optax.OptState
) -> optax.Params | None:
    """Widens parameters for the optimizer, unless it keeps masters of them."""
    if find_by_type(inner_state, MASTER_WEIGHTS_STATES):
        return params  # `master_weights` rounds its masters to these dtypes.
    return jax.tree.map(widen, params)
