"""Read and replace the float32 masters in a state of `master_weights`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import PyTreeDef

from optax_lossscale._ground.states import (
    MASTER_WEIGHTS_STATES,
    CompactMasterWeightsState,
)
from optax_lossscale._ground.tree import (
    copy_wide,
    find_by_type,
    is_absent,
    is_floating,
    is_numeric,
    path_name,
)
from optax_lossscale._ground.types import PyTree
from optax_lossscale._masters.master_weights import (
    array_of,
    check_dtype,
    is_remainder,
    master_of,
    round_to,
)
from optax_lossscale._masters.remainders import remainder_of


def full_masters(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """Returns the float32 masters of half-precision parameters.

    Use it to save or evaluate a model with all bits that were trained. It takes compact
    masters and full ones.

    Args:
      params: The parameters that belong to this state.
      opt_state: The state of an optimizer with `master_weights`, or any pytree that
        holds such states. If there are several, as under `optax.partition`, no two of
        them may hold a master of the same parameter.

    Returns:
      A tree like `params`, with masters in place of the parameters that have them. It
      may share arrays with `params` and the state, so copy it if a step donates them.

    Raises:
      ValueError: If `opt_state` holds no masters, several for one parameter, none for
        one in half precision, or those of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> params = {"w": jnp.bfloat16(1.0)}
      >>> tx = ols.master_weights(optax.sgd(1e-4), compact=True)
      >>> updates, opt_state = tx.update(params, tx.init(params), params)
      >>> updates, ols.full_masters(params, opt_state)
      ({'w': Array(0., dtype=float32)}, {'w': Array(0.9999, dtype=float32)})
    """
    leaves, structure = _leaves(params)
    stored = _stored_by_leaf(opt_state, params)
    return structure.unflatten(map(master_of, leaves, stored))


def set_full_masters(
    params: optax.Params, opt_state: optax.OptState, masters: optax.Params
) -> tuple[optax.Params, optax.OptState]:
    """Returns parameters and state with other masters; everything else is unchanged.

    Use it to start from float32 parameters without losing bits, or to go from full to
    compact masters and back:

        params = cast_params(masters, jnp.bfloat16)
        opt_state = tx.init(params)
        params, opt_state = set_full_masters(params, opt_state, masters)

    Then `full_masters(params, opt_state)` returns these masters.

    Args:
      params: The parameters; only their dtypes and shapes are used.
      opt_state: As for `full_masters`.
      masters: A tree like `params`, of any floating dtypes.

    Returns:
      New `params`, which are the rounded masters, and the `opt_state` that belongs to
      them. With compact masters use these parameters and not those of `cast_params`,
      which rounds some numbers differently.

    Raises:
      ValueError: As `full_masters`, or if `masters` are not like `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> trained = {"w": jnp.float32(0.1)}
      >>> params = ols.cast_params(trained, jnp.bfloat16)
      >>> opt_state = ols.master_weights(optax.sgd(1e-4), compact=True).init(params)
      >>> params, opt_state = ols.set_full_masters(params, opt_state, trained)
      >>> params, ols.full_masters(params, opt_state)
      ({'w': Array(0.100098, dtype=bfloat16)}, {'w': Array(0.1, dtype=float32)})
    """
    leaves, structure = _leaves(params)
    wanted, _ = _leaves(masters)
    shapes = [[_shape(leaf) for leaf in each] for each in (wanted, leaves)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "`masters` must have the structure and the shapes of `params`, got shapes "
            f"{shapes[0]} instead of {shapes[1]}."
        )
    stored = _stored_by_leaf(opt_state, params)
    rounded = [
        # Copied, so that parameters, state and `masters` can all be donated.
        jnp.array(round_to(master, param, each)) if is_floating(param) else master
        for master, param, each in zip(wanted, leaves, stored, strict=True)
    ]

    def replace(node: PyTree) -> PyTree:
        if not _is_state(node):
            return node
        stored, structure = _leaves(node[0])
        new = map(_store, wanted, rounded, stored)
        return type(node)(structure.unflatten(new), node.inner_state)

    state = jax.tree.map(replace, opt_state, is_leaf=_is_state)
    return structure.unflatten(rounded), state


def _stored_by_leaf(opt_state: optax.OptState, params: optax.Params) -> list[PyTree]:
    """What a state stores for each parameter: a master, a remainder, or None."""
    states = [node for _, node in find_by_type(opt_state, MASTER_WEIGHTS_STATES)]
    if not states:
        is_swapped = find_by_type(params, MASTER_WEIGHTS_STATES)
        hint = "Wrap the optimizer: `master_weights(optimizer)`."
        hint = "Are the arguments swapped?" if is_swapped else hint
        raise ValueError(
            "`opt_state` must hold masters, got none in a tree of type "
            f"{type(opt_state).__name__}. ({hint})"
        )
    paths = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_absent)[0]
    names, leaves = [path_name(path) for path, _ in paths], _leaves(params)[0]
    found: list[PyTree] = [None] * len(leaves)
    for state in states:
        stored = _leaves(state[0])[0]
        _check_shapes(stored, leaves)
        for index, each in enumerate(stored):
            if is_absent(each):
                continue
            if found[index] is not None:
                raise ValueError(
                    "`opt_state` must hold one master for each parameter, got several "
                    f"for {names[index]!r}. (Pass only the state of these parameters.)"
                )
            found[index] = each
            if isinstance(state, CompactMasterWeightsState):
                check_dtype(names[index], leaves[index], each)
    for name, leaf, each in zip(names, leaves, found, strict=True):
        if is_absent(each):
            check_dtype(name, leaf, each)
    return found


def _check_shapes(stored: list[PyTree], params: list[PyTree]) -> None:
    """Refuses masters of other parameters."""
    if len(stored) == len(params) and all(
        is_absent(each) or _shape(each) == _shape(param)
        for each, param in zip(stored, params, strict=True)
    ):
        return
    raise ValueError(
        "`params` must be the parameters of this state, got shapes "
        f"{list(map(_shape, params))} where it stores masters of shapes "
        f"{list(map(_shape, stored))}. (Of an NNX model, pass what the optimizer "
        "trains: `nnx.state(model, nnx.Param)`.)"
    )


def _store(master: PyTree, param: PyTree, stored: PyTree) -> PyTree:
    """What is stored for a master, in place of something else."""
    if is_absent(stored) or not is_numeric(param):
        return stored
    if is_remainder(param, stored):
        return remainder_of(master.astype(jnp.float32), param)
    return copy_wide(master.astype(stored.dtype) if is_floating(param) else master)


def _is_state(node: object) -> bool:
    return isinstance(node, MASTER_WEIGHTS_STATES)


def _leaves(tree: PyTree) -> tuple[list[PyTree], PyTreeDef]:
    """The leaves of a tree, with those that are missing, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_absent)
    return list(map(array_of, leaves)), structure


def _shape(leaf: PyTree) -> tuple[int, ...] | None:
    return jnp.shape(leaf) if is_numeric(leaf) else None
