"""Plots of a run's loss scale, of exponents, and of entries flushed to zero.

Each function draws into the axes that it is given, or else makes new ones, and returns
them. Calling one needs matplotlib, which `pip install 'optax-lossscale[plot]'`
installs; importing this module does not.

Steps are counted from 0, and the loss scale drawn at a step is the one that this step
used. The last point of a curve is the scale that the next step would use.

    >>> import jax.numpy as jnp, optax_lossscale as ols
    >>> ols.plotting.plot_underflow_by_leaf(jnp.ones(3)).get_xlabel()
    'share of nonzero entries flushed to zero in float16, in %'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._checks import (
    check_concrete,
    check_float_dtype,
    check_mapping,
    check_numbers,
    check_scale,
)
from optax_lossscale._tree import floating_leaves
from optax_lossscale._types import Metrics, PyTree
from optax_lossscale.diagnostics import ExponentHistogram, underflow_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [  # noqa: RUF022, in the order of this file.
    "plot_loss_scale",
    "plot_training",
    "plot_exponent_histogram",
    "plot_underflow_by_leaf",
]

# Okabe and Ito's colours, which colour-blind people can tell apart. The line styles
# differ too, because one curve may lie on another: the first is a wide band, and the
# fifth has rings.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#000000"
_DRAW_OUTSIDE = "Return the arrays from the compiled function, and draw them outside."
_SELECT_ONE = (
    " (To draw one device or ensemble member, pass `jax.tree.map(lambda x: x[:, 0], "
    "history)`, with `x[0]` instead if `history` is a list or steps come last.)"
)
# Rings are apart by a share of the diagonal of the axes.
_RINGS = {"marker": "o", "markevery": 0.06, "markerfacecolor": "none"}
STYLES: tuple[dict[str, Any], ...] = (
    {"color": BLACK, "linewidth": 6, "alpha": 0.25},
    {"color": RED, "linewidth": 1.5},
    {"color": ORANGE, "linewidth": 1.5},
    {"color": BLUE, "linewidth": 1.5, "linestyle": "--"},
    {"color": GREEN, "linewidth": 1.5, "linestyle": ":", **_RINGS},
    {"color": PURPLE, "linewidth": 1.5, "linestyle": "-."},
    {"color": SKY, "linewidth": 1.5, "linestyle": (0, (8, 2))},
)


def plot_loss_scale(
    history: Metrics | Sequence[Metrics],
    *,
    init_scale: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the loss scale over the steps of a run, and marks the skipped steps.

    Collect `loss_scale_metrics(opt_state)` after every update, and pass the list. The
    metrics hold the scale as the update left it, for the next step. So the scale that
    a step used is that of the metrics before, and a skipped step is marked at the scale
    that overflowed. The axis of the loss scale is logarithmic, in powers of two.

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
      ValueError: If `history` lacks a key, is empty, or is not stacked, or if
        `init_scale` is not a usable loss scale.
      TypeError: If `init_scale` is not a number, if `history` holds strings or steps
        whose shapes differ, or if it is called inside `jit`.

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
    check_concrete("history", history, _DRAW_OUTSIDE)
    stacked = _stacked(history)
    after = check_numbers("history['loss_scale']", stacked["loss_scale"])
    finite = check_numbers("history['last_finite']", stacked["last_finite"]) != 0
    if after.ndim != 1 or finite.shape != after.shape or not after.size:
        hints = {0: " (Pass a list of the dicts, one for each step.)", 1: ""}
        raise ValueError(
            f"`history` must be stacked over steps, got shapes {after.shape} and "
            f"{finite.shape}.{hints.get(after.ndim, _SELECT_ONE)}"
        )
    first = after[0] if init_scale is None else check_scale("init_scale", init_scale)
    scales = np.concatenate([[first], after])  # Step t used scales[t].
    skipped = np.flatnonzero(~finite)
    ax = _axes(ax)
    ax.step(
        np.arange(len(scales)), scales, where="post", color=BLUE, label="loss scale"
    )
    if skipped.size:
        label = f"skipped: {skipped.size} of {finite.size} steps"
        ax.plot(skipped, scales[skipped], "x", color=RED, label=label)
    ax.set_yscale("log", base=2)
    ax.set(xlabel="step", ylabel="loss scale")
    from matplotlib.ticker import MaxNLocator

    # Given axes may be logarithmic, or have ticks of their own.
    if isinstance(ax.xaxis.get_major_locator(), MaxNLocator):
        ax.locator_params(axis="x", integer=True)
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
      TypeError: If `losses` or `loss_scales` is not a mapping or holds strings, or if
        it is called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> run = {"float16": jnp.array([2.0, 1.0])}
      >>> [ax.get_ylabel() for ax in ols.plotting.plot_training(run, run)]
      ['training loss', 'loss scale']
    """
    check_mapping("losses", losses, "'float16': losses")
    check_mapping("loss_scales", loss_scales, "'float16': loss_scales")
    runs = [*losses.values(), *loss_scales.values()]
    check_concrete("losses", runs, _DRAW_OUTSIDE)
    loss_ax, scale_ax = _axes(ax, rows=2, height=6.0)
    for style, (name, loss) in zip(cycle(STYLES), losses.items(), strict=False):
        values = check_numbers(f"losses[{name!r}]", loss)
        loss_ax.semilogy(values, label=_shown(name), **style)
        if name in loss_scales:
            scales = check_numbers(f"loss_scales[{name!r}]", loss_scales[name])
            scale_ax.plot(scales, drawstyle="steps-post", label=_shown(name), **style)
    scale_ax.set_yscale("log", base=2)
    loss_ax.set(ylabel="training loss")
    scale_ax.set(xlabel="step", ylabel="loss scale")
    for axes in (loss_ax, scale_ax):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    return loss_ax, scale_ax


