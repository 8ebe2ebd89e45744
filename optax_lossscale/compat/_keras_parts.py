"""Keras's clipping, decay, average and accumulation, as wrappers of an optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._ground.checks import SMALLEST_SCALE, check_flag, check_number
from optax_lossscale._ground.states import MASTER_WEIGHTS_STATES
from optax_lossscale._ground.tree import (
    copy_wide,
    find_by_type,
    flags_of,
    is_absent,
    is_floating,
    wide_dtype,
    widen,
)
from optax_lossscale._ground.types import Mask, PyTree, public

# Its `update` takes extra arguments.
Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


@public
class DecayFirstState(NamedTuple):
    """State of `decay_first`.

    Attributes:
      update_count: `i32[]`. The number of updates so far.
      inner_state: State of the inner optimizer.
    """

    update_count: jax.Array
    inner_state: PyTree


@public
class AverageAfterState(NamedTuple):
    """State of `average_after`.

    Attributes:
      update_count: `i32[]`. The number of updates so far.
      average: Moving average of the parameters; floating leaves in float32 or wider.
      inner_state: State of the inner optimizer.
    """

    update_count: jax.Array
    average: PyTree
    inner_state: PyTree


def make_clip(
    clipnorm: float | None, clipvalue: float | None, global_clipnorm: float | None
) -> optax.GradientTransformation | None:
    """Returns the one clip whose limit is given, or None."""
    clips = (
        ("clipnorm", clipnorm, _clip_each),
        ("clipvalue", clipvalue, optax.clip),
        ("global_clipnorm", global_clipnorm, optax.clip_by_global_norm),
    )
    given = [(name, limit, clip) for name, limit, clip in clips if limit is not None]
    if len(given) > 1:
        raise ValueError(
            "at most one of `clipnorm`, `clipvalue` and `global_clipnorm` may be "
            f"given, got {' and '.join(f'`{name}`' for name, *_ in given)}."
        )
    for name, limit, clip in given:
        return clip(check_number(name, limit, SMALLEST_SCALE))
    return None


def decay_first(
    inner: Optimizer,
    weight_decay: float,
    learning_rate: optax.Schedule,
    window: int,
    mask: Mask,
) -> Optimizer:
    """Subtracts `params * weight_decay * learning_rate` before the inner update.

    An inner optimizer that reads the parameters sees them decayed. Only parameters that
    the mask marks True are decayed. The schedule counts all finite steps, `window` of
    them for each update, and is evaluated at the last.
    """

    def init(params: optax.Params) -> DecayFirstState:
        _decayed_params(mask, params)  # Raises if the mask does not fit them.
        inner_state = _without_masters("weight_decay", inner.init(params))
        return DecayFirstState(jnp.zeros((), jnp.int32), inner_state)

    def update(
        updates: optax.Updates,
        state: DecayFirstState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DecayFirstState]:
        params = _required_params("weight_decay", params)
        step = _last_step(state.update_count, window)
        rate = jnp.asarray(weight_decay * learning_rate(step))

        def decay_leaf(grad: PyTree, param: PyTree) -> PyTree:
            # Keras does not decay parameters that have no gradient.
            if is_absent(grad) or not is_floating(param):
                return None
            return -param * rate.astype(param.dtype)

        decayed = _decayed_params(mask, params)
        decay = jax.tree.map(decay_leaf, updates, decayed, is_leaf=is_absent)
        updates, inner_state = inner.update(
            updates, state.inner_state, _add(params, decay), **extra_args
        )
        count = optax.safe_increment(state.update_count)
        return _add(updates, decay), DecayFirstState(count, inner_state)

    return Optimizer(init, update)


def average_after(
    inner: Optimizer, momentum: float, overwrite_frequency: int | None
) -> Optimizer:
    """Averages the parameters after each update.

    If `overwrite_frequency` is given, the parameters are set to their average once in
    that many updates.
    """

    def init(params: optax.Params) -> AverageAfterState:
        average = jax.tree.map(copy_wide, params)
        inner_state = _without_masters("use_ema", inner.init(params))
        return AverageAfterState(jnp.zeros((), jnp.int32), average, inner_state)

    def update(
        updates: optax.Updates,
        state: AverageAfterState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageAfterState]:
        params = _required_params("use_ema", params)
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )

        def average_leaf(average: PyTree, param: PyTree) -> PyTree:
            if is_absent(average):
                return average
            if not is_floating(param):
                return param
            moved = optax.incremental_update(param, average, 1.0 - momentum)
            # The average of a parameter that never changes must not, even in rounding.
            is_param = (state.update_count == 0) | (param == average)
            return jnp.where(is_param, param, moved)

        average = jax.tree.map(
            average_leaf, state.average, _add(params, updates), is_leaf=is_absent
        )
        count = optax.safe_increment(state.update_count)
        if overwrite_frequency is not None:
            overwrite = count % overwrite_frequency == 0

            def overwrite_leaf(
                update: PyTree, param: PyTree, average: PyTree
            ) -> PyTree:
                if is_absent(update) or not is_floating(param):
                    return update
                return jnp.where(overwrite, average - param, update)

            updates = jax.tree.map(
                overwrite_leaf, updates, params, average, is_leaf=is_absent
            )
        return updates, AverageAfterState(count, average, inner_state)

    return Optimizer(init, update)


def count_all_steps(inner: Optimizer, window: int) -> Optimizer:
    """Lets the schedules of an optimizer count `window` steps for each update.

    They are evaluated at the last of these steps. Their state still counts updates.
    """

    def update(
        updates: optax.Updates,
        state: PyTree,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, PyTree]:
        state = _map_schedules(lambda count: _last_step(count, window), state)
        updates, state = inner.update(updates, state, params, **extra_args)
        # A count that the optimizer did not move, as in a `MultiSteps` of its own, is
        # rounded down to what it was.
        return updates, _map_schedules(lambda count: count // window, state)

    return Optimizer(inner.init, update)


def accumulate_before(inner: Optimizer, window: int) -> Optimizer:
    """Updates once in `window` steps, with the mean of their gradients."""

    def multi_steps(tree: PyTree) -> optax.MultiSteps:
        # `MultiSteps` accumulates in float32 by default, which would round float64
        # gradients and drop the imaginary parts of complex ones.
        dtypes = [wide_dtype(x.dtype) for x in jax.tree.leaves(tree) if is_floating(x)]
        dtype = np.result_type(np.float32, *dtypes)
        return optax.MultiSteps(inner, window, accumulator_dtype=dtype)

    def init(params: optax.Params) -> optax.MultiStepsState:
        return multi_steps(params).init(params)

    def update(
        updates: optax.Updates,
        state: optax.MultiStepsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.MultiStepsState]:
        grads, means = updates, state.acc_grads
        # `MultiSteps` needs the gradients and their means to have the same leaves, so
        # the mean is left out where the gradient is absent, and put back afterwards.
        state = state._replace(acc_grads=_where_absent(grads, grads, means))
        updates, state = multi_steps(grads).update(grads, state, params, **extra_args)
        means = _where_absent(grads, means, state.acc_grads)
        return updates, state._replace(acc_grads=means)

    return Optimizer(init, update)


def _clip_each(max_norm: float) -> optax.GradientTransformation:
    """Clips each gradient array by its own L2 norm."""
    clip = optax.clip_by_global_norm(max_norm)

    def clip_leaf(grad: PyTree) -> PyTree:
        return clip.update(grad, clip.init(grad))[0] if is_floating(grad) else grad

    return optax.stateless(lambda grads, _: jax.tree.map(clip_leaf, grads))


def _where_absent(tree: PyTree, if_absent: PyTree, if_present: PyTree) -> PyTree:
    """The leaves of one tree where those of `tree` are absent, and of another else."""
    return jax.tree.map(
        lambda leaf, x, y: x if is_absent(leaf) else y,
        tree,
        if_absent,
        if_present,
        is_leaf=is_absent,
    )


def _last_step(update_count: jax.Array, window: int) -> jax.Array:
    """The last of the steps, counted from 0, that a further update takes."""
    # Saturates like every count, instead of wrapping around.
    most_updates = np.iinfo(np.int32).max // window - 1
    return jnp.minimum(update_count, most_updates) * window + (window - 1)


def _map_schedules(function: Callable[[jax.Array], jax.Array], state: PyTree) -> PyTree:
    """Applies a function to the counts of Optax's schedules."""

    def is_schedule(node: object) -> bool:
        # Optax has a type for each kind of schedule, some of them private. What they
        # have in common is that they hold a count and nothing else.
        is_count = getattr(node, "_fields", None) == ("count",)
        return is_count and type(node).__module__.split(".")[0] == "optax"

    def map_node(node: PyTree) -> PyTree:
        if not is_schedule(node):
            return node
        return node._replace(count=function(node.count))

    return jax.tree.map(map_node, state, is_leaf=is_schedule)


