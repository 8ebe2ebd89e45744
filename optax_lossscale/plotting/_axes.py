"""Axes, colours and a check that the plots share."""

from collections.abc import Mapping
from typing import Any

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#000000"
COLORS = (RED, BLUE, GREEN, ORANGE, PURPLE, SKY, BLACK)
# The line styles of runs differ too, because one curve may lie on another: the first is
# a wide band.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": BLACK, "linewidth": 6, "alpha": 0.25},
    {"color": RED, "linewidth": 1.5},
    {"color": PURPLE, "linewidth": 1.5},
    {"color": BLUE, "linewidth": 1.5, "linestyle": "--"},
    {"color": GREEN, "linewidth": 1.5, "linestyle": ":"},
    {"color": ORANGE, "linewidth": 1.5, "linestyle": "-."},
    {"color": SKY, "linewidth": 1.5, "linestyle": (0, (8, 2))},
)


def axes_or_new(
    ax: Any, rows: int = 1, *, width: float = 5.6, height: float = 4.0
) -> Any:
    """Returns the given axes, or makes new ones."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    size = (width, height)
    return plt.subplots(rows, figsize=size, layout="constrained", sharex=rows > 1)[1]


def check_mapping(name: str, value: object, meant: str) -> None:
    """Refuses what is not a mapping from labels, and says what may have been meant."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{name}` must map labels to {name.replace('_', ' ')}, got an object of "
            f"type {type(value).__name__}. (Did you mean `{{{meant}}}`?)"
        )
