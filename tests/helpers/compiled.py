"""The collective operations of a compiled program."""

import re

COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def collectives_of(compiled):
    """Result types and kind of each collective operation."""
    found = re.findall(
        rf"= (\S+|\(.*?\)) ((?:{COLLECTIVES})(?:-start)?)\(", compiled.as_text()
    )
    return [(re.findall(r"\w+\[.*?\]", result), kind) for result, kind in found]
