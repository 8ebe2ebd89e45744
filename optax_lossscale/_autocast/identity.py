"""Number the values of a program, to recognize products of a value with itself.

Such a product is a square: its exponent is twice as large, so it overflows in float16
from 256 on, and underflows below 2e-4. `jnp.linalg.norm` is written so.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from optax_lossscale._autocast.policy import words
from optax_lossscale._tree import is_floating

# Operations whose result holds the numbers of their operand, perhaps elsewhere, more
# coarsely or with another sign.
_SAME_NUMBERS = words(
    "abs broadcast_in_dim copy copy_p mesh_cast name neg optimization_barrier pcast "
    "pvary reduce_precision reshape reshard sharding_constraint squeeze stop_gradient "
    "transpose"
)
# Operations that choose, entry by entry, among the entries of their operands.
_CHOICES = words("max min select_n")
# Operations whose result is a part of their first operand, or its parts in a new order.
_PARTS = words("dynamic_slice gather rev slice split")


class Number:
    """Stands for the entries of one value; equal values share a number.

    Attributes:
      results: The numbers of what was computed from it, by the operation.
    """

    def __init__(self) -> None:
        self.results: dict[Any, Number] = {}


class Identity(NamedTuple):
    """What is known of the entries of a value.

    Attributes:
      number: Its number, or for a literal the literal itself.
      factors: The numbers of the values that it is a product of, apart from moves,
        signs and constant factors. A constant has none.
    """

    number: Any
    factors: frozenset[Number]


def new_identity() -> Identity:
    """The identity of a value of which nothing is known."""
    number = Number()
    return Identity(number, frozenset([number]))


def identity_of_literal(number: Any) -> Identity:
    """The identity of a literal."""
    value = number.item() if hasattr(number, "item") else number
    return Identity((type(value), value), frozenset())


class Renumbering(NamedTuple):
    """New numbers for some identities, for a program that is kept for other calls.

    Attributes:
      pattern: Which numbers are equal; the same for identities that differ only in
        their numbers.
      old: The numbers, in the order in which they are found.
      new: The new numbers, in the same order.
      identities: The identities with new numbers.
    """

    pattern: Hashable
    old: tuple[Any, ...]
    new: tuple[Number, ...]
    identities: list[Identity]


def renumber(identities: Sequence[Identity]) -> Renumbering:
    """Gives identities new numbers, which are equal where the old ones are."""
    found: dict[Any, tuple[int, Number]] = {}

    def of(number: Any) -> tuple[int, Number]:
        return found.setdefault(number, (len(found), Number()))

    pairs = [(of(number), list(map(of, factors))) for number, factors in identities]
    return Renumbering(
        tuple((place, tuple(sorted(x for x, _ in more))) for (place, _), more in pairs),
        tuple(found),
        tuple(number for _, number in found.values()),
        [Identity(new, frozenset(x for _, x in more)) for (_, new), more in pairs],
    )


def restore(identity: Identity, new: Sequence[Number], old: Sequence[Any]) -> Identity:
    """The identity of a result, with the old numbers in place of the new ones.

    A number that the program made itself becomes one for this call of it.
    """
    table = dict(zip(new, old, strict=True))
    base = next((x for x in old if isinstance(x, Number)), Number())

    def of(number: Any) -> Any:
        if number in table or not isinstance(number, Number):
            return table.get(number, number)
        return base.results.setdefault((number, tuple(old)), Number())

    return Identity(of(identity.number), frozenset(map(of, identity.factors)))


def identities_of(equation: Any, operands: Sequence[Identity]) -> list[Identity]:
    """The identities of an equation's results."""
    count = len(equation.outvars)
    if equation.effects:
        return [new_identity() for _ in range(count)]
    numbers = [operand.number for operand in operands]
    results = [_result(numbers, equation, i) for i in range(count)]
    return [
        Identity(number, _factors(equation, operands, i, number))
        for i, number in enumerate(results)
    ]


def is_square(equation: Any, operands: Sequence[Identity]) -> bool:
    """Whether an equation multiplies a value by itself, entry by entry."""
    name = equation.primitive.name
    if name == "mul" or (name == "dot_general" and free_sizes(equation) == (1, 1)):
        return bool(operands[0].factors & operands[1].factors)
    return False


def free_sizes(equation: Any) -> tuple[int, int]:
    """For each operand of a `dot_general`, how many results read an entry of the other.

    `dot(x, x)` is a sum of squares, with free sizes (1, 1); `x @ x.T` is not.
    """
    (contracting, batch) = equation.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in equation.invars]
    one, other = (
        math.prod(size for axis, size in enumerate(shape) if axis not in {*some, *more})
        for shape, some, more in zip(shapes, contracting, batch, strict=True)
    )
    return one, other


def summed_size(equation: Any) -> int:
    """How many terms each sum of a `dot_general` has."""
    contracting = equation.params["dimension_numbers"][0][0]
    return math.prod(equation.invars[0].aval.shape[axis] for axis in contracting)


def _result(numbers: Sequence[Any], equation: Any, index: int) -> Number:
    """The number of an equation's result; the same for the same operands."""
    base = next((x for x in numbers if isinstance(x, Number)), None)
    try:
        params = tuple(equation.params.items())
        key = (equation.primitive, params, tuple(numbers), index)
        return Number() if base is None else base.results.setdefault(key, Number())
    except TypeError:  # Some parameters are not hashable.
        return Number()


def _factors(
    equation: Any, operands: Sequence[Identity], index: int, number: Number
) -> frozenset[Number]:
    """The factors of an equation's result."""
    name = equation.primitive.name
    if name == "mul" or name in _CHOICES:
        return frozenset().union(*(operand.factors for operand in operands))
    if name == "div" and not operands[1].factors:
        return operands[0].factors
    if name in _SAME_NUMBERS or _is_cast_of_floats(equation):
        return operands[index if len(operands) > 1 else 0].factors
    if name in _PARTS:
        others = [operand.number for operand in operands[1:]]
        parts = (
            _result([factor, *others], equation, index)
            for factor in operands[0].factors
        )
        return frozenset(parts)
    return frozenset([number])


def _is_cast_of_floats(equation: Any) -> bool:
    """Whether an equation casts floating numbers to floating numbers."""
    atoms = [*equation.invars, *equation.outvars]
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and all(is_floating(atom.aval) for atom in atoms)
