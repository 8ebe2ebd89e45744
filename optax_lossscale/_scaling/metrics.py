"""Metrics for a training loop to log, and checks that it has not stalled."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._ground.checks import check_concrete, check_count
from optax_lossscale._ground.tree import is_floating, strengthen
from optax_lossscale._ground.types import PyTree, public
from optax_lossscale._scaling.mistakes import warn_of_order
from optax_lossscale._scaling.scale import unscale
from optax_lossscale._scaling.state import find_loss_scale_state, get_loss_scale


@public
class LossScaleStalledError(RuntimeError):
    """Raised by `raise_if_stalled` if too many steps in a row were skipped.

    Example:
      >>> import optax_lossscale as ols
      >>> issubclass(ols.LossScaleStalledError, RuntimeError)
      True
    """


def loss_scale_metrics(
    tree: PyTree, *, grads: optax.Updates | None = None
) -> dict[str, jax.Array]:
    """Returns metrics of the loss scale, for any logger.

    Call it inside or outside `jit`, or collect its values with `lax.scan`: it is pure,
    and neither waits for the device nor sends it anything. Outside `jit` most values
    are arrays of the state: read them before a step that donates it.

        skip_rate = total_notfinite / step_count    (0 before the first step)
        grad_norm = norm(unscale(grads, tree))      (if `grads` are given)

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/logging.html

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`.
      grads: Scaled gradients, floating leaves of any shape, for their true norm. Then
        `tree` must hold the scale that they were scaled with, so call this before
        `update`, which may change the scale. The norm costs one more read of the
        gradients.

    Returns:
      A dict of `loss_scale` `f32[]`, `last_finite` `bool[]`, `notfinite_count` and
      `total_notfinite` `i32[]` (steps), and `skip_rate` `f32[]` (from 0 to 1). With
      `grads` also `grad_norm`, the L2 norm of all unscaled gradients together, `f32[]`
      or wider; it is NaN or infinite if they are, or if their squares overflow.

    Raises:
      ValueError: If `tree` holds no `LossScaleState`, or several (the message says how
        to pick one).

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> rule = ols.dynamic_loss_scale(1024.0)
      >>> state = rule.adjust(rule.adjust(rule.init(), True), False)
      >>> for name, value in ols.loss_scale_metrics(state).items():
      ...     print(name, value)
      loss_scale 512.0
      last_finite False
      notfinite_count 1
      total_notfinite 1
      skip_rate 0.5
      >>> scaled_grads = jnp.array([3.0, 4.0]) * 512
      >>> ols.loss_scale_metrics(state, grads=scaled_grads)["grad_norm"]
      Array(5., dtype=float32)
    """
    state = find_loss_scale_state(tree)
    skipped, steps = (
        count.astype(jnp.float32) for count in (state.total_notfinite, state.step_count)
    )
    metrics = {
        "loss_scale": get_loss_scale(state),
        "last_finite": state.last_finite,
        "notfinite_count": state.notfinite_count,
        "total_notfinite": state.total_notfinite,
        "skip_rate": skipped / jnp.maximum(steps, 1.0),
    }
    if grads is not None:
        leaves = jax.tree.leaves(unscale(grads, state))
        norm = optax.tree.norm([leaf for leaf in leaves if is_floating(leaf)])
        metrics["grad_norm"] = strengthen(jnp.asarray(norm))
    return metrics


def raise_if_stalled(tree: PyTree, max_consecutive: int = 50) -> None:
    """Raises an error if too many steps in a row were skipped.

    Call it outside `jit`. It waits for the device, so call it only now and then, for
    example every hundred steps.

        raise if notfinite_count >= max_consecutive

    The default scale reaches its floor after 39 overflows in a row, so after 50 the
    scale is no longer the cause.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/logging.html

    Args:
      tree: Any pytree that holds exactly one `LossScaleState`. If its counts are arrays
        with an entry per device or ensemble member, the largest entry is checked.
      max_consecutive: Limit in steps, at least 1.

    Raises:
      LossScaleStalledError: If the scale is NaN, or if the limit is reached. The
        message gives the scale and the counts, and says where to look for the cause.
      ValueError: If `max_consecutive` is below 1, or `tree` holds no
        `LossScaleState`, or several.
      TypeError: If `max_consecutive` is not an integer, or if it is called inside
        `jit`.

    Warns:
      UserWarning: If the scale is `2**-24` or less, the floor of the default rule,
        after `max_consecutive` steps that were applied; or if `optax.MultiSteps` or
        `optax.apply_if_finite` is around `loss_scaled`.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.dynamic_loss_scale(1024.0)
      >>> state = rule.adjust(rule.init(), False)
      >>> ols.raise_if_stalled(state)
      >>> ols.raise_if_stalled(state, max_consecutive=1)
      Traceback (most recent call last):
      ...
      optax_lossscale.LossScaleStalledError: the last 1 steps ...
    """
    check_count("max_consecutive", max_consecutive)
    warn_of_order(tree, may_clip=True)
    state = find_loss_scale_state(tree)
    check_concrete(
        "tree", state, "Call `raise_if_stalled` on the state that the step returns."
    )
    scale = get_loss_scale(state)
    scale, state = jax.device_get((scale, state._replace(rule_state=())))
    consecutive, loss_scale = int(np.max(state.notfinite_count)), np.min(scale)
    skipped, steps = int(np.max(state.total_notfinite)), int(np.max(state.step_count))
    if np.isnan(loss_scale):
        raise LossScaleStalledError(
            "the loss scale is NaN, so every step is skipped. (Restore an older "
            "checkpoint, or call `set_loss_scale(opt_state, 2.0**15)`.)"
        )
    if consecutive >= max_consecutive:
        raise LossScaleStalledError(
            f"the last {consecutive} steps were skipped (limit {max_consecutive}; "
            f"{skipped} of {steps} in all), and the loss scale is {loss_scale:g}. "
            f"{_ADVICE}"
        )
    if loss_scale <= 2.0**-24 and steps - skipped >= max_consecutive:
        warnings.warn(
            f"the loss scale is {loss_scale:g}, at which most float16 gradients are "
            f"zero, so little is learnt; {skipped} of {steps} steps were skipped. "
            f"{_ADVICE}",
            stacklevel=2,
        )


_ADVICE = (
    "(Look for NaN and infinity in the batch, the parameters and the loss, and for "
    "numbers above 65504 inside the model, which no scale can prevent: "
    "`ols.diagnostics.trace_operations` names the operation. Check the learning rate. "
    "If you pass `accept`, it may refuse every step.)"
)
