"""Counts memory traffic, kernels and collectives in the text of a compiled program."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

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


COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?\((.*?)\), (.*)"
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
MOVED = re.compile(
    r" (?:bitcast|copy|copy-start|copy-done|get-tuple-element)\(%([\w.\-]+)"
)
HALF = re.compile(r" = (b?f16)\[\]\S* add\(")


class Sent(NamedTuple):
    """An array that a collective sends between devices.

    Attributes:
      kind: The collective as it is written in the program.
      dtype: The dtype in which it sums, or that it copies.
      elements: Number of elements of the whole array, before or after it is split.
      is_gather: Whether it puts pieces together. XLA for TPU writes some gathers as an
        all-reduce of pieces that are padded with zeros.
    """

    kind: str
    dtype: str
    elements: int
    is_gather: bool

    @property
    def megabytes(self) -> float:
        """The size of the whole array."""
        bits = BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype))
        return self.elements * bits / 8e6


def sent_arrays(program: str) -> Iterator[Sent]:
    """Yields each array that a compiled program sends between devices.

    A collective of several arrays yields each of them, and the two halves of an
    asynchronous collective count once.
    """
    bodies = dict(COMPUTATION.findall(program))
    lines = {
        match[1]: line.strip()
        for line in program.splitlines()
        if (match := re.match(r"\s*(?:ROOT )?%([\w.\-]+) = ", line))
    }
    for line in lines.values():
        match = COLLECTIVE.search(line)
        if not match:
            continue
        kind, _, operands, rest = match.groups()
        names = re.findall(r"%([\w.\-]+)", operands)
        is_gather = kind == "all-gather"
        types = arrays_of(line[: match.start()])[-len(names) :]
        if not is_gather:
            types = [arrays_of(lines[name].split("(%")[0])[0] for name in names]
        reducer = re.search(r"to_apply=%([\w.\-]+)", rest)
        half = HALF.search(bodies[reducer[1]]) if reducer else None
        for name, (dtype, elements) in zip(names, types, strict=True):
            is_padded = kind == "all-reduce" and is_padded_piece(name, lines, bodies)
            if dtype == "u32" and half:  # Two 16-bit numbers in a word.
                dtype, elements = half[1], 2 * elements
            yield Sent(kind, dtype, elements, is_gather or is_padded)


def arrays_of(types: str) -> list[tuple[str, int]]:
    """Returns the dtype and the number of elements of each array in a type."""
    return [
        (dtype, math.prod(int(size) for size in dims.split(",") if size))
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", types)
    ]


def is_padded_piece(name: str, lines: dict[str, str], bodies: dict[str, str]) -> bool:
    """Whether an array is a piece of a larger one, written among zeros."""
    line = lines[name]
    while match := MOVED.search(line):
        line = lines[match[1]]
    called = re.search(r"calls=%([\w.\-]+)", line)
    return "dynamic-update-slice(" in (bodies[called[1]] if called else line)
