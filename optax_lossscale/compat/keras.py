"""Keras's `LossScaleOptimizer`, with its whole signature, for Optax optimizers."""

from __future__ import annotations

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
    find_by_type,
    find_one,
    is_absent,
    is_at,
    unwrap,
)
from optax_lossscale._ground.types import AxisName, Mask, PyTree
from optax_lossscale._scaling.rules import LossScale, static_loss_scale
from optax_lossscale._scaling.state import find_loss_scale_state
from optax_lossscale._scaling.wrapper import loss_scaled
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

    Use it like `loss_scaled`: `loss_scale_optimizer(optax.adam(1e-3), clipnorm=1.0)`.
    With scaled gradients `g`, loss scale `s`, accumulation over `k` steps, learning
    rate `lr`, parameters `p` and their average `a`, a step is, in Keras's order,

        g = unscale(g, s);  adjust s as presets.keras;  if not all_finite(g): stop
        accumulate g; on every k-th finite step, with g the mean of the last k:
            g = clip(g)
            p = p - p * weight_decay * lr  (where weight_decay_mask is True)
            p = p + inner_optimizer(g, p)
            a = ema_momentum * a + (1 - ema_momentum) * p  (first update: a = p)
            on every ema_overwrite_frequency-th update: p = a

    **With `dynamic=False` or `loss_scale_factor` nothing is checked**: NaN and infinity
    reach the parameters, as in Keras. Freeze parameters inside this wrapper, so that
    there is one scale.

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/keras.html

    Args:
      inner_optimizer: The optimizer: anything with `init` and `update`.
      initial_scale: As in `presets.keras`. None means `2**15`; needed if `dynamic` is
        False.
      dynamic_growth_steps: As in `presets.keras`. None means 2000.
      dynamic: Whether the scale changes. If False, it stays at `initial_scale`.
      weight_decay: Decoupled weight decay per unit of learning rate, at least 0. An
        optimizer with a decay of its own, such as `optax.adamw`, applies that too.
      weight_decay_mask: Marks the parameters that decay: a pytree of bools that is a
        prefix of them, or a function that makes one from them. None decays all.
      learning_rate: That of `inner_optimizer`, a number of at least 0 or a schedule.
        Only `weight_decay` uses it, and requires it.
      clipnorm: Largest L2 norm of each gradient array, above 0.
      clipvalue: Largest magnitude of each gradient entry, above 0.
      global_clipnorm: Largest L2 norm of all gradients together, above 0.
      use_ema: Whether to keep an average, for `ema_params` and `finalize_params`. None
        means False.
      ema_momentum: Weight of the old average, from 0 to 1. None means 0.99.
      ema_overwrite_frequency: In updates, at least 1. None means never.
      loss_scale_factor: A fixed scale, dimensionless, from `2**-126` to `2**126`.
      gradient_accumulation_steps: Finite steps per update, at least 1. None means 1.
        As in Keras, schedules count these steps. But one in an optimizer of your own,
        or in one of `optax.contrib`, may count updates: pass that optimizer
        `lambda count: schedule(k * count + k - 1)`.
      axis_name: As in `loss_scaled`.

    Returns:
      A `GradientTransformationExtraArgs` with a `LossScaledState`, like `loss_scaled`.

    Raises:
      ValueError: If a setting is outside its range, or settings conflict. From
        `update`, if `params` is missing and `weight_decay` or `use_ema` is set.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scale_optimizer(optax.sgd(0.5), initial_scale=8.0, clipvalue=1)
      >>> updates, _ = tx.update(jnp.array([8.0, 80.0]), tx.init(jnp.ones(2)))
      >>> updates
      Array([-0.5, -0.5], dtype=float32)

    References:
      keras 3.15.1, `keras/src/optimizers/loss_scale_optimizer.py`, `base_optimizer.py`.
    """
    optimizer = check_optimizer("inner_optimizer", inner_optimizer)
    rule = _make_rule(initial_scale, dynamic_growth_steps, dynamic, loss_scale_factor)
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


def _make_rule(
    initial_scale: float | None,
    dynamic_growth_steps: int | None,
    dynamic: bool,
    loss_scale_factor: float | None,
) -> LossScale:
    if isinstance(initial_scale, LossScale):
        raise TypeError(
            f"`initial_scale` must be a number, got the rule {initial_scale!r}. (The "
            "rule is Keras's. For another: `loss_scaled(inner_optimizer, rule)`.)"
        )
    if loss_scale_factor is not None:
        if initial_scale is not None or dynamic_growth_steps is not None:
            raise ValueError(
                "`initial_scale` and `dynamic_growth_steps` must be None with "
                f"`loss_scale_factor`, got {initial_scale} and {dynamic_growth_steps}. "
                "(`loss_scale_factor` alone fixes the scale.)"
            )
        scale = check_scale("loss_scale_factor", loss_scale_factor)
        return static_loss_scale(scale, skip_nonfinite=False)
    if not check_flag("dynamic", dynamic):
        return tf_keras(False, initial_scale, dynamic_growth_steps)
    return keras(
        2.0**15 if initial_scale is None else initial_scale,
        2000 if dynamic_growth_steps is None else dynamic_growth_steps,
    )


def _make_schedule(
    learning_rate: optax.ScalarOrSchedule | None,
) -> optax.Schedule | None:
    if learning_rate is None or callable(learning_rate):
        return learning_rate
    if isinstance(learning_rate, jax.core.Tracer):  # From `optax.inject_hyperparams`.
        return lambda _: learning_rate
    return optax.constant_schedule(check_number("learning_rate", learning_rate, 0.0))


def _optional_count(name: str, value: int | None) -> int | None:
    return None if value is None else check_count(name, value)


def ema_params(opt_state: PyTree, *, path: str | None = None) -> PyTree:
    """Returns the moving average of the parameters, for evaluation.

    After each update the average `a` is

        a = ema_momentum * a + (1 - ema_momentum) * params

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/keras.html

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

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/keras.html

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
        structure.

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

    def finalize_leaf(param: PyTree, average: PyTree) -> PyTree:
        return param if is_absent(average) else average.astype(jnp.result_type(param))

    # `nnx.state` wraps each array, which `nnx.update` expects.
    final = jax.tree.map(
        finalize_leaf, unwrap(params), ema_params(opt_state, path=path)
    )
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(final))
