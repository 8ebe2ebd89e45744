"""Counts memory traffic, kernels, products and collectives in a compiled program."""

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
BITS = {"pred": 8, "bf16": 16}
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
CALLED = re.compile(r"(?:calls|body|to_apply)=%([\w.\-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONDITION = re.compile(r"condition=%([\w.\-]+)")
PARTS = {"slice", "dynamic-slice", "gather"}


class Instruction(NamedTuple):
    """One line of a compiled program.

    Attributes:
      type: The type of its result.
      operation: What it does.
      operands: The names of its operands.
      rest: What stands behind the name of the operation.
    """

    type: str
    operation: str
    operands: list[str]
    rest: str


Computation = dict[str, Instruction]


def bytes_of(types: str) -> int:
    """Returns the bytes of the arrays in a type that are in main memory.

    Arrays in a TPU's on-chip memory, which XLA marks with `S(1)`, count as zero.
    """
    total = 0
    for name, dims, layout in ARRAY.findall(types):
        if "S(" not in layout:
            size = math.prod(int(size) for size in dims.split(",") if size)
            total += size * bits_of(name) // 8
    return total


def bits_of(dtype: str) -> int:
    """Returns the bits of an entry, such as 16 of `f16`."""
    digits = re.search(r"\d+", dtype)
    return BITS.get(dtype) or int(digits[0] if digits else 0)


def instructions_of(body: str) -> Computation:
    """Reads the instructions of a computation, by the names of their results."""
    found = {}
    for line in body.splitlines():
        if match := INSTRUCTION.match(line):
            name, result, operation, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            found[name] = Instruction(result, operation, operands, rest)
    return found


def bytes_and_kernels(program: str) -> tuple[int, int]:
    """Returns the bytes that a compiled program moves, and the kernels that it runs.

    Each operation is a kernel that reads each of its operands once and writes its
    result. Of an array that it only slices, it reads the slices; of one that it updates
    in place, it writes the new part. The body of a loop counts as often as the loop
    runs. A copy that a TPU makes while it computes moves bytes but is no kernel. The
    operations in `FREE` move nothing.
    """
    bodies = {
        name: instructions_of(body) for name, body in COMPUTATION.findall(program)
    }
    entry = re.search(r"^ENTRY %([\w.\-]+)", program, re.M)
    return cost_of(bodies[entry[1]], bodies)


def cost_of(body: Computation, bodies: dict[str, Computation]) -> tuple[int, int]:
    """Returns the bytes and the kernels of one computation and of those it calls."""
    moved = kernels = 0
    for instruction in body.values():
        operation, rest = instruction.operation, instruction.rest
        called = bodies.get(match[1], {}) if (match := CALLED.search(rest)) else {}
        if operation in FREE or operation.endswith("-done"):
            continue
        if operation.endswith("-start"):
            moved += bytes_of_transfer(instruction)
        elif operation in ("while", "call"):
            trips = trips_of(instruction, bodies)
            inside = cost_of(called, bodies)
            moved += inside[0] * trips
            kernels += inside[1] * trips
        else:
            kernels += 1
            moved += bytes_of_kernel(instruction, body, called)
    return moved, kernels


def trips_of(loop: Instruction, bodies: dict[str, Computation]) -> int:
    """Returns how often a loop runs, or 1 if the program does not say so.

    XLA for TPU does not write this number. There it is the limit of the loop's counter,
    which `lax.scan` starts from zero.
    """
    if match := TRIPS.search(loop.rest):
        return int(match[1])
    match = CONDITION.search(loop.rest)
    condition = bodies[match[1]] if match else {}
    for each in condition.values():
        if each.operation == "compare" and "direction=LT" in each.rest:
            limit = condition[each.operands[1]]
            if limit.operation == "constant":
                return int(limit.rest.split(")")[0])
    return 1


def bytes_of_transfer(start: Instruction) -> int:
    """Returns the bytes that an asynchronous copy or slice reads and writes.

    The type of a copy is `(target, source, ...)`, that of a slice
    `((source), target, ...)`, and a slice reads as many entries as it writes.
    """
    first, second = list(ARRAY.finditer(start.type))[:2]
    if start.operation == "slice-start":
        source = f"{first[1]}[{second[2]}]{first[3] or ''}"
        return bytes_of(source) + bytes_of(second[0])
    return bytes_of(first[0]) + bytes_of(second[0])


def bytes_of_kernel(
    kernel: Instruction, around: Computation, fused: Computation
) -> int:
    """Returns the bytes that a kernel reads and writes; `fused` is what it computes."""
    names = {operand: operand for operand in kernel.operands}
    inside = fused if kernel.operation == "fusion" else {"": kernel}
    if kernel.operation == "fusion":
        for name, each in fused.items():
            if each.operation == "parameter":
                names[kernel.operands[int(each.rest.split(")")[0])]] = name
    written = kernel.type
    if kernel.operation == "custom-call":  # Beside results it names room to work in.
        written = re.sub(r"s8\[[\d,]*\]", "", written)
    moved = bytes_of(written)
    known = around | inside
    for each in inside.values():
        if each.operation == "dynamic-update-slice":
            moved -= bytes_of(each.type) - bytes_of(known[each.operands[1]].type)
    for operand, name in names.items():
        whole = bytes_of(around[operand].type)
        part = bytes_read(name, inside)
        moved += whole if part is None else min(part, whole)
    return moved


def bytes_read(name: str, inside: Computation) -> int | None:
    """Returns the bytes of the parts that are taken of an array, or None if all is."""
    total = 0
    for user, each in inside.items():
        if name not in each.operands:
            continue
        is_first = each.operands[0] == name and name not in each.operands[1:]
        if each.operation in PARTS and is_first:
            total += bytes_of(each.type)
        elif each.operation == "bitcast":
            part = bytes_read(user, inside)
            if part is None:
                return None
            total += part
        elif not (each.operation == "dynamic-update-slice" and is_first):
            return None
    return total


LIBRARY_CALL = re.compile(r'custom_call_target="__cu(?:blas|dnn)')


def products_of(program: str) -> collections.Counter[str]:
    """Counts the products of a compiled program by the dtypes of their operands.

    Products are dots, convolutions, and calls of cuBLAS and cuDNN. A key is a dtype as
    XLA writes it, such as `f16`, or two of them, as in `f16/f32`. The body of a loop
    counts once.
    """
    products: collections.Counter[str] = collections.Counter()
    for _, text in COMPUTATION.findall(program):
        body = instructions_of(text)
        for instruction in body.values():
            is_call = instruction.operation == "custom-call"
            is_call = is_call and LIBRARY_CALL.search(instruction.rest)
            if is_call or instruction.operation in ("dot", "convolution"):
                types = [body[name].type for name in instruction.operands[:2]]
                dtypes = {ARRAY.search(each)[1] for each in types}
                products["/".join(sorted(dtypes))] += 1
    return products


COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?\((.*?)\), (.*)"
)
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
        return self.elements * bits_of(self.dtype) / 8e6


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
