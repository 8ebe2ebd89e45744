"""Keras's `LossScaleOptimizer`, with its whole signature, for Optax optimizers."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.checks import (
    check_count,
    check_flag,
    check_number,
    check_optimizer,
    check_scale,
)
from optax_lossscale._ground.tree import (
    check_structure,
    find_by_type,
    find_one,
    is_absent,
    is_at,
    unwrap,
)
from optax_lossscale._ground.types import AxisName, Mask, PyTree
from optax_lossscale._scaling.rules import LossScale, static_loss_scale
from optax_lossscale._scaling.state import find_loss_scale_state
from optax_lossscale._scaling.transform import loss_scaled
from optax_lossscale.compat._keras_parts import (
    AverageAfterState,
    accumulate_before,
    average_after,
    count_all_steps,
    decay_first,
    make_clip,
)
from optax_lossscale.presets import keras, tf_keras


def loss_scale_optimizer(
    inner_optimizer: optax.GradientTransformation | optax.MultiSteps,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
    *,
    dynamic: bool = True,
    weight_decay: float | None = None,
    weight_decay_mask: Mask = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    clipnorm: float | None = None,
    clipvalue: float | None = None,
    global_clipnorm: float | None = None,
    use_ema: bool | None = False,
    ema_momentum: float | None = 0.99,
    ema_overwrite_frequency: int | None = None,
    loss_scale_factor: float | None = None,
    gradient_accumulation_steps: int | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer as Keras's `LossScaleOptimizer` does, with all its options.

    With scaled gradients `g`, loss scale `s`, accumulation over `k` steps, learning
    rate `lr`, parameters `p` and their average `a`, one step is, in Keras's order,

        g = unscale(g, s);  finite = all_finite(g);  adjust s
        if not finite: skip the rest
        accumulate g; on every k-th finite step, with g the mean of the last k:
            g = clip(g)
            p = p - p * weight_decay * lr  (where weight_decay_mask is True)
            p = p + inner_optimizer(g, p)
            a = ema_momentum * a + (1 - ema_momentum) * p  (first update: a = p)
            on every ema_overwrite_frequency-th update: p = a

    The rule of the scale is `presets.keras`. As in Keras 3, a nonfinite step advances
    nothing: only the bad micro-batch is dropped, and its accumulation window continues
    until it holds `k` finite micro-batches. (tf.keras counts an iteration on a skipped
    step.)

    **With `dynamic=False` or `loss_scale_factor` nothing is checked.** The scale is
    fixed, and NaN and infinity reach the parameters, as in Keras. For a fixed scale
    that skips nonfinite steps, use `loss_scaled(optimizer, static_loss_scale(c))`.

    **Departures from Keras 3.** Keras takes most of these options on the inner
    optimizer. Here they work on this wrapper, where Keras's documentation lists them.
    The average moves once in each update, as that documentation says; Keras's source
    moves it on every micro-step.

    **Schedules under accumulation** look at all finite steps, as in Keras: with `k = 3`
    the first updates read them at 2, 5 and 8. That holds for `learning_rate`, and
    inside `inner_optimizer` for the schedules of `optax.scale_by_schedule` (so for the
    learning rate of nearly every optimizer), `optax.inject_hyperparams` and
    `optax.add_decayed_weights`. Every other count, such as that of Adam's bias
    correction, is of updates, again as in Keras. So is the count of a schedule in an
    optimizer of your own, and in those of `optax.contrib` that have one count for
    everything; there, pass `lambda count: schedule(k * count + k - 1)`.

    **Frozen parameters.** Leave them out of `params`, as `wrt` of `nnx.Optimizer` does,
    or freeze them *inside* this wrapper. Then there is one scale, and a bad gradient
    skips the step of all parameters. With `optax.partition` outside, each part would
    have its own scale or none, and would be updated when another is skipped.

        kinds = {"train": optimizer, "freeze": optax.set_to_zero()}
        frozen = optax.partition(kinds, {"encoder": "freeze", "head": "train"})
        tx = loss_scale_optimizer(frozen)

    A `weight_decay` then needs a mask that leaves them out. Their gradients are still
    checked, and count in `global_clipnorm`, unless `jax.lax.stop_gradient` in the loss
    makes them zero.

    Args:
      inner_optimizer: The optimizer: anything with `init` and `update`.
      initial_scale: As in `presets.keras`. None means `2**15`.
      dynamic_growth_steps: As in `presets.keras`. None means 2000.
      dynamic: Whether the scale changes. If False, the scale is `initial_scale`, which
        is then required, and `dynamic_growth_steps` must be None.
      weight_decay: Decoupled weight decay per unit of learning rate, at least 0. An
        optimizer with a decay of its own, such as `optax.adamw`, applies that too.
      weight_decay_mask: Marks the parameters that decay, as in `optax.adamw`: a pytree
        of bools that is a prefix of the parameters, or a function that makes one from
        them. None decays all. It is Keras's `exclude_from_weight_decay`; the second
        example has its `var_names`.
      learning_rate: The learning rate of `inner_optimizer`, as a number of at least 0
        or a schedule of the step. Only `weight_decay` uses it, and requires it, because
        an Optax optimizer reveals neither its learning rate nor any change of it.
      clipnorm: Largest L2 norm of each gradient array, above 0.
      clipvalue: Largest magnitude of each gradient entry, above 0.
      global_clipnorm: Largest L2 norm of all gradients together, above 0.
      use_ema: Whether to keep a moving average of the parameters, which `ema_params`
        returns. None means False.
      ema_momentum: Weight of the old average in the new one, from 0 to 1. None means
        0.99.
      ema_overwrite_frequency: The parameters are set to their average once in this many
        updates, at least 1. None means never; see `finalize_params`.
      loss_scale_factor: A fixed scale, dimensionless, from `2**-126` to `2**126`. It
        replaces `dynamic`, `initial_scale` and `dynamic_growth_steps`.
      gradient_accumulation_steps: Finite steps per update, at least 1. None means 1.
      axis_name: As in `loss_scaled`.

    Returns:
      A `GradientTransformationExtraArgs` with a `LossScaledState`, like `loss_scaled`.

    Raises:
      ValueError: If a setting is outside its range, or settings conflict, such as two
        of the three clips, or a `weight_decay_mask` without `weight_decay`. `init`
        raises it if the mask does not fit the parameters, and `update` if `params` is
        missing and `weight_decay` or `use_ema` is set.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scale_optimizer(optax.sgd(0.5), initial_scale=8.0, clipvalue=1)
      >>> params = jnp.ones(2)
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(jnp.array([8.0, 80.0]), opt_state)
      >>> optax.apply_updates(params, updates)
      Array([0.5, 0.5], dtype=float32)

      Keras's `exclude_from_weight_decay(var_names=["bias", "norm"])`:

      >>> def is_decayed(path, param):
      ...     name = jax.tree_util.keystr(path)
      ...     return not any(word in name for word in ["bias", "norm"])
      >>> tx = ols.loss_scale_optimizer(
      ...     optax.sgd(0.5),
      ...     weight_decay=0.1,
      ...     weight_decay_mask=lambda p: jax.tree.map_with_path(is_decayed, p),
      ...     learning_rate=0.5,
      ... )
      >>> params = {"kernel": jnp.ones(1), "bias": jnp.ones(1)}
      >>> grads = jax.tree.map(jnp.zeros_like, params)
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> optax.apply_updates(params, updates)
      {'bias': Array([1.], dtype=float32), 'kernel': Array([0.95], dtype=float32)}

    References:
      keras 3.15.1, `keras/src/optimizers/loss_scale_optimizer.py` and
      `base_optimizer.py`.
    """
    optimizer = check_optimizer("inner_optimizer", inner_optimizer)
    _check_not_swapped(initial_scale)
    rule = _make_rule(dynamic, initial_scale, dynamic_growth_steps, loss_scale_factor)
    clip = make_clip(clipnorm, clipvalue, global_clipnorm)
    window = _optional_count("gradient_accumulation_steps", gradient_accumulation_steps)
    frequency = _optional_count("ema_overwrite_frequency", ema_overwrite_frequency)
    averages = check_flag("use_ema", False if use_ema is None else use_ema)
    momentum = 0.99 if ema_momentum is None else ema_momentum
    momentum = check_number("ema_momentum", momentum, 0.0, 1.0)
    schedule = _make_schedule(learning_rate)

    # Wrapped from the inside out, so that a step runs in Keras's order.
    if window is not None:
        optimizer = count_all_steps(optimizer, window)
    if weight_decay is not None:
        decay = check_number("weight_decay", weight_decay, 0.0)
        if schedule is None:
            raise ValueError(
                "`learning_rate` must be given with `weight_decay`, got None. (Pass "
                "the inner optimizer's: Optax optimizers do not reveal their own.)"
            )
        optimizer = decay_first(
            optimizer, decay, schedule, window or 1, weight_decay_mask
        )
    elif weight_decay_mask is not None:
        raise ValueError(
            "`weight_decay_mask` must be None without `weight_decay`, got "
            f"{weight_decay_mask}. (An optimizer with a decay of its own takes its own "
            "mask: `optax.adamw(..., mask=...)`.)"
        )
    if clip is not None:
        optimizer = optax.chain(clip, optimizer)
    if averages:
        optimizer = average_after(optimizer, momentum, frequency)
    if window is not None:
        optimizer = accumulate_before(optimizer, window)
    return loss_scaled(optimizer, rule, axis_name=axis_name)


