"""Prints the benchmarks' tables, and the versions that they were obtained with."""

import json
import pathlib
from typing import Any

import jax
import optax

Tables = dict[str, list[dict[str, Any]]]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints rows as one aligned Markdown table, with the first row's keys on top."""
    table = [list(rows[0]), *([_quoted(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    first_width, *other_widths = widths
    rule = [f":{'-' * (first_width - 1)}"]
    rule += [f"{'-' * (width - 1)}:" for width in other_widths]
    for first, *others in [table[0], rule, *table[1:]]:
        cells = [
            cell.rjust(width) for cell, width in zip(others, other_widths, strict=True)
        ]
        print("| " + " | ".join([first.ljust(first_width), *cells]) + " |")


def _quoted(cell: object) -> str:
    """Puts a cell in backticks if Markdown would turn it bold, as `__pow__`."""
    text = str(cell)
    return f"`{text}`" if "**" in text or "__" in text else text


def print_tables(title: str, tables: Tables, file: pathlib.Path | None) -> None:
    """Prints tables under a title and their own names, and writes them as JSON.

    A table without rows is not printed.
    """
    print(title)
    for name, rows in tables.items():
        if rows:
            print(f"\n#### {name}\n")
            print_table(rows)
    if file is not None:
        file.write_text(json.dumps(tables, indent=1))


def versions() -> str:
    """Names the versions of JAX and Optax, and the devices that JAX uses."""
    device = jax.devices()[0]
    return (
        f"JAX {jax.__version__}, Optax {optax.__version__}, "
        f"{jax.device_count()} {device.device_kind.upper()}"
    )