def plot_exponent_histogram(
    histograms: Mapping[str, ExponentHistogram],
    *,
    dtype: jax.typing.DTypeLike = jnp.float16,
    ax: Axes | None = None,
) -> Axes:
    """Draws histograms of exponents over the range of a dtype.

    The range of normal numbers is shaded. The range of subnormal numbers, where bits
    are lost, is shaded paler. Entries to the left of both become zero, and entries to
    the right become infinite.

    Args:
      histograms: A mapping from labels, such as `"scaled by 2**15"`, to results of
        `exponent_histogram`. Colours repeat after seven of them, and pairs of
        colour and line style after 28.
      dtype: The floating dtype whose range is shaded.
      ax: Axes to draw into. None makes a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: If matplotlib is missing.
      TypeError: If `histograms` is not a mapping, if `dtype` is not a floating dtype,
        or if it is called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> histogram = ols.diagnostics.exponent_histogram(jnp.array([1e-9, 1e-3]))
      >>> ols.plotting.plot_exponent_histogram({"gradients": histogram}).get_xlabel()
      'exponent: floor(log2(abs(entry)))'

    References:
      MindSpore's guide to mixed precision, and Micikevicius et al., ICLR 2018,
      figure 3 (https://arxiv.org/abs/1710.03740), show such histograms.
    """
    check_mapping("histograms", histograms, "'gradients': histogram")
    check_concrete("histograms", list(histograms.values()), _DRAW_OUTSIDE)
    lowest, normal, highest = _range_of(dtype)
    # Beneath the axes, the legend needs room.
    ax = _axes(ax, height=max(4.0, 3.5 + 0.12 * len(histograms)))
    name = jnp.dtype(dtype).name
    ax.axvspan(
        normal - 0.5, highest + 0.5, color="#BBBBBB", lw=0, label=f"{name} range"
    )
    label = f"{name} subnormal: bits lost"
    ax.axvspan(lowest - 0.5, normal - 0.5, color="#E4E4E4", lw=0, label=label)
    colors = cycle((RED, BLUE, GREEN, ORANGE, PURPLE, SKY, BLACK))
    styles = cycle(("-", "--", "-.", ":"))
    styled_histograms = zip(colors, styles, histograms.items(), strict=False)
    for color, style, (label, histogram) in styled_histograms:
        exponents = np.asarray(histogram.exponents)
        counts = np.asarray(histogram.counts)
        undrawn = {
            "zero": int(histogram.zero_count),
            "not finite": int(histogram.nonfinite_count),
        }
        drawn = int(counts.sum())
        total = drawn + sum(undrawn.values())
        shares = [f"{n / total:.0%} {kind}" for kind, n in undrawn.items() if n]
        label = f"{label} ({', '.join(shares)})" if shares else label
        ax.stairs(
            counts / max(drawn, 1),
            np.append(exponents, exponents[-1] + 1) - 0.5,
            color=color,
            linestyle=style,
            linewidth=2,
            label=_shown(label),
        )
    ax.set(
        xlabel="exponent: floor(log2(abs(entry)))", ylabel="share of nonzero entries"
    )
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return ax


