"""Find the state of a loss scale in any pytree; read and set its scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from optax_lossscale._ground.checks import LARGEST_SCALE, SMALLEST_SCALE, check_scale
from optax_lossscale._ground.states import LossScaleState, NoLossScaleRuleState
from optax_lossscale._ground.tree import find_one, unwrap
from optax_lossscale._ground.types import KeyPath, PyTree


def find_loss_scale_state(tree: PyTree, *, path: str | None = None) -> LossScaleState:
    """Returns the one `LossScaleState` that a pytree holds.

    Use it to read the counts of steps, or to pick one of several states by `path`:
    every other function that takes such a tree also takes the state that was found. The
    tree may be an optimizer state, a Flax `TrainState`, an `nnx.Optimizer` or its
    `opt_state` (whose wrapped arrays are unwrapped), or a `LossScaleState` itself. The
    state is found by its type, never by a field name.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/several_losses.html

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`, or one at `path`.
      path: Keys, indices and field names from the root of the tree to the state, or
        only the first of them, separated by slashes, such as `"generator"`.

    Returns:
      That state.

    Raises:
      ValueError: If the tree holds no `LossScaleState` (the message says what to wrap)
        or several (the message lists their paths), at `path` if it is given.
      TypeError: If `path` is not a string.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = optax.chain(ols.loss_scaled(optax.adam(1e-3)), optax.scale(0.5))
      >>> opt_state = tx.init({"loss_scale": jnp.ones(2)})
      >>> int(ols.find_loss_scale_state(opt_state).step_count)
      0
      >>> several = {"generator": opt_state, "critic": ols.set_loss_scale(opt_state, 8)}
      >>> critic = ols.find_loss_scale_state(several, path="critic")
      >>> ols.get_loss_scale(critic)
      Array(8., dtype=float32)
    """
    return unwrap(_find(tree, path)[1])


def _find(tree: PyTree, path: str | None) -> tuple[KeyPath, LossScaleState]:
    """The key path of the one state at `path`, and the state as the tree holds it."""
    found = find_one(
        tree,
        LossScaleState,
        path,
        must="the tree must hold one LossScaleState",
        pick="`find_loss_scale_state(tree, {})`. Other functions take the found state "
        "in place of the tree; `set_loss_scale` has its own `path`.",
    )
    if found is None:
        hint = (
            "Pass the state that its `init` returns."
            if hasattr(tree, "init")  # An optimizer or a rule.
            else "Are the arguments swapped? Was the optimizer wrapped: "
            "`loss_scaled(optimizer)`? If this is a checkpoint that was restored "
            "without a target, restore into a target. If it comes from `nnx.split` or "
            "`nnx.state`, pass the `nnx.Optimizer`."
        )
        raise ValueError(
            "the tree must hold a LossScaleState, got none in a tree of type "
            f"{type(tree).__name__}. ({hint})"
        )
    return found


def get_loss_scale(tree: PyTree) -> jax.Array:
    """Returns the current loss scale, `f32[]`.

        get_loss_scale(tree) = find_loss_scale_state(tree).loss_scale

    For `no_loss_scale()` the result is the constant 1, so that a compiled program
    multiplies by nothing.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/logging.html

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`.

    Returns:
      Its `loss_scale`, dimensionless.

    Raises:
      ValueError: If `tree` holds no `LossScaleState`, or several (the message says how
        to pick one).

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> opt_state = ols.loss_scaled(optax.adam(1e-3)).init(jnp.ones(2))
      >>> ols.get_loss_scale(opt_state)
      Array(32768., dtype=float32)
    """
    state = find_loss_scale_state(tree)
    is_unscaled = isinstance(state.rule_state, NoLossScaleRuleState)
    return jnp.ones_like(state.loss_scale) if is_unscaled else state.loss_scale


def set_loss_scale(
    tree: PyTree, value: jax.typing.ArrayLike, *, path: str | None = None
) -> PyTree:
    """Returns the same tree with another loss scale; everything else is unchanged.

        get_loss_scale(set_loss_scale(tree, value)) = value

    The rule continues from the new scale with its present counters. The scale may be
    outside the bounds of `dynamic_loss_scale`: the next growth takes it down to the
    cap, and the next backoff raises it to the floor. `headroom_loss_scale` computes
    each scale anew, within its bounds.

    The tree is not changed in place, so use the result; for an `nnx.Optimizer`,
    `optimizer.opt_state = set_loss_scale(optimizer.opt_state, 8.0)`.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/checkpoints.html

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`, or one at `path`.
      value: The new scale, dimensionless, from `2**-126` to `2**126`. Under `jit` a
        value outside this range cannot be refused; the old scale is kept instead.
      path: As in `find_loss_scale_state`.

    Returns:
      A tree of the same type. The scale keeps its sharding.

    Raises:
      ValueError: If `value` is concrete and outside its range, if `tree` holds no
        `LossScaleState` or several, or if its state belongs to `no_loss_scale()`.
      TypeError: If `value` is not a number, or `path` is not a string.

    Example:
      >>> import optax_lossscale as ols
      >>> state = ols.dynamic_loss_scale().init()
      >>> ols.get_loss_scale(ols.set_loss_scale(state, 256))
      Array(256., dtype=float32)
    """
    place, state = _find(tree, path)
    if isinstance(state.rule_state, NoLossScaleRuleState):
        raise ValueError(
            f"`value` must not be set on a state of `no_loss_scale()`, got {value}. "
            "(Its gradients are never unscaled; use `static_loss_scale(1.0)`.)"
        )
    if not isinstance(value, jax.core.Tracer):
        value = check_scale("value", value)
    value = jnp.asarray(value, jnp.float32)
    in_range = (value >= SMALLEST_SCALE) & (value <= LARGEST_SCALE)

    def replace_scale(keys: KeyPath, node: PyTree) -> PyTree:
        if keys != place:
            return node
        loss_scale = jax.tree.map(
            lambda old: jnp.full_like(old, jnp.where(in_range, value, old)),
            node.loss_scale,
        )
        return node._replace(loss_scale=loss_scale)

    return jax.tree_util.tree_map_with_path(
        replace_scale, tree, is_leaf=lambda node: isinstance(node, LossScaleState)
    )
