"""Draw the exponents of numbers, and which of them a dtype flushes to zero."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._checks import (
    check_concrete,
    check_float_dtype,
    check_mapping,
    check_numbers,
)
from optax_lossscale._tree import floating_leaves
from optax_lossscale._types import PyTree
from optax_lossscale.diagnostics import ExponentHistogram, underflow_fraction
from optax_lossscale.plotting import _axes
from optax_lossscale.plotting._axes import COLORS, DRAW_OUTSIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    check_concrete("histograms", list(histograms.values()), DRAW_OUTSIDE)
    _, ends = np.frexp(_axes.ends_of(check_float_dtype("dtype", dtype)))
    # Beneath the axes, the legend needs room.
    ax = _axes.axes_or_new(ax, height=max(4.0, 3.5 + 0.12 * len(histograms)))
    # For 1.0 `frexp` gives 1, but its exponent is 0, whose bin is from -0.5 to 0.5.
    _axes.shade_range(ax.axvspan, dtype, tuple(ends - [1.5, 1.5, 0.5]))
    styled_histograms = zip(
        cycle(COLORS), cycle(("-", "--", "-.", ":")), histograms.items(), strict=False
    )
    for color, style, (label, histogram) in styled_histograms:
        exponents, counts = map(np.asarray, histogram[:2])
        drawn = int(counts.sum())
        zero, nonfinite = int(histogram.zero_count), int(histogram.nonfinite_count)
        total = drawn + zero + nonfinite
        undrawn = {"zero": zero, "not finite": nonfinite}
        shares = [f"{n / total:.0%} {kind}" for kind, n in undrawn.items() if n]
        ax.stairs(
            counts / max(drawn, 1),
            np.append(exponents, exponents[-1] + 1) - 0.5,
            color=color,
            linestyle=style,
            linewidth=2,
            label=_axes.shown(f"{label} ({', '.join(shares)})" if shares else label),
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
    check_concrete("tree", (tree, scale), DRAW_OUTSIDE)
    leaves = floating_leaves(tree)
    factors = np.atleast_1d(check_numbers("scale", scale).astype(np.float32))
    if not leaves or not factors.size:
        raise ValueError(
            "`tree` must have a floating leaf, and `scale` a number, got "
            f"{len(leaves)} floating leaves and `scale` of shape {factors.shape}."
        )
    ax = _axes.axes_or_new(ax, height=max(4.0, 0.22 * len(leaves) * len(factors)))
    rows, height = np.arange(len(leaves)), 0.8 / len(factors)
    shares = [
        [100 * underflow_fraction(leaf, scale=x, dtype=dtype) for x in factors]
        for leaf in leaves.values()
    ]
    widths = np.array(shares, float).T
    for index, (color, factor) in enumerate(zip(cycle(COLORS), factors, strict=False)):
        ax.barh(
            rows + (index - (len(factors) - 1) / 2) * height,
            widths[index],
            height,
            color=color,
            label=f"scale 2**{np.log2(factor):g}",
        )
    ax.set_yticks(rows, [path or "the array" for path in leaves])
    ax.invert_yaxis()
    ax.set_xlabel(f"share of nonzero entries flushed to zero in {name}, in %")
    ax.set_xlim(0, min(100, 1.05 * widths.max()) or 100)  # All if no bar is drawn.
    ax.legend()
    return ax
