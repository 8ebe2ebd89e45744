"""Draw the magnitudes of the operations of a program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._checks import check_float_dtype
from optax_lossscale._operations.operation import Operation, first_nonfinite
from optax_lossscale.plotting._axes import BLUE, GREEN, RED, axes_or_new

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
    info: Any = jnp.finfo(check_float_dtype("dtype", dtype))
    if not operations:
        raise ValueError("`operations` must hold at least one operation, got none.")
    ax = axes_or_new(ax, width=min(14.0, max(7.0, 0.25 * len(operations))), height=5.0)
    name, top = jnp.dtype(dtype).name, float(info.max)
    normal, lowest = float(info.tiny), float(info.smallest_subnormal)
    ax.axhspan(normal, top, color="#DDDDDD", lw=0, label=f"{name} range")
    label = f"{name} subnormal: bits lost"
    ax.axhspan(lowest, normal, color="#EFEFEF", lw=0, label=label)
    places = np.arange(len(operations))
    reference = np.array([x.float32_largest for x in operations])
    computed = np.array([x.largest for x in operations])
    is_backward = np.array([x.is_backward for x in operations])
    is_finite = np.isfinite(computed)
    # Of two dots in one place the upper one would hide the other.
    with np.errstate(invalid="ignore", over="ignore"):
        differs = is_finite & (np.abs(computed - reference) > 0.1 * np.abs(reference))
    size = float(np.clip(3000 / len(operations), 4, 36))
    for chosen, numbers, color, label in (
        (differs, reference, "#888888", "in float32, where it differs"),
        (is_finite & ~is_backward, computed, BLUE, "forward"),
        (is_finite & is_backward, computed, GREEN, "backward"),
    ):
        chosen = chosen & (numbers > 0) & np.isfinite(numbers)
        if chosen.any():
            ax.scatter(places[chosen], numbers[chosen], size, color=color, label=label)
    ax.set_yscale("log", base=2)
    ax.set_ylim(*_limits(np.concatenate([reference, computed]), lowest, top))
    _mark_nonfinite(ax, operations, size)
    ax.set(xlabel="operation, in order of execution", ylabel="largest magnitude")
    ax.set_xlim(-0.5, len(operations) - 0.5)
    names = _names(operations)
    ax.set_xticks(list(names), list(names.values()), rotation=90, fontsize="small")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=6 / size**0.5)
    return ax


def _mark_nonfinite(ax: Axes, operations: Sequence[Operation], size: float) -> None:
    """Marks the operations whose results are not finite, and names the first."""
    low, top = ax.get_ylim()
    inside = 2 * low, top / 4

    def mark(places: list[int], marker: str, size: float, label: str) -> None:
        heights = np.clip([operations[i].float32_largest for i in places], *inside)
        if places:
            ax.scatter(places, heights, size, color=RED, marker=marker, label=label)

    received = [i for i, x in enumerate(operations) if x.nonfinite]
    made = [i for i in received if operations[i].made_nonfinite]
    received = [i for i in received if i not in set(made)]
    mark(received, ".", size, "received NaN or infinity")
    mark(made, "X", 80, "made NaN or infinity")
    first = first_nonfinite(operations)
    if first is not None:
        place = next(i for i in made if operations[i] is first)
        is_right = place > len(operations) / 2
        ax.annotate(
            f"{first.primitive}, {first.where}",
            (place, np.clip(first.float32_largest, *inside)),
            xytext=(-8 if is_right else 8, -16),  # Above are the small dots.
            textcoords="offset points",
            ha="right" if is_right else "left",
            color=RED,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _limits(magnitudes: np.ndarray, lowest: float, top: float) -> tuple[float, float]:
    """The ends of the axis: somewhat beyond the dtype's range, and no further."""
    drawn = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    low = min([lowest, *drawn])
    high = max([top, *drawn])
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
