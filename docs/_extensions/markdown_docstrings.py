"""Shows the package's docstrings, which are Markdown in Google sections, in Sphinx.

Sphinx expects reStructuredText. So each docstring is translated before napoleon reads
its sections: indented formulas become code blocks, tables become tables, and code
becomes a link where it names something public.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

from public_names import public_paths


def path_of(name: str, page: str) -> str | None:
    """The public path that a name means in the docstring of `page`, if there is one."""
    parts = page.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    for path in [*(f"{prefix}.{name}" for prefix in prefixes), name]:
        if path in PATHS and path != page:
            return path
    return None


def inline(text: str, page: str, parameters: set[str]) -> str:
    """Translates code, bold text, which RST does not nest, and addresses of pages."""
    codes = []

    def stash(match: re.Match[str]) -> str:
        code = match[1]
        name = code.partition("(")[0]
        path = None if name in parameters or "<" in code else path_of(name, page)
        codes.append(f":py:obj:`{code} <{path}>`" if path else f"``{code}``")
        return f"\0{len(codes) - 1}\0"

    def split(match: re.Match[str]) -> str:
        parts = re.split(r"(\s*\0\d+\0\s*)", match[1])
        return "".join(f"**{p}**" if p and "\0" not in p else p for p in parts)

    text = re.sub(r"`([^`]+)`", stash, text)
    text = re.sub(r"(?<!\S)\*\*(?=\S)([^*]+)\*\*", split, text)
    # RST ends code only before a space or a sign; `\ ` is an invisible one.
    text = re.sub(r"(\0\d+\0)(?=\w)", r"\1\\ ", text)
    text = re.sub(rf"{SITE}([\w/]+)\.html", r":doc:`/\1`", text)  # With its title.
    return re.sub(r"\0(\d+)\0", lambda match: codes[int(match[1])], text)


def table(lines: list[str]) -> list[str]:
    """Translates a Markdown table, whose second line is a rule."""
    result = [".. list-table::", "   :header-rows: 1", ""]
    for line in lines[:1] + lines[2:]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        starts = ["   * - "] + ["     - "] * (len(cells) - 1)
        result += [(s + cell).rstrip() for s, cell in zip(starts, cells, strict=True)]
    return result


def language_of(block: str) -> str:
    """Which colours a block gets: those of Python, if it is Python."""
    if ">>>" in block:
        return "pycon"
    try:
        ast.parse(textwrap.dedent(block))
    except SyntaxError:
        return "text"
    return "python"


def translate(lines: list[str], page: str, parameters: set[str]) -> list[str]:
    """Translates a docstring block by block; blocks are separated by empty lines."""
    result: list[str] = []
    indent = 0  # Of the last line of text; a formula is indented by four more.
    in_formula = False
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        block_lines = block.split("\n")
        own = len(block) - len(block.lstrip())
        if own >= indent + 4:
            if not in_formula:
                result += [" " * indent + f".. code-block:: {language_of(block)}", ""]
            in_formula = True
            result += [*block_lines, ""]
            continue
        in_formula = False
        if block.lstrip().startswith("|"):
            block_lines = table(inline(block, page, parameters).split("\n"))
        else:
            doctest = re.search(r"^\s*>>>", block, flags=re.MULTILINE)
            end = doctest.start() if doctest else len(block)
            block_lines = inline(block[:end], page, parameters).split("\n")
            last = next((line for line in reversed(block_lines) if line.strip()), block)
            indent = len(last) - len(last.lstrip())
            if doctest:
                block_lines = [*block_lines[:-1], *block[end:].split("\n")]
        result += [*block_lines, ""]
    return result


def process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Translates the docstring in place. Its own parameters never become links."""
    if re.search(r"```|\]\(", "\n".join(lines)):
        raise ValueError(f"{name}: fences and links are not translated.")
    parameters = {match[1] for line in lines if (match := re.match(r"  (\w+): ", line))}
    lines[:] = translate(lines, name, parameters)


def process_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Shows the types as they are written in the source, which is short."""
    if signature is None or what not in ("function", "method", "class"):
        return None
    written = inspect.signature(obj)
    if what == "method" and next(iter(written.parameters), None) == "self":
        written = written.replace(parameters=[*written.parameters.values()][1:])
    if what == "class":
        written = written.replace(return_annotation=inspect.Signature.empty)
    text = stringify_signature(written, unqualified_typehints=True)
    # Sphinx writes `Callable[..., Any]` of `collections.abc` with two brackets.
    arguments, arrow, result = text.replace("[[...]", "[...").rpartition(" -> ")
    return (arguments, result) if arrow else (result, None)


def resolve(
    app: Sphinx, env: Any, node: nodes.Element, text: nodes.Element
) -> nodes.Element | None:
    """Links the types in signatures to their public paths, where they have one.

    A type of a library that is not documented there is shown without a link.
    """
    in_signature = node.parent.tagname in ("desc_sig_name", "desc_returns")
    if node.get("refdomain") != "py" or not in_signature:
        return None
    page = str(node.get("py:module"))
    path = path_of(node["reftarget"].rpartition(".")[2], page)
    if path is None:
        return text
    domain = env.domains["py"]
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", path, node, text
    )


PATHS = set(public_paths())
SITE = r"https://[\w-]+\.github\.io/optax_lossscale/"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the translation before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("missing-reference", resolve, priority=900)
    return {"parallel_read_safe": True}
