"""What a training loop logs, and when it should stop."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._checks import static_count
from optax_lossscale._state import PyTree, find_loss_scale_state


class LossScaleStalledError(RuntimeError):
    """Too many steps in a row were skipped; raised by `raise_if_stalled`.

    Example:
      >>> import optax_lossscale as ols
      >>> issubclass(ols.LossScaleStalledError, RuntimeError)
      True
    """


def loss_scale_metrics(tree: PyTree) -> dict[str, jax.Array]:
    """What there is to log about a loss scale, for any logger.

        skip_rate = total_notfinite / step_count    (0 before the first step)

    Pure and free of host synchronisation: call it inside or outside `jit`, and
    stack its values with `lax.scan`.

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`.

    Returns:
      A dict of `loss_scale` `f32[]`, `last_finite` `bool[]`, `notfinite_count` and
      `total_notfinite` `i32[]` (steps), and `skip_rate` `f32[]` (from 0 to 1).

    Raises:
      ValueError: If `tree` holds no `LossScaleState`, or several.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.dynamic_loss_scale(1024.0)
      >>> state = rule.adjust(rule.adjust(rule.init(), True), False)
      >>> for name, value in ols.loss_scale_metrics(state).items():
      ...     print(name, value)
      loss_scale 512.0
      last_finite False
      notfinite_count 1
      total_notfinite 1
      skip_rate 0.5
    """
    state = find_loss_scale_state(tree)
    steps = jnp.maximum(state.step_count, 1).astype(jnp.float32)
    return {
        "loss_scale": state.loss_scale,
        "last_finite": state.last_finite,
        "notfinite_count": state.notfinite_count,
        "total_notfinite": state.total_notfinite,
        "skip_rate": state.total_notfinite.astype(jnp.float32) / steps,
    }


def raise_if_stalled(tree: PyTree, max_consecutive: int = 50) -> None:
    """Raises when too many steps in a row were skipped.

        raise if notfinite_count >= max_consecutive

    A host-side check, to be called outside `jit` as often as a wait for the device
    is welcome (every hundred steps, say), so that no step ever waits for it. From
    the default scale, 39 overflows in a row reach the default floor, so 50 of them
    are no longer a matter of the scale.

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`; with one count per
        device or ensemble member, the largest counts.
      max_consecutive: Steps, at least 1.

    Raises:
      LossScaleStalledError: With the scale, the counts, and what to look at.
      ValueError: If `max_consecutive` is below 1, or `tree` holds no
        `LossScaleState`, or several.
      TypeError: If `max_consecutive` is not an integer.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.dynamic_loss_scale(1024.0)
      >>> state = rule.adjust(rule.init(), False)
      >>> ols.raise_if_stalled(state)
      >>> ols.raise_if_stalled(state, max_consecutive=1)
      Traceback (most recent call last):
      ...
      optax_lossscale._telemetry.LossScaleStalledError: the last 1 steps ...
    """
    static_count("max_consecutive", max_consecutive)
    state = find_loss_scale_state(tree)
    consecutive = int(np.max(state.notfinite_count))
    if consecutive >= max_consecutive:
        raise LossScaleStalledError(
            f"the last {consecutive} steps were skipped (limit {max_consecutive}; "
            f"{np.max(state.total_notfinite)} of {np.max(state.step_count)} in all), "
            f"and the loss scale is {np.min(state.loss_scale):g}. (Look for NaN and "
            "infinity in the batch, in the parameters and in the loss, which no "
            "scale mends; and at the learning rate.)"
        )