def ema_params(opt_state: PyTree, *, path: str | None = None) -> PyTree:
    """Returns the moving average of the parameters, for evaluation.

    After each update the average `a` is

        a = ema_momentum * a + (1 - ema_momentum) * params

    Args:
      opt_state: State of a `loss_scale_optimizer` with `use_ema=True`, or any pytree
        that holds exactly one, or one at `path`.
      path: Picks one of several, as in `find_loss_scale_state`.

    Returns:
      The average, a tree like the parameters, with floating leaves in float32 or wider.
      Before the first update it holds the parameters that were passed to `init`. Leaves
      that are not arrays, such as an Equinox module's functions, are None.

    Raises:
      ValueError: If `opt_state` holds no average, or several, at `path` if it is given.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True)
      >>> ols.ema_params(tx.init(jnp.ones(2)))
      Array([1., 1.], dtype=float32)

    References:
      keras 3.15.1, `keras/src/optimizers/base_optimizer.py`.
    """
    found = find_one(
        opt_state,
        AverageAfterState,
        path,
        must="`opt_state` must hold one average of the parameters",
        pick="pass `{}`.",
    )
    if found is None:
        raise ValueError(
            "`opt_state` must hold one average of the parameters, got 0. "
            "(`loss_scale_optimizer(..., use_ema=True)` keeps one.)"
        )
    return unwrap(found[1].average)


