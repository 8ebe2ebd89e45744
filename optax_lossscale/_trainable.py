"""What of a tree is trained, and how the inner optimizer of `loss_scaled` sees it."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_lossscale._nnx import flatten, is_module, is_state, split_state
from optax_lossscale._state import MASTER_WEIGHTS_STATES, CompactMasterWeightsState
from optax_lossscale._tree import (
    are_same,
    check_structure,
    dtype_of,
    find_by_type,
    is_absent,
    is_floating_array,
    is_numeric,
    wide_param,
)
from optax_lossscale._types import PyTree


def split_trainable(
    tree: PyTree, wrt: Any, *, allow_int: bool
) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The part of an argument to differentiate, and a function that adds the rest.

    An `nnx.State` is reduced to the variables that `wrt` selects; an `nnx.Module` is
    left to NNX. In any other tree, None takes the place of each leaf that is not
    trained. An argument without anything to train is returned whole: JAX differentiates
    Python numbers, and says what is wrong with anything else.
    """
    leaves, structure = flatten(tree)

    def split(leaf: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        if is_floating_array(leaf) or is_module(leaf):
            return leaf, lambda trained: trained
        if is_state(leaf):
            return split_state(leaf, wrt)
        if allow_int and dtype_of(leaf) is not None:
            return leaf, lambda trained: trained
        return None, lambda _: leaf

    parts = list(map(split, leaves))
    trained, merges = [part for part, _ in parts], [merge for _, merge in parts]
    if are_same(trained, leaves) or all(part is None for part in trained):
        return tree, lambda tree: tree

    def merge(tree: PyTree) -> PyTree:
        pairs = zip(merges, structure.flatten_up_to(tree), strict=True)
        return structure.unflatten([merge(part) for merge, part in pairs])

    return structure.unflatten(trained), merge


def parameters_of(params: optax.Params) -> optax.Params:
    """The tree with None in the place of each leaf that is no parameter.

    In a module, such as one of Equinox, only floating and complex arrays are
    parameters, and the rate of dropout is none. In lists, tuples and dicts, all numbers
    and arrays are, as in JAX.
    """
    is_plain = isinstance(params, dict | list | tuple)
    is_param = is_numeric if is_plain else is_floating_array
    if jax.tree_util.all_leaves([params]):
        return params
    return jax.tree.map(lambda leaf: leaf if is_param(leaf) else None, params)


def without_held(params: optax.Params, grads: optax.Updates) -> optax.Params:
    """None for what has no gradient and is no parameter, such as a function.

    So a whole Equinox module can be passed as `params`.
    """
    if all(map(is_floating_array, jax.tree.leaves(params))):
        return params

    def keep(grad: PyTree, param: PyTree) -> PyTree:
        is_one = jax.tree_util.all_leaves([param])
        is_held = grad is None and is_one and not is_floating_array(param)
        return None if is_held else param

    return jax.tree.map(keep, grads, params, is_leaf=is_absent)


def init_inner(
    optimizer: optax.GradientTransformationExtraArgs, params: optax.Params
) -> optax.OptState:
    """The state of the inner optimizer, for float32 parameters.

    Compact masters depend on the dtypes of the parameters themselves.
    """

    def is_compact(node: object) -> bool:
        return isinstance(node, CompactMasterWeightsState)

    params = parameters_of(params)
    state = optimizer.init(jax.tree.map(wide_param, params))
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


def wide_params(
    params: optax.Params | None, grads: optax.Updates, inner_state: optax.OptState
) -> optax.Params | None:
    """Checks parameters against the gradients, and widens them for the optimizer."""
    if params is None:
        return None
    message = "`updates` must have the tree structure of `params`"
    if isinstance(params, optax.LookaheadParams):
        check_structure(grads, params.fast, message)
    else:
        check_structure(grads, params, message)
        params = without_held(params, grads)
    if find_by_type(inner_state, MASTER_WEIGHTS_STATES):
        return params  # `master_weights` rounds its masters to these dtypes.
    return jax.tree.map(wide_param, params)
