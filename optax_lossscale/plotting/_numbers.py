"""Draw numbers over the range of a dtype: of leaves, and of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, groupby
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._ground.checks import (
    check_concrete,
    check_float_dtype,
)
from optax_lossscale._ground.tree import floating_leaves
from optax_lossscale._ground.types import PyTree
from optax_lossscale.diagnostics._operation import Operation, first_nonfinite
from optax_lossscale.diagnostics._trees import ExponentHistogram, underflow_fraction
from optax_lossscale.plotting._axes import (
    BLUE,
    COLORS,
    DRAW_OUTSIDE,
    GREEN,
    RED,
    axes_or_new,
    shown,
)
from optax_lossscale.plotting._checks import check_mapping, check_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MOST_NAMES = 50  # More names of operations or scopes would not be legible.


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
    _, ends = np.frexp(_ends_of(check_float_dtype("dtype", dtype)))
    # Beneath the axes, the legend needs room.
    ax = axes_or_new(ax, height=max(4.0, 3.5 + 0.12 * len(histograms)))
    # For 1.0 `frexp` gives 1, but its exponent is 0, whose bin is from -0.5 to 0.5.
    _shade_range(ax.axvspan, dtype, tuple(ends - [1.5, 1.5, 0.5]))
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
            label=shown(f"{label} ({', '.join(shares)})" if shares else label),
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
    ax = axes_or_new(ax, height=max(4.0, 0.22 * len(leaves) * len(factors)))
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


def plot_operations(
    operations: Sequence[Operation],
    *,
    dtype: jax.typing.DTypeLike = jnp.float16,
    ax: Axes | None = None,
) -> Axes:
    """Draws the largest magnitude of each operation, in order of execution.

    Each operation is a dot, in one colour for the forward and in another for the
    backward pass. A grey dot shows the magnitude in float32 where it differs by more
    than a tenth. A cross marks an operation that made NaN or infinity, and a point in
    the same colour one that received some, both at the magnitude in float32. Results
    that are all zero have no place on the logarithmic axis. The range of normal numbers
    of the dtype is shaded, and that of subnormal numbers, where bits are lost, paler.

    Up to 50 operations are named by their primitives, more by their scopes.

    Args:
      operations: What `trace_operations` returned, or a part of it; not empty.
      dtype: The floating dtype whose range is shaded, of 32 bits or less.
      ax: Axes to draw into. None makes a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: If matplotlib is missing.
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `operations` is empty, or `dtype` has more than 32 bits.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     return jnp.mean(x @ w)
      >>> w, x = jnp.ones((3, 2)), jnp.ones((1, 3))
      >>> operations = ols.diagnostics.trace_operations(loss_fn, w, x)
      >>> ols.plotting.plot_operations(operations).get_ylabel()
      'largest magnitude'
    """
    ends = _ends_of(check_float_dtype("dtype", dtype))
    if jnp.finfo(dtype).bits > 32:
        raise ValueError(f"`dtype` must have 32 bits or less, got {dtype}.")
    if not operations:
        raise ValueError("`operations` must hold at least one operation, got none.")
    ax = axes_or_new(ax, width=min(14.0, max(7.0, 0.25 * len(operations))), height=5.0)
    _shade_range(ax.axhspan, dtype, ends)
    computed = np.array([x.largest for x in operations])
    exact = np.array([x.float32_largest for x in operations])
    is_backward = np.array([x.is_backward for x in operations])
    is_made = np.array([x.made_nonfinite > 0 for x in operations])
    is_received = np.array([x.nonfinite > 0 for x in operations]) & ~is_made
    is_finite = np.isfinite(computed)
    # Of two dots in one place the upper one would hide the other.
    with np.errstate(invalid="ignore", over="ignore"):
        differs = is_finite & (np.abs(computed - exact) > 0.1 * exact)
    low, high = _limits(np.concatenate([exact, computed]), *ends[::2])
    at_exact = np.clip(exact, 2 * low, high / 4)
    size = float(np.clip(3000 / len(operations), 4, 36))
    for chosen, heights, color, marker, area, label in (
        (differs, exact, "#888888", "o", size, "in float32, where it differs"),
        (is_finite & ~is_backward, computed, BLUE, "o", size, "forward"),
        (is_finite & is_backward, computed, GREEN, "o", size, "backward"),
        (is_received, at_exact, RED, ".", size, "received NaN or infinity"),
        (is_made, at_exact, RED, "X", 80, "made NaN or infinity"),
    ):
        (places,) = np.nonzero(chosen & (heights > 0) & np.isfinite(heights))
        if places.size:
            ax.scatter(places, heights[places], area, color, marker=marker, label=label)
    ax.set_yscale("log", base=2)
    ax.set_ylim(low, high)
    first = first_nonfinite(operations)
    if first is not None:
        place = next(i for i, x in enumerate(operations) if x is first)
        is_right = place > len(operations) / 2
        ax.annotate(
            f"{first.primitive}, {first.where}",
            (place, at_exact[place]),
            xytext=(-8 if is_right else 8, -16),  # Above are the small dots.
            textcoords="offset points",
            ha="right" if is_right else "left",
            color=RED,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    ax.set(xlabel="operation, in order of execution", ylabel="largest magnitude")
    ax.set_xlim(-0.5, len(operations) - 0.5)
    names = _names(operations)
    ax.set_xticks(list(names), list(names.values()), rotation=90, fontsize="small")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=6 / size**0.5)
    return ax


def _limits(magnitudes: np.ndarray, lowest: float, top: float) -> tuple[float, float]:
    """The ends of the axis: somewhat beyond the dtype's range, and no further."""
    drawn = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    low, high = min([lowest, *drawn]), max([top, *drawn])
    return max(low, lowest * 2.0**-12) / 4, min(high, top * 2.0**16) * 16