def finalize_params(
    params: optax.Params, opt_state: PyTree, *, path: str | None = None
) -> optax.Params:
    """Returns the parameters to keep after training: their average, if there is one.

    Call it after the last step, as Keras's `fit` calls `finalize_variable_values`
    after the last epoch. For an NNX model:
    `nnx.update(model, finalize_params(nnx.state(model, nnx.Param), optimizer))`.

    Args:
      params: The parameters, floating leaves of any shape.
      opt_state: State of a `loss_scale_optimizer`, or any pytree that holds exactly
        one, or one at `path`.
      path: Picks one of several, as in `find_loss_scale_state`.

    Returns:
      With `use_ema=True`, the average in the dtypes of `params`. Leaves that have no
      average, such as those that `optax.partition` gives to another optimizer, are
      returned unchanged. With `use_ema=False`, `params` unchanged.

    Raises:
      ValueError: If `opt_state` does not hold exactly one state of a loss-scaled
        optimizer, or one at `path`, or if `params` differ from their average in
        structure or shape.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scale_optimizer(optax.sgd(1.0), use_ema=True, ema_momentum=0.5)
      >>> params = jnp.zeros(1)
      >>> opt_state = tx.init(params)
      >>> for _ in range(2):
      ...     grads = ols.scale(jnp.ones(1), opt_state)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params, ols.finalize_params(params, opt_state)
      (Array([-2.], dtype=float32), Array([-1.5], dtype=float32))

    References:
      keras 3.15.1, `keras/src/optimizers/base_optimizer.py`.
    """
    averages = find_by_type(opt_state, AverageAfterState)
    if not any(is_at(keys, path) for keys, _ in averages):
        find_loss_scale_state(opt_state, path=path)  # Raises if there is not one.
        return params

    def finalize_leaf(average: PyTree, param: PyTree) -> PyTree:
        if is_absent(average):
            return param
        if jnp.shape(average) != jnp.shape(param):
            raise ValueError(
                "`params` must have the shapes of their average, got shape "
                f"{jnp.shape(param)} for {jnp.shape(average)}."
            )
        return jnp.asarray(average).astype(jnp.asarray(param).dtype)

    average = ema_params(opt_state, path=path)
    message = "`params` must have the tree structure of their average"
    plain = unwrap(params)  # `nnx.state` wraps each array.
    check_structure(average, plain, message)
    final = jax.tree.map(finalize_leaf, average, plain, is_leaf=is_absent)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(final))


