"""The rules of Keras 3 and of TensorFlow's Keras."""

from __future__ import annotations

from optax_lossscale._checks import check_count, check_flag, check_scale
from optax_lossscale._rules import LossScale, static_loss_scale
from optax_lossscale.presets._rules import uncapped


def keras(
    initial_scale: float = 32768.0, dynamic_growth_steps: int = 2000
) -> LossScale:
    """Keras 3's `LossScaleOptimizer`, and R's `optimizer_loss_scale`.

        finite step:     c = c + 1;  if c == dynamic_growth_steps: s = 2 s, c = 0
        nonfinite step:  s = s / 2;  c = 0

    Departures: Keras has neither floor nor cap. Its scale reaches zero after some 165
    nonfinite steps, and NaN the parameters; or infinity, and all updates are zero.

    Args:
      initial_scale: First scale, from `2**-126` to `2**126`.
      dynamic_growth_steps: Finite steps to the next doubling, at least 1.

    Returns:
      A `LossScale`.

    Raises:
      ValueError: If a setting is outside its range.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.keras(initial_scale=8.0, dynamic_growth_steps=1)
      >>> rule.adjust(rule.init(), True).loss_scale
      Array(16., dtype=float32)

    References:
      keras 3.15.1, `keras/src/optimizers/loss_scale_optimizer.py`. All of its
      signature, over any Optax optimizer: `loss_scale_optimizer`.
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
    """`tf.keras.mixed_precision.LossScaleOptimizer`.

        finite step:     c = c + 1;  if c >= dynamic_growth_steps: s = 2 s, c = 0
        nonfinite step:  s = max(s / 2, 1);  c = 0

    With `dynamic=False` the scale is `initial_scale` for ever, and NOTHING IS
    CHECKED: as in tf.keras, NaN and infinity then reach the parameters.

    Departure: a skipped step advances nothing in the inner optimizer, where tf.keras
    counts an iteration (so Adam's bias correction and schedules move on).

    Args:
      dynamic: Whether the scale changes.
      initial_scale: First scale, from `2**-126` to `2**126`. None is `2**15`; with
        `dynamic=False` it is required.
      dynamic_growth_steps: Finite steps to the next doubling, at least 1. None is
        2000; refused with `dynamic=False`.

    Returns:
      A `LossScale`; with `dynamic=False`, one that does not skip.

    Raises:
      ValueError: If a setting is outside its range, missing or refused as above.
      TypeError: If a setting is of the wrong kind.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.presets.tf_keras(initial_scale=1.0)
      >>> rule.adjust(rule.init(), False).loss_scale
      Array(1., dtype=float32)

    References:
      tf_keras 2.21, `tf_keras/mixed_precision/loss_scale_optimizer.py`.
    """
    if check_flag("dynamic", dynamic):
        return uncapped(
            check_scale(
                "initial_scale", 2.0**15 if initial_scale is None else initial_scale
            ),
            growth_interval=check_count(
                "dynamic_growth_steps",
                2000 if dynamic_growth_steps is None else dynamic_growth_steps,
            ),
            min_scale=1.0,
        )
    if initial_scale is None:
        raise ValueError(
            "`initial_scale` must be given with `dynamic=False`, got None. (It is the "
            "one scale of the run.)"
        )
    if dynamic_growth_steps is not None:
        raise ValueError(
            "`dynamic_growth_steps` must be None with `dynamic=False`, got "
            f"{dynamic_growth_steps}. (A fixed scale does not grow.)"
        )
    scale = check_scale("initial_scale", initial_scale)
    return static_loss_scale(scale, skip_nonfinite=False)
