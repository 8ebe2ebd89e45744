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


def run_section(page, heading):
    """Runs the Python blocks under a heading of level 2; returns what they define.

    A block that ends with comments prints them.
    """
    text = (ROOT / page).read_text()
    section = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S
    )
    fence = r"^```(?:python|\{code-cell\})\n(.*?)^```"
    blocks = re.findall(fence, section.group(1), re.M | re.S)
    assert blocks, heading
    names = {"__name__": heading}
    for block in blocks:
        run(block, f"{page}: {heading}", names)
    return names


def run_program(name):
    """Runs `examples/frameworks/<name>.py`; returns what it defines.

    A program that ends with comments prints them.
    """
    path = ROOT / "examples" / "frameworks" / f"{name}.py"
    names = {"__name__": name, "__file__": str(path)}
    run(path.read_text(), str(path), names)
    return names


def run(program, path, names):
    """Runs a program, and checks that it prints the comments at its end, if any."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(program, path, "exec"), names)
    print(output.getvalue(), end="")
    shown = re.search(r"^(?:# .*\n)+\Z", program, re.M)
    if shown:
        assert_alike(output.getvalue(), re.sub("^# ", "", shown[0], flags=re.M))


def assert_alike(printed, shown):
    """Checks that two texts are the same, up to the last digits of their numbers."""
    assert re.sub(NUMBER, "", printed) == re.sub(NUMBER, "", shown)
    pairs = (np.array(re.findall(NUMBER, text), float) for text in (printed, shown))
    np.testing.assert_allclose(*pairs, rtol=0.02, atol=0.02)
