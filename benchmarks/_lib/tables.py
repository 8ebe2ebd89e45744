"""The benchmarks' tables: printed, written as JSON, and recorded in a page."""

import argparse
import json
import pathlib
import re
import shlex
import sys
from typing import Any

import jax
import optax

from _lib.files import check_output_file

RESULTS = pathlib.Path(__file__).parents[1] / "results"
Tables = dict[str, list[dict[str, Any]]]


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where a script's tables are written."""
    parser.add_argument(
        "--json", type=check_output_file, help="write the tables to a file"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the tables under this command in the page of `results`",
    )


def publish(title: str, tables: Tables, arguments: argparse.Namespace) -> None:
    """Prints the tables of a script, and writes them where its options say."""
    text = text_of(title, tables)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(tables, indent=1))
    if arguments.record:
        options = [option for option in sys.argv[1:] if option != "--record"]
        record([f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *options], text)


def record(command: list[str], text: str) -> None:
    """Replaces the output below a command, in its page of `results`.

    A page has a block of code for each command of its script. The output is all that
    stands between the block and the next heading of level 2.
    """
    page = RESULTS / f"{pathlib.Path(command[0]).stem}.md"
    page.write_text(with_output(page.read_text(), command, text))


def with_output(page: str, command: list[str], text: str) -> str:
    """Returns the text of a page with another output below a command."""
    for block in re.finditer(r"```bash\n(.*?)```\n", page, flags=re.DOTALL):
        if shlex.split(block[1]) == ["python", *command]:
            rest = re.search(r"^## .*", page[block.end() :], re.MULTILINE | re.DOTALL)
            after = f"\n{rest[0]}" if rest else ""
            return f"{page[: block.end()]}\n{text}\n{after}"
    raise SystemExit(f"The page has no block with `python {shlex.join(command)}`.")


def recorded(name: str) -> Tables:
    """Returns the tables of a page of `results`, by their headings.

    Of a heading that the page has twice, the first.
    """
    tables: Tables = {}
    pattern = r"^### (.+)\n\n((?:\|.*\n)+)"
    page = (RESULTS / f"{name}.md").read_text()
    for heading, table in re.findall(pattern, page, re.MULTILINE):
        keys, _, *rows = map(_cells, table.splitlines())
        named = [dict(zip(keys, row, strict=True)) for row in rows]
        tables.setdefault(heading, named)
    return tables


def _cells(line: str) -> list[str]:
    """Returns the cells of a line of a table."""
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def text_of(title: str, tables: Tables) -> str:
    """Returns tables as Markdown, under a title and their own names.

    A table without rows is left out.
    """
    parts = [title]
    for name, rows in tables.items():
        if rows:
            parts += [f"### {name}", table_of(rows)]
    return "\n\n".join(parts)


def table_of(rows: list[dict[str, Any]]) -> str:
    """Returns rows as one aligned Markdown table, with the first row's keys on top."""
    table = [list(rows[0]), *([_quoted(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    first_width, *other_widths = widths
    rule = [f":{'-' * (first_width - 1)}"]
    rule += [f"{'-' * (width - 1)}:" for width in other_widths]
    lines = []
    for first, *others in [table[0], rule, *table[1:]]:
        cells = [
            cell.rjust(width) for cell, width in zip(others, other_widths, strict=True)
        ]
        lines.append("| " + " | ".join([first.ljust(first_width), *cells]) + " |")
    return "\n".join(lines)


def _quoted(cell: object) -> str:
    """Puts a cell in backticks if Markdown would turn it bold, as `__pow__`."""
    text = str(cell)
    return f"`{text}`" if "**" in text or "__" in text else text


def versions() -> str:
    """Names the versions of JAX and Optax, and the devices that JAX uses."""
    device = jax.devices()[0]
    return (
        f"JAX {jax.__version__}, Optax {optax.__version__}, "
        f"{jax.device_count()} {device.device_kind.upper()}"
    )