def _names(operations: Sequence[Operation]) -> dict[int, str]:
    """Where to write which name beneath the axis."""
    if len(operations) <= _MOST_NAMES:
        return {i: operation.primitive for i, operation in enumerate(operations)}
    paths = [x.scope.split("/") if x.scope else [] for x in operations]
    shortest = math.ceil(len(paths) / (2 * _MOST_NAMES))

    def names_at(depth: int) -> dict[int, str]:
        """The names of the scopes at a depth, each in the middle of its operations."""
        groups = groupby(enumerate(paths), lambda place: place[1][:depth])
        long = [x for x in (list(group) for _, group in groups) if len(x) >= shortest]
        middles = [group[len(group) // 2] for group in long]
        return {place: "/".join(path[:depth]) for place, path in middles if path}

    candidates = map(names_at, range(1, 1 + max(map(len, paths))))
    legible = [names for names in candidates if len(names) <= _MOST_NAMES]
    return max(legible, key=len, default={})


def _shade_range(
    span: Callable[..., Any], dtype: jax.typing.DTypeLike, ends: tuple[float, ...]
) -> None:
    """Shades the numbers of a dtype by `ax.axvspan` or `ax.axhspan`.

    Args:
      span: That method.
      dtype: The dtype, for the legend.
      ends: Where its subnormal numbers, its normal numbers and all numbers end: on the
        axis, from the lowest to the highest.
    """
    name, (lowest, normal, highest) = jnp.dtype(dtype).name, ends
    span(normal, highest, color="#CCCCCC", lw=0, label=f"{name} range")
    span(lowest, normal, color="#EAEAEA", lw=0, label=f"{name} subnormal: bits lost")


def _ends_of(dtype: jax.typing.DTypeLike) -> tuple[float, float, float]:
    """The smallest number of a dtype, the smallest normal and the largest one."""
    info: Any = jnp.finfo(dtype)
    return float(info.smallest_subnormal), float(info.tiny), float(info.max)