def _check_not_swapped(initial_scale: object) -> None:
    """Says what to do about a rule, or tf.keras's `dynamic`, in the second place."""
    if isinstance(initial_scale, LossScale | bool) or callable(initial_scale):
        hint = "The rule is Keras's. For another: `loss_scaled(inner_optimizer, rule)`."
        if isinstance(initial_scale, bool):
            hint = f"Pass tf.keras's `dynamic` by name: `dynamic={initial_scale}`."
        raise TypeError(
            f"`initial_scale` must be a number, got {initial_scale!r}. ({hint})"
        )


def _make_rule(
    dynamic: bool,
    initial_scale: float | None,
    dynamic_growth_steps: int | None,
    loss_scale_factor: float | None,
) -> LossScale:
    given: dict[str, Any] = {
        "initial_scale": initial_scale,
        "dynamic_growth_steps": dynamic_growth_steps,
    }
    given = {name: value for name, value in given.items() if value is not None}
    is_dynamic = check_flag("dynamic", dynamic)
    if loss_scale_factor is None:
        return keras(**given) if is_dynamic else tf_keras(is_dynamic, **given)
    for name, value in given.items():
        raise ValueError(
            f"`{name}` must be None with `loss_scale_factor`, got {value}. "
            "(`loss_scale_factor` alone fixes the scale.)"
        )
    scale = check_scale("loss_scale_factor", loss_scale_factor)
    return static_loss_scale(scale, skip_nonfinite=False)


def _make_schedule(
    learning_rate: optax.ScalarOrSchedule | None,
) -> optax.Schedule | None:
    if isinstance(learning_rate, jax.core.Tracer):  # From `optax.inject_hyperparams`.
        return lambda _: learning_rate
    if learning_rate is None:
        return None
    if not callable(learning_rate):
        rate = check_number("learning_rate", learning_rate, 0.0)
        return optax.constant_schedule(rate)
    try:
        inspect.signature(learning_rate).bind(0)
    except TypeError as error:
        raise TypeError(
            "`learning_rate` must be a number or a function of the step, got "
            f"{learning_rate!r}. (Unlike in Keras, it takes the step as its argument: "
            "`lambda step: ...`.)"
        ) from error
    except ValueError:  # Some callables have no signature to inspect.
        pass
    return learning_rate


def _optional_count(name: str, value: int | None) -> int | None:
    return None if value is None else check_count(name, value)
