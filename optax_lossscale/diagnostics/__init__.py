"""Finds overflow and underflow: in every operation of a program, and in any pytree.

`trace_operations` runs a function and its gradient once, with the numbers of every
operation, and `first_nonfinite` and `print_operation_report` say what they mean.
`gradient_errors` compares the gradient of each parameter with that in float32, and
`print_gradient_errors` prints the worst first.

The other functions look at the floating leaves of a pytree. All of them but
`print_nonfinite_report` also run under `jit`. Floating leaves may have any shape, and
other leaves are ignored. The real and the imaginary part of a complex number count as
two entries, except in `nonfinite_report`. XLA treats numbers that are subnormal in
float32 as zeros.

    >>> import jax.numpy as jnp, optax_lossscale as ols
    >>> print(ols.diagnostics.headroom_bits(jnp.array([1.0, 255.875])).round(2))
    8.0
"""

from optax_lossscale.diagnostics._gradients import (
    GradientError,
    gradient_errors,
    print_gradient_errors,
)
from optax_lossscale.diagnostics._operation import Operation, first_nonfinite
from optax_lossscale.diagnostics._report import print_operation_report
from optax_lossscale.diagnostics._trace import trace_operations
from optax_lossscale.diagnostics._trees import (
    ExponentHistogram,
    exponent_histogram,
    headroom_bits,
    nonfinite_report,
    print_nonfinite_report,
    suggest_init_scale,
    underflow_fraction,
)

__all__ = [
    "ExponentHistogram",
    "GradientError",
    "Operation",
    "exponent_histogram",
    "first_nonfinite",
    "gradient_errors",
    "headroom_bits",
    "nonfinite_report",
    "print_gradient_errors",
    "print_nonfinite_report",
    "print_operation_report",
    "suggest_init_scale",
    "trace_operations",
    "underflow_fraction",
]
