"""Find the state of a loss scale in any pytree; read and set its scale."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from optax_lossscale._ground.checks import LARGEST_SCALE, SMALLEST_SCALE, check_scales
from optax_lossscale._ground.states import LossScaleState, Unscaled
from optax_lossscale._ground.tree import find_one, is_floating, strengthen, unwrap
from optax_lossscale._ground.types import KeyPath, PyTree


def find_loss_scale_state(tree: PyTree, *, path: str | None = None) -> LossScaleState:
    """Returns the one `LossScaleState` that a pytree holds.

    Use it to read the counts of steps, or to pick one of several states by `path`:
    every other function that takes such a tree also takes the state that was found. The
    tree may be an optimizer state, a Flax `TrainState`, an `nnx.Optimizer` or its
    `opt_state` (whose wrapped arrays are unwrapped), or a `LossScaleState` itself. The
    state is found by its type, never by a field name.

    The gradients of one loss have one scale: to train several models on one loss, wrap
    one optimizer of them all. With two, the scales differ after the first overflow of
    only one of them.

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
    state: LossScaleState = unwrap(_find(tree, path)[1])
    return state


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
            else "Wrap the optimizer, `loss_scaled(optimizer)`, or make a state with a "
            "rule's `init()`. `nnx.split`, `nnx.state` and a checkpoint restored "
            "without a target flatten NamedTuples away: pass the `nnx.Optimizer`, its "
            "`opt_state`, or restore into a target."
        )
        raise ValueError(
            "the tree must hold a LossScaleState, got none in a tree of type "
            f"{type(tree).__name__}. ({hint})"
        )
    return found


def with_arrays(state: LossScaleState) -> LossScaleState:
    """The state with arrays, where a checkpoint may have restored numbers.

    `rule_state` is unchanged, since only the rule knows its dtypes.
    """
    return LossScaleState(
        loss_scale=as_array(state.loss_scale, jnp.float32),
        last_finite=as_array(state.last_finite, jnp.bool_),
        notfinite_count=as_array(state.notfinite_count, jnp.int32),
        total_notfinite=as_array(state.total_notfinite, jnp.int32),
        step_count=as_array(state.step_count, jnp.int32),
        rule_state=state.rule_state,
    )


def as_array(restored: PyTree, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A strongly typed array of the array, number or list that was restored."""
    is_array = isinstance(restored, jax.Array) and restored.dtype == dtype
    array = restored if is_array else jnp.asarray(restored).astype(dtype)
    strong: jax.Array = strengthen(array)
    return strong


def get_loss_scale(tree: PyTree) -> jax.Array:
    """Returns the current loss scale, `f32[]`.

        get_loss_scale(tree) = find_loss_scale_state(tree).loss_scale

    For `no_loss_scale()` the result is always 1, whatever its state holds, because
    nothing would unscale the gradients.

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
    state = with_arrays(find_loss_scale_state(tree))
    is_unscaled = isinstance(state.rule_state, Unscaled)
    return _ones_like(state.loss_scale) if is_unscaled else state.loss_scale


# Jitted, because outside `jit` the one would be sent to the device, which
# `jax_transfer_guard="disallow"` refuses.
@functools.partial(jax.jit, inline=True)
def _ones_like(array: jax.Array) -> jax.Array:
    return jnp.ones_like(array)


def set_loss_scale(
    tree: PyTree, value: jax.typing.ArrayLike, *, path: str | None = None
) -> PyTree:
    """Returns the same tree with another loss scale; everything else is unchanged.

        get_loss_scale(set_loss_scale(tree, value)) = value

    The rule continues from the new scale with its present counters. The scale may be
    outside the bounds of `dynamic_loss_scale`: below the floor and the initial scale an
    overflow keeps it, and from above the cap the next growth takes it down to the cap.
    The rules in `presets` do as their systems do, most of which raise it to the floor,
    and `headroom_loss_scale` computes each scale anew, within its bounds.

    The tree is not changed in place, so use the result; for an `nnx.Optimizer`,
    `optimizer.opt_state = set_loss_scale(optimizer.opt_state, 8.0)`.

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`, or one at `path`.
      value: The new scale, dimensionless, from `2**-126` to `2**126`. Under `jit` a
        value outside this range cannot be refused; the old scale is kept instead.
      path: As in `find_loss_scale_state`.

    Returns:
      A tree of the same type. The scale keeps its dtype, weak type and sharding.

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
    if isinstance(state.rule_state, Unscaled):
        raise ValueError(
            f"`value` must not be set on a state of `no_loss_scale()`, got {value}. "
            "(Its gradients are never unscaled; use `static_loss_scale(1.0)`.)"
        )
    if not isinstance(value, jax.core.Tracer):
        value = check_scales("value", value)
    value = jnp.asarray(value, jnp.float32)
    in_range = is_usable(value)

    def replaced(old: jax.typing.ArrayLike) -> jax.Array:
        # JSON may have restored a whole number.
        dtype = None if is_floating(old) else jnp.float32
        return jnp.full_like(old, jnp.where(in_range, value, old), dtype)

    def replace_scale(keys: KeyPath, node: PyTree) -> PyTree:
        if keys != place:
            return node
        loss_scale = jax.tree.map(replaced, node.loss_scale)
        return node._replace(loss_scale=loss_scale)

    return jax.tree_util.tree_map_with_path(
        replace_scale, tree, is_leaf=lambda node: isinstance(node, LossScaleState)
    )


def is_usable(loss_scale: jax.Array) -> jax.Array:
    """Whether the scale is in range, `bool[]`; False for NaN."""
    return (loss_scale >= SMALLEST_SCALE) & (loss_scale <= LARGEST_SCALE)
