"""Find and run the programs of a page, and those that pages include."""

import contextlib
import io
import re

import numpy as np

from helpers.files import ROOT

NUMBER = r"-?\d+(?:\.\d+)?"


def cells_of(text):
    """The programs of a page, or of a part of it, that run when the site is built."""
    return re.findall(r"^```{code-cell}\n(?::[^\n]*\n)*(.*?)^```$", text, re.M | re.S)


def program_of(page, heading=""):
    """The program of a page in docs, or of its section under a heading of level 2."""
    text = (ROOT / "docs" / page).read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "\n".join(cells_of(text))


def run_program(name):
    """Runs `examples/frameworks/<name>.py`; returns what it defines.

    A program that ends with comments prints them.
    """
    path = ROOT / "examples" / "frameworks" / f"{name}.py"
    text, names = path.read_text(), {"__name__": name, "__file__": str(path)}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(text, str(path), "exec"), names)
    print(output.getvalue(), end="")
    shown = re.search(r"^(?:# .*\n)+\Z", text, re.M)
    if shown:
        assert_alike(output.getvalue(), re.sub("^# ", "", shown[0], flags=re.M))
    return names


def assert_alike(printed, shown):
    """Checks that two texts are the same, up to the last digits of their numbers."""
    assert re.sub(NUMBER, "", printed) == re.sub(NUMBER, "", shown)
    pairs = (np.array(re.findall(NUMBER, text), float) for text in (printed, shown))
    np.testing.assert_allclose(*pairs, rtol=0.02, atol=0.02)
