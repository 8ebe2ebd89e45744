"""Draw the magnitudes of the operations of a program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._checks import check_float_dtype
from optax_lossscale._operations.operation import Operation, first_nonfinite
from optax_lossscale.plotting._axes import (
    BLUE,
    GREEN,
    RED,
    axes_or_new,
    ends_of,
    shade_range,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMES = 50  # More names of operations or scopes would not be legible.


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
      dtype: The floating dtype whose range is shaded.
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
    ends = ends_of(check_float_dtype("dtype", dtype))
    if not operations:
        raise ValueError("`operations` must hold at least one operation, got none.")
    ax = axes_or_new(ax, width=min(14.0, max(7.0, 0.25 * len(operations))), height=5.0)
    shade_range(ax.axhspan, dtype, ends)
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
    depths = range(1, 1 + max(map(len, paths)))
    candidates = [_names_at(paths, depth) for depth in depths]
    legible = [names for names in candidates if len(names) <= _MOST_NAMES]
    return max(legible, key=len, default={})


def _names_at(paths: Sequence[Sequence[str]], depth: int) -> dict[int, str]:
    """The names of the scopes at a depth, each in the middle of its operations."""
    names, start = {}, 0
    shortest = math.ceil(len(paths) / (2 * _MOST_NAMES))
    for path, group in itertools.groupby(paths, lambda path: path[:depth]):
        size = len(list(group))
        if path and size >= shortest:
            names[start + size // 2] = "/".join(path)
        start += size
    return names
