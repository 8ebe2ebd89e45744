"""Draw exponents, and the magnitudes of operations, over the range of a dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._ground.checks import check_float_dtype
from optax_lossscale.diagnostics._operation import Operation, first_nonfinite
from optax_lossscale.diagnostics._trees import ExponentHistogram
from optax_lossscale.plotting._axes import (
    BLUE,
    COLORS,
    GREEN,
    RED,
    axes_or_new,
    check_mapping,
)

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

    Guide: https://optax-lossscale.github.io/optax_lossscale/do_i_need_this.html

    Args:
      histograms: A mapping from labels, such as `"scaled by 2**15"`, to results of
        `exponent_histogram`. Colours repeat after seven of them.
      dtype: The floating dtype whose range is shaded.
      ax: Axes to draw into. None makes a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: If matplotlib is missing.
      TypeError: If `histograms` is not a mapping, if `dtype` is not a floating dtype,
        or, raised by JAX, if it is called inside `jit`.

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
    ends = _ends_of(check_float_dtype("dtype", dtype))
    lowest, normal, top = np.frexp(ends)[1] - 1  # As `exponent_histogram` has them.
    # Beneath the axes, the legend needs room.
    ax = axes_or_new(ax, height=max(4.0, 3.5 + 0.12 * len(histograms)))
    _shade_range(ax.axvspan, dtype, (lowest - 0.5, normal - 0.5, top + 0.5))
    for color, label in zip(cycle(COLORS), histograms, strict=False):
        histogram = histograms[label]
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
            linewidth=2,
            label=f"{label} ({', '.join(shares)})" if shares else label,
        )
    ax.set(
        xlabel="exponent: floor(log2(abs(entry)))", ylabel="share of nonzero entries"
    )
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
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
    the same colour one that received some, both at the magnitude in float32. The title
    names the first that made some. Results that are all zero have no place on the
    logarithmic axis, and magnitudes more than 8 bits outside the dtype's range stand at
    its ends.

    Up to 50 operations are named by their primitives, more by their scopes.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      operations: What `trace_operations` returned, or a part of it; not empty.
      dtype: The floating dtype whose range is shaded, of 32 bits or less.
      ax: Axes to draw into. None makes a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: If matplotlib is missing.
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `operations` is empty.

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
    if not operations:
        raise ValueError("`operations` must hold at least one operation, got none.")
    ax = axes_or_new(ax, width=min(14.0, max(7.0, 0.25 * len(operations))), height=5.0)
    _shade_range(ax.axhspan, dtype, ends)
    low, high = ends[0] * 2.0**-8, ends[2] * 2.0**8
    computed = np.array([x.largest for x in operations])
    exact = np.array([x.float32_largest for x in operations])
    is_backward = np.array([x.is_backward for x in operations])
    is_made = np.array([x.made_nonfinite > 0 for x in operations])
    is_received = np.array([x.nonfinite > 0 for x in operations]) & ~is_made
    is_finite = np.isfinite(computed)
    is_drawn = is_finite & (computed > 0)
    # Of two dots in one place the upper one would hide the other.
    is_hidden = np.isclose(computed, exact, rtol=0.1, atol=0.0)
    differs = is_finite & (exact > 0) & ~is_hidden
    size = float(np.clip(3000 / len(operations), 4, 36))
    for chosen, heights, color, marker, area, label in (
        (differs, exact, "#888888", "o", size, "in float32, where it differs"),
        (is_drawn & ~is_backward, computed, BLUE, "o", size, "forward"),
        (is_drawn & is_backward, computed, GREEN, "o", size, "backward"),
        (is_received, exact, RED, ".", size, "received NaN or infinity"),
        (is_made, exact, RED, "X", 80, "made NaN or infinity"),
    ):
        (places,) = np.nonzero(chosen)
        if places.size:
            heights = np.clip(heights[places], low, high)
            ax.scatter(places, heights, area, color, marker=marker, label=label)
    first = first_nonfinite(operations)
    if first is not None:
        ax.set_title(f"First: {first.primitive}, {first.where}", color=RED)
    ax.set_yscale("log", base=2)
    ax.set_ylim(low / 4, high * 4)
    ax.set_xlim(-0.5, len(operations) - 0.5)
    ax.set(xlabel="operation, in order of execution", ylabel="largest magnitude")
    names = _names(operations)
    ax.set_xticks(list(names), list(names.values()), rotation=90, fontsize="small")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=6 / size**0.5)
    return ax


def _names(operations: Sequence[Operation]) -> dict[int, str]:
    """Where to write which name beneath the axis."""
    if len(operations) <= _MOST_NAMES:
        return {i: operation.primitive for i, operation in enumerate(operations)}
    paths = [x.scope.split("/") if x.scope else [] for x in operations]
    for depth in range(max(map(len, paths)), 0, -1):
        names = enumerate("/".join(path[:depth]) for path in paths)
        groups = [list(group) for _, group in groupby(names, itemgetter(1))]
        # Each name in the middle of its operations, if it has one.
        middles = dict(group[len(group) // 2] for group in groups if group[0][1])
        if len(middles) <= _MOST_NAMES:
            return middles
    return {}


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
