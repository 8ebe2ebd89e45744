"""Run the programs of a page."""

import re

from helpers.files import ROOT


def run_section(page, heading):
    """Runs the Python blocks under a heading of level 2; returns what they define."""
    text = (ROOT / page).read_text()
    section = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S
    )
    fence = r"^```(?:python|\{code-cell\})\n(.*?)^```"
    blocks = re.findall(fence, section.group(1), re.M | re.S)
    assert blocks, heading
    names = {"__name__": heading}
    for block in blocks:
        exec(compile(block, f"{page}: {heading}", "exec"), names)
    return names
