"""Counts memory traffic and kernels in the text of a compiled program."""

import math
import re

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done"}
BITS = {"pred": 8, "bf16": 16}
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")


def bytes_of(types: str) -> int:
    """Returns the bytes of the arrays in a type that are in main memory.

    Arrays in a TPU's on-chip memory, which XLA marks with `S(1)`, count as zero.
    """
    total = 0
    for name, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", types):
        bits = BITS.get(name) or int(re.sub(r"\D", "", name) or 0)
        if "S(" not in layout:
            size = math.prod(int(size) for size in dims.split(",") if size)
            total += size * bits // 8
    return total


def bytes_and_kernels(program: str) -> tuple[int, int]:
    """Returns the bytes that a compiled program moves, and the kernels that it runs.

    Each operation of the entry computation is a kernel that reads each of its operands
    once and writes its result. The operations in `FREE` move nothing.
    """
    entry = program[program.index("\nENTRY") :]
    types: dict[str, str] = {}
    moved = kernels = 0
    for line in entry[: entry.index("\n}")].splitlines():
        match = INSTRUCTION.match(line)
        if not match:
            continue
        name, result, operation, rest = match.groups()
        types[name] = result
        if operation in FREE:
            continue
        kernels += 1
        operands = set(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
        moved += sum(bytes_of(types[operand]) for operand in operands)
        # The result type of `copy-start` repeats the operand; only the copy is written.
        written = result if operation != "copy-start" else result.split("}, ")[0] + "}"
        moved += bytes_of(written)
    return moved, kernels
