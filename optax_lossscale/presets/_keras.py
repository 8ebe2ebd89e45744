"""The rules of Keras 3 and of TensorFlow's Keras."""

from __future__ import annotations

import functools

from optax_lossscale._checks import check_count, check_flag, check_scale
from optax_lossscale._rules import LossScale, shows_settings, static_loss_scale
from optax_lossscale.presets._rules import uncapped


@shows_settings
def keras(
    initial_scale: float = 32768.0, dynamic_growth_steps: int = 2000
) -> LossScale:
    """The rule of Keras 3's `LossScaleOptimizer`, and of R's `optimizer_loss_scale`.

    With scale `s` and count `c` of finite steps, each step does

        finite:     c = c + 1;  if c == dynamic_growth_steps: s = 2 * s, c = 0
        nonfinite:  s = s / 2;  c = 0

    Departure: Keras has neither a floor nor a cap. After 142 nonfinite steps its scale
    is zero on JAX, which flushes subnormal numbers on CPU, and NaN reaches the
    parameters. If its scale becomes infinite, all updates are zero.

    Args:
      initial_scale: First scale, from `2**-126` to `2**126`.
      dynamic_growth_steps: Finite steps in a row until the scale doubles, at least 1.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.keras(initial_scale=8.0, dynamic_growth_steps=1)
      >>> rule.adjust(rule.init(), grads_finite=True).loss_scale
      Array(16., dtype=float32)

    References:
      keras 3.15.1, `keras/src/optimizers/loss_scale_optimizer.py`. For the whole
      signature, over any Optax optimizer, see `optax_lossscale.loss_scale_optimizer`.
    """
    return uncapped(
        check_scale("initial_scale", initial_scale),
        growth_interval=check_count("dynamic_growth_steps", dynamic_growth_steps),
    )


def tf_keras(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> LossScale:
    """The rule of `tf.keras.mixed_precision.LossScaleOptimizer`.

    With scale `s` and count `c` of finite steps, each step does

        finite:     c = c + 1;  if c >= dynamic_growth_steps: s = 2 * s, c = 0
        nonfinite:  s = max(s / 2, 1);  c = 0

    **With `dynamic=False` nothing is checked.** The scale is always `initial_scale`,
    and NaN and infinity reach the parameters, as in tf.keras.

    Departure: tf.keras counts an iteration on a skipped step, so schedules and Adam's
    bias correction advance. Here a skipped step advances nothing in the inner
    optimizer.

    Args:
      dynamic: Whether the scale changes.
      initial_scale: First scale, from `2**-126` to `2**126`. None means `2**15`, but a
        number is required with `dynamic=False`.
      dynamic_growth_steps: Finite steps in a row until the scale doubles, at least 1.
        None means 2000, and is the only value allowed with `dynamic=False`.

    Returns:
      A `LossScale`. With `dynamic=False` it does not skip nonfinite steps.

    Raises:
      ValueError: If a setting is outside its range. With `dynamic=False`, also if
        `initial_scale` is missing or `dynamic_growth_steps` is given.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.tf_keras(initial_scale=1.0)
      >>> rule.adjust(rule.init(), grads_finite=False).loss_scale
      Array(1., dtype=float32)

    References:
      tf_keras 2.21, `tf_keras/mixed_precision/loss_scale_optimizer.py`.
    """
    if check_flag("dynamic", dynamic):
        # The rule shows these numbers in its settings, as tf.keras does.
        return _tf_keras(
            True,
            2.0**15 if initial_scale is None else initial_scale,
            2000 if dynamic_growth_steps is None else dynamic_growth_steps,
        )
    if initial_scale is None:
        raise ValueError(
            "`initial_scale` must be given with `dynamic=False`, got None. (It is the "
            "scale of the whole run.)"
        )
    if dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be None with `dynamic=False`, got "
            f"{dynamic_growth_steps}. (A fixed scale does not grow.)"
        )
    return _tf_keras(False, initial_scale, None)


@shows_settings
@functools.wraps(tf_keras)
def _tf_keras(
    dynamic: bool, initial_scale: float, dynamic_growth_steps: int | None
) -> LossScale:
    scale = check_scale("initial_scale", initial_scale)
    if dynamic_growth_steps is None:
        return static_loss_scale(scale, skip_nonfinite=False)
    return uncapped(
        scale,
        growth_interval=check_count("dynamic_growth_steps", dynamic_growth_steps),
        min_scale=1.0,
    )
