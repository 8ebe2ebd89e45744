"""Plots of a run's loss scale, of exponents, and of operations.

Each function draws into the axes that it is given, or else makes new ones, and returns
them. Calling one needs matplotlib (`pip install matplotlib`); importing this module
does not.

Steps are counted from 0, and the loss scale drawn at a step is the one that this step
used. The last point of a curve is the scale that the next step would use.

    >>> import optax_lossscale as ols
    >>> history = [{"loss_scale": 8.0, "last_finite": True}]
    >>> ols.plotting.plot_loss_scale(history).get_ylabel()
    'loss scale'
"""

from optax_lossscale.plotting._numbers import plot_exponent_histogram, plot_operations
from optax_lossscale.plotting._training import plot_loss_scale, plot_training

__all__ = [  # noqa: RUF022, from a run to its numbers.
    "plot_loss_scale",
    "plot_training",
    "plot_operations",
    "plot_exponent_histogram",
]
