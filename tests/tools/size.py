"""Prints how large the project is. Nobody need obey it.

A line of code holds more than a comment or a part of a docstring.
"""

import ast
import io
import pathlib
import tokenize

ROOT = pathlib.Path(__file__).parents[2]
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(source: str) -> int:
    """Returns the number of lines that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            docstrings |= {*range(text.lineno, text.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def written_lines(source: str) -> int:
    """Returns the number of lines that are not empty."""
    return sum(bool(line.strip()) for line in source.splitlines())


def main() -> None:
    """Prints a line for each figure."""
    for folder in ("optax_lossscale", "tests", "benchmarks", "examples"):
        files = sorted((ROOT / folder).rglob("*.py"))
        texts = [path.read_text() for path in files]
        code, lines = sum(map(lines_of_code, texts)), sum(map(written_lines, texts))
        print(f"{folder}: {code} lines of code, {lines} with docstrings and comments")


if __name__ == "__main__":
    main()