def _decayed_params(mask: Mask, params: optax.Params) -> optax.Params:
    """The parameters, with None in place of each one that is not decayed."""

    def keep_part(is_decayed: PyTree, part: PyTree) -> PyTree:
        if isinstance(is_decayed, jax.Array | np.ndarray) and is_decayed.dtype == bool:
            is_decayed = bool(is_decayed)
        keeps = check_flag("weight_decay_mask", is_decayed)
        return part if keeps else jax.tree.map(lambda _: None, part)

    resolved = flags_of(mask, params)
    try:
        return jax.tree.map(keep_part, resolved, params)
    except ValueError as error:
        raise ValueError(
            "`weight_decay_mask` must be a prefix of the parameters, or a function "
            "that makes one from them, such as the one in the documentation that goes "
            f"by names, got: {error}"
        ) from error


def _without_masters(option: str, state: PyTree) -> PyTree:
    """Refuses masters inside, which would not see what is done to the parameters."""
    if find_by_type(state, MASTER_WEIGHTS_STATES):
        raise ValueError(
            f"`{option}` must be inside `master_weights`, got an inner optimizer with "
            "masters. (Wrap the result instead: "
            "`master_weights(loss_scale_optimizer(...))`.)"
        )
    return state


def _required_params(option: str, params: optax.Params | None) -> optax.Params:
    """Refuses None, and returns the parameters widened."""
    if params is None:
        raise ValueError(
            f"`params` must be given to `update`, got None. (`{option}` reads them.)"
        )
    return jax.tree.map(widen, params)


def _add(tree: PyTree, updates: PyTree) -> PyTree:
    """Adds updates to a tree of parameters or of other updates.

    Leaves that have no update, or are not floating, are returned unchanged.
    """

    def add(update: PyTree, leaf: PyTree) -> PyTree:
        return leaf if is_absent(update) or not is_floating(leaf) else leaf + update

    return jax.tree.map(add, updates, tree, is_leaf=is_absent)
