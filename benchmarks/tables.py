"""How the benchmarks print what they found."""

from typing import Any

import jax
import optax


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints rows as one aligned table; the first row names the columns."""
    table = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (w - 1)}:" for w in widths[1:])]
    for first, *others in [table[0], rule, *table[1:]]:
        cells = [cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True)]
        print("| " + " | ".join([first.ljust(widths[0]), *cells]) + " |")


def versions() -> str:
    """What the figures were obtained with."""
    device = jax.devices()[0]
    return (
        f"JAX {jax.__version__}, Optax {optax.__version__}, "
        f"{jax.device_count()} {device.device_kind.upper()}"
    )
