"""Keras's clipping, decay, average and accumulation, as wrappers of an optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._ground.checks import SMALLEST_SCALE, check_flag, check_number
from optax_lossscale._ground.states import MasterWeightsState
from optax_lossscale._ground.tree import find_by_type, flags_of
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
      average: Moving average of the parameters, in float32 or wider.
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


def _clip_each(max_norm: float) -> optax.GradientTransformation:
    """Clips each gradient array by its own L2 norm."""
    clip = optax.clip_by_global_norm(max_norm)

    def clip_one(grad: jax.Array) -> jax.Array:
        clipped, _ = clip.update(grad, clip.init(grad))
        return clipped

    return optax.stateless(lambda grads, _: jax.tree.map(clip_one, grads))


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

    def decay_of(params: optax.Params, rate: jax.typing.ArrayLike) -> optax.Updates:
        def decay_part(is_decayed: bool, part: PyTree) -> PyTree:
            if not check_flag("weight_decay_mask", is_decayed):
                return jax.tree.map(jnp.zeros_like, part)
            return jax.tree.map(lambda p: -p * jnp.asarray(rate, p.dtype), part)

        return jax.tree.map(decay_part, flags_of(mask, params), params)

    def init(params: optax.Params) -> DecayFirstState:
        jax.eval_shape(lambda params: decay_of(params, 0.0), params)  # Does it fit?
        inner_state = inner.init(params)
        _refuse_masters("weight_decay", inner_state)
        return DecayFirstState(jnp.zeros((), jnp.int32), inner_state)

    def update(
        updates: optax.Updates,
        state: DecayFirstState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DecayFirstState]:
        _require_params("weight_decay", params)
        rate = weight_decay * learning_rate(_last_step(state.update_count, window))
        decay = decay_of(params, rate)
        decayed = optax.apply_updates(params, decay)
        updates, inner_state = inner.update(
            updates, state.inner_state, decayed, **extra_args
        )
        count = optax.safe_increment(state.update_count)
        return optax.tree.add(updates, decay), DecayFirstState(count, inner_state)

    return Optimizer(init, update)


def average_after(
    inner: Optimizer, momentum: float, overwrite_frequency: int | None
) -> Optimizer:
    """Averages the parameters after each update.

    If `overwrite_frequency` is given, the parameters are set to their average once in
    that many updates.
    """

    def init(params: optax.Params) -> AverageAfterState:
        # Copies, so that parameters and state can both be donated.
        average = jax.tree.map(jnp.array, params)
        inner_state = inner.init(params)
        _refuse_masters("use_ema", inner_state)
        return AverageAfterState(jnp.zeros((), jnp.int32), average, inner_state)

    def update(
        updates: optax.Updates,
        state: AverageAfterState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageAfterState]:
        _require_params("use_ema", params)
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **extra_args
        )
        is_first = state.update_count == 0
        count = optax.safe_increment(state.update_count)

        def average_one(average: jax.Array, param: jax.Array) -> jax.Array:
            moved = optax.incremental_update(param, average, 1 - momentum)
            # The average of a frozen parameter keeps every bit of it.
            return jnp.where(is_first | (param == average), param, moved)

        new_params = optax.apply_updates(params, updates)
        average = jax.tree.map(average_one, state.average, new_params)
        if overwrite_frequency is not None:
            overwrites = count % overwrite_frequency == 0
            to_average = optax.tree.sub(average, params)
            updates = optax.tree.where(overwrites, to_average, updates)
        return updates, AverageAfterState(count, average, inner_state)

    return Optimizer(init, update)


def accumulate_before(inner: Optimizer, window: int) -> Optimizer:
    """Updates once in `window` steps, with the mean of their gradients."""

    def multi_steps(tree: PyTree) -> optax.MultiSteps:
        # `MultiSteps` accumulates in float32 by default, which would round float64
        # gradients and drop the imaginary parts of complex ones.
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree)]
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
        return multi_steps(updates).update(updates, state, params, **extra_args)

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


def _map_schedules(function: Callable[[jax.Array], jax.Array], state: PyTree) -> PyTree:
    """Applies a function to the counts of Optax's schedules."""

    def is_schedule(node: object) -> bool:
        # Optax has a type for each kind of schedule, some of them private. What they
        # have in common is that they hold a count and nothing else.
        is_count = getattr(node, "_fields", None) == ("count",)
        return is_count and type(node).__module__.split(".")[0] == "optax"

    def map_node(node: PyTree) -> PyTree:
        return node._replace(count=function(node.count)) if is_schedule(node) else node

    return jax.tree.map(map_node, state, is_leaf=is_schedule)


def _last_step(update_count: jax.Array, window: int) -> jax.Array:
    """The last of the steps, counted from 0, that a further update takes."""
    return update_count * window + (window - 1)


def _refuse_masters(option: str, state: PyTree) -> None:
    """Refuses masters inside, which would not see what is done to the parameters."""
    if find_by_type(state, MasterWeightsState):
        raise ValueError(
            f"`{option}` must be inside `master_weights`, got an inner optimizer with "
            "masters. (Write `master_weights(loss_scale_optimizer(...))`.)"
        )


def _require_params(option: str, params: optax.Params | None) -> None:
    if params is None:
        raise ValueError(
            f"`params` must be given to `update`, got None. (`{option}` reads them.)"
        )
