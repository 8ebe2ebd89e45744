"""Draw the loss scale and the losses of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import jax
import numpy as np

from optax_lossscale._ground.checks import check_scale
from optax_lossscale._ground.types import Metrics
from optax_lossscale.plotting._axes import BLUE, RED, STYLES, axes_or_new, check_mapping

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_loss_scale(
    history: Metrics | Sequence[Metrics],
    *,
    init_scale: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the loss scale over the steps of a run, and marks the skipped steps.

    Collect `loss_scale_metrics(opt_state)` after every update, and pass the list. Each
    step is drawn at the scale that it used, and a skipped one at the scale that
    overflowed.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/logging.html

    Args:
      history: The metrics that `loss_scale_metrics` returned after each step: a list
        of one dict a step, or one dict of them all, stacked over steps as by
        `lax.scan`. It holds at least `loss_scale`, `f32[steps]`, and `last_finite`,
        `bool[steps]`.
      init_scale: The loss scale that the first step used, which `history` does not
        hold: `get_loss_scale(opt_state)` before that step. None takes the first scale
        of `history`, which is too low if the first step was skipped.
      ax: Axes to draw into. None makes a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If `history` is not the metrics of one run, or `init_scale` not a
        usable loss scale.
      TypeError: If `init_scale` is not a number, or, raised by JAX, if it is called
        inside `jit`.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> rule = ols.dynamic_loss_scale(1024.0)
      >>> state, history = rule.init(), []
      >>> for finite in (False, True, False):
      ...     state = rule.adjust(state, finite)
      ...     history.append(ols.loss_scale_metrics(state))
      >>> ax = ols.plotting.plot_loss_scale(history, init_scale=1024.0)
      >>> scales, skipped = ax.lines
      >>> print(scales.get_ydata())
      [1024.  512.  512.  256.]
      >>> print(skipped.get_xdata(), skipped.get_ydata())
      [0 2] [1024.  512.]
    """
    after, finite = _over_steps(history)
    first = after[0] if init_scale is None else check_scale("init_scale", init_scale)
    scales = np.concatenate([[first], after])  # Step t used scales[t].
    skipped = np.flatnonzero(finite == 0)
    ax = axes_or_new(ax)
    ax.step(
        np.arange(len(scales)), scales, where="post", color=BLUE, label="loss scale"
    )
    if skipped.size:
        label = f"skipped: {skipped.size} of {finite.size} steps"
        ax.plot(skipped, scales[skipped], "x", color=RED, label=label)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="loss scale")
    ax.grid(alpha=0.3)
    ax.legend()
    return ax


def plot_training(
    losses: Mapping[str, jax.typing.ArrayLike],
    loss_scales: Mapping[str, jax.typing.ArrayLike],
    *,
    ax: Sequence[Axes] | None = None,
) -> Sequence[Axes]:
    """Draws the training losses of several runs, and their loss scales beneath.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/logging.html

    Args:
      losses: A mapping from the label of each run to its losses, `f32[steps]` and
        positive. Line styles repeat after seven runs.
      loss_scales: A mapping from some or all of these labels to the loss scale that
        each step of the run used, `f32[steps]`, dimensionless: what
        `get_loss_scale(opt_state)` returns before each update. The scale after the last
        step may follow as one more entry.
      ax: Two axes to draw into. None makes a new figure.

    Returns:
      The two axes.

    Raises:
      ImportError: If matplotlib is missing.
      TypeError: If `losses` or `loss_scales` is not a mapping, or, raised by JAX, if
        it is called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> run = {"float16": jnp.array([2.0, 1.0])}
      >>> [ax.get_ylabel() for ax in ols.plotting.plot_training(run, run)]
      ['training loss', 'loss scale']
    """
    check_mapping("losses", losses, "'float16': losses")
    check_mapping("loss_scales", loss_scales, "'float16': loss_scales")
    loss_ax, scale_ax = axes_or_new(ax, rows=2, height=5.6)
    for style, (name, loss) in zip(cycle(STYLES), losses.items(), strict=False):
        loss_ax.semilogy(_numbers(loss), label=name, **style)
        if name in loss_scales:
            scales = _numbers(loss_scales[name])
            scale_ax.plot(scales, drawstyle="steps-post", label=name, **style)
    scale_ax.set_yscale("log", base=2)
    loss_ax.set(ylabel="training loss")
    scale_ax.set(xlabel="step", ylabel="loss scale")
    for axes in (loss_ax, scale_ax):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    return loss_ax, scale_ax


def _over_steps(history: Metrics | Sequence[Metrics]) -> tuple[np.ndarray, np.ndarray]:
    """The scale after each step of a run, and whether the step was finite."""
    names = ("loss_scale", "last_finite")
    steps = [history] if isinstance(history, Mapping) else history
    is_metrics = isinstance(steps, Sequence) and all(
        isinstance(metrics, Mapping) and {*names} <= {*metrics} for metrics in steps
    )
    if not is_metrics:
        raise ValueError(
            "`history` must be a list of the dicts that `loss_scale_metrics` returned, "
            f"or one such dict stacked over steps, got {history!r:.60}."
        )
    arrays = [_numbers([metrics[name] for metrics in steps]) for name in names]
    after, finite = (x[0] for x in arrays) if isinstance(history, Mapping) else arrays
    if after.ndim != 1 or finite.shape != after.shape or not after.size:
        raise ValueError(
            "`history` must hold one scale and one flag for each step of a run, got "
            f"shapes {after.shape} and {finite.shape}. (Select one device or member.)"
        )
    return after, finite


def _numbers(values: object) -> np.ndarray:
    return np.asarray(jax.device_get(values), float)
