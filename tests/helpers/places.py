"""Lines of functions, found by the comments at their ends."""

import inspect
import os


def place_of(function, comment):
    """File, line and innermost function of the line that ends with a comment."""
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    (line,) = [
        first + i
        for i, text in enumerate(lines)
        if text.rstrip().endswith(f"# {comment}")
    ]
    file = os.path.basename(function.__code__.co_filename)
    return f"{file}:{line} ({_innermost(function.__code__, line).co_qualname})"


def _innermost(code, line):
    """The function with a line, of a function and those defined in it."""
    for inner in code.co_consts:
        if inspect.iscode(inner) and line in [x for *_, x in inner.co_lines()]:
            return _innermost(inner, line)
    return code
