"""Axes, colours and ranges that the plots share."""

from typing import Any

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#000000"
COLORS = (RED, BLUE, GREEN, ORANGE, PURPLE, SKY, BLACK)
# The line styles of runs differ too, because one curve may lie on another: the first is
# a wide band, and the fifth has rings, apart by a share of the diagonal of the axes.
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
DRAW_OUTSIDE = "Return the arrays from the compiled function, and draw them outside."


def shown(label: object) -> str:
    """Pads a label that starts with an underscore, which matplotlib would hide."""
    return f" {label}" if str(label).startswith("_") else str(label)


def axes_or_new(
    ax: Any, rows: int = 1, *, width: float = 7.0, height: float = 4.0
) -> Any:
    """Returns the given axes, or makes new ones."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "plotting needs matplotlib: pip install matplotlib"
        ) from error
    size = (width, height)
    return plt.subplots(rows, figsize=size, layout="constrained", sharex=rows > 1)[1]