def plot_underflow_by_leaf(
    tree: PyTree,
    *,
    scale: jax.typing.ArrayLike = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float16,
    ax: Axes | None = None,
) -> Axes:
    """Draws which share of each leaf's nonzero entries a dtype flushes to zero.

    Args:
      tree: Unscaled gradients in float32.
      scale: `f32[]`, dimensionless, positive. Entries are multiplied by it before they
        are rounded. With an array `f32[n]`, each leaf gets a bar for each scale.
        Colours repeat after seven scales.
      dtype: The floating dtype in which entries are flushed.
      ax: Axes to draw into. None makes a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If the tree has no floating leaf, or `scale` is empty or not positive.
      TypeError: If `scale` holds anything but numbers, if `dtype` is not a floating
        dtype, or if it is called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> grads = {"w": jnp.array([1e-9, 1e-3]), "b": jnp.ones(2)}
      >>> ax = ols.plotting.plot_underflow_by_leaf(grads)
      >>> [round(bar.get_width()) for bar in ax.patches]
      [0, 50]
    """
    name = jnp.dtype(check_float_dtype("dtype", dtype)).name
    check_concrete("tree", (tree, scale), _DRAW_OUTSIDE)
    leaves = floating_leaves(tree)
    factors = np.atleast_1d(check_numbers("scale", scale).astype(np.float32))
    if not leaves or not factors.size:
        raise ValueError(
            "`tree` must have a floating leaf, and `scale` a number, got "
            f"{len(leaves)} floating leaves and `scale` of shape {factors.shape}."
        )
    ax = _axes(ax, height=max(4.0, 0.22 * len(leaves) * len(factors)))
    rows = np.arange(len(leaves))
    height = 0.8 / len(factors)
    colors = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)
    largest = 0.0
    for index, factor in enumerate(factors):
        shares = [
            100 * float(underflow_fraction(leaf, scale=factor, dtype=dtype))
            for leaf in leaves.values()
        ]
        ax.barh(
            rows + (index - (len(factors) - 1) / 2) * height,
            shares,
            height,
            color=colors[index % len(colors)],
            label=f"scale 2**{np.log2(factor):g}",
        )
        largest = max(largest, *shares)
    ax.set_yticks(rows, [path or "the array" for path in leaves])
    ax.invert_yaxis()
    ax.set_xlabel(f"share of nonzero entries flushed to zero in {name}, in %")
    ax.set_xlim(0, min(100, 1.05 * largest) or 100)  # All of it if no bar is drawn.
    ax.legend()
    return ax


def _stacked(history: Metrics | Sequence[Metrics]) -> Mapping[str, Any]:
    """The metrics of a run as one dict of arrays, or lists, over its steps."""
    names = {"loss_scale", "last_finite"}
    steps = [history] if isinstance(history, Mapping) else history
    is_metrics = isinstance(steps, Sequence) and all(
        isinstance(metrics, Mapping) and names <= set(metrics) for metrics in steps
    )
    if not (is_metrics and steps):
        raise ValueError(
            "`history` must be one dict with `loss_scale` and `last_finite`, or a list "
            f"of a dict for each step, got {history!r:.60}. (Pass what "
            "`loss_scale_metrics` returned.)"
        )
    if isinstance(history, Mapping):
        return history
    fetched = jax.device_get(list(steps))
    return {name: [metrics[name] for metrics in fetched] for name in names}


def _shown(label: object) -> str:
    """Pads a label that starts with an underscore, which matplotlib would hide."""
    return f" {label}" if str(label).startswith("_") else str(label)


def _axes(ax: Any, rows: int = 1, height: float = 4.0) -> Any:
    """Returns the given axes, or makes new ones."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plotting needs matplotlib: pip install 'optax-lossscale[plot]'"
        ) from error
    size = (7, height)
    return plt.subplots(rows, figsize=size, layout="constrained", sharex=rows > 1)[1]


def _range_of(dtype: jax.typing.DTypeLike) -> tuple[int, int, int]:
    """The exponents of a dtype's smallest, smallest normal and largest number."""
    info: Any = jnp.finfo(check_float_dtype("dtype", dtype))
    numbers = (info.smallest_subnormal, info.tiny, info.max)
    lowest, normal, highest = (int(np.frexp(float(x))[1]) - 1 for x in numbers)
    return lowest, normal, highest
