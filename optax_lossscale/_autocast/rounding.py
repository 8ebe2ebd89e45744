"""Find the values that may be rounded where they are made, and those that may not.

Products round their operands anyway. A value that only products read is therefore
rounded as soon as it is made, and stored once, in half the bytes. A product that is the
gradient of a parameter, in a derivative rule, has a float32 result.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from optax_lossscale._autocast.choice import is_low
from optax_lossscale._autocast.identity import free_sizes
from optax_lossscale._autocast.nesting import nesting_of, reason_left_alone
from optax_lossscale._autocast.policy import COMMUTES, MOVES, Policy, words
from optax_lossscale._autocast.values import is_move
from optax_lossscale._jaxprs import flagged_variables, scan_sizes

# Operations whose results are gradients of parameters if their operands are parts of
# these: sums, moves, and changes of single entries.
_KEEP_PARTS = MOVES | words(
    "add add_any clamp convert_element_type cumsum div max min mul neg psum "
    "psum_invariant reduce_sum scatter scatter-add sub"
)


def read_by_products(
    program: core.Jaxpr, policy: Policy, rounded: Sequence[bool] = ()
) -> set[core.Var]:
    """The variables of a program that only products read.

    `rounded` says for each result of the program whether it is rounded anyway. If it is
    empty, no result is.
    """
    rounded = rounded or [False] * len(program.outvars)
    elsewhere = flagged_variables(program.outvars, [not flag for flag in rounded])
    by_products: set[core.Var] = set()
    for equation in reversed(program.eqns):
        flags = _reads_for_products(equation, elsewhere, policy)
        by_products |= flagged_variables(equation.invars, flags)
        elsewhere |= flagged_variables(equation.invars, [not flag for flag in flags])
    return by_products - elsewhere


def parts_of(program: core.Jaxpr, flags: Sequence[bool]) -> set[core.Var]:
    """The variables that the flagged results of a program consist of."""
    parts = flagged_variables(program.outvars, flags)
    for equation in reversed(program.eqns):
        outputs = [variable in parts for variable in equation.outvars]
        if not any(outputs):
            continue
        body = _body_of(equation)
        if body is not None:
            inside = parts_of(body, outputs)
            inputs = [variable in inside for variable in body.invars]
        else:
            is_kept = equation.primitive.name in _KEEP_PARTS
            inputs = [is_kept] * len(equation.invars)
        parts |= flagged_variables(equation.invars, inputs)
    return parts


def _reads_for_products(
    equation: Any, elsewhere: set[core.Var], policy: Policy
) -> list[bool]:
    """For each operand, whether this equation passes it on to products only.

    `elsewhere` are the variables that something other than a product reads later.
    """
    count = len(equation.invars)
    outputs = [variable not in elsewhere for variable in equation.outvars]
    if reason_left_alone(equation, policy) is not None:
        return [False] * count
    if is_low(equation, policy):
        if equation.primitive.name != "dot_general":
            return [True] * count
        # With a vector, it may be a sum or a sum of squares, which are in float32.
        return [size > 1 for size in reversed(free_sizes(equation))]
    if equation.primitive.name in COMMUTES or is_move(equation):
        return [all(outputs)] * count
    policy = policy.inside(equation)
    if equation.primitive is core.primitives.scan_p:
        return _scan_reads_for_products(equation, outputs, policy)
    body = _body_of(equation)
    if body is None:
        return [False] * count
    inside = read_by_products(body, policy, outputs)
    return [variable in inside for variable in body.invars]


def _body_of(equation: Any) -> core.Jaxpr | None:
    """The program that has the operands and results of an equation, or None."""
    nesting = nesting_of(equation)
    if nesting is None or nesting.body is None:
        return None
    body = equation.params[nesting.body]
    program: core.Jaxpr = getattr(body, "jaxpr", body)
    return program


def _scan_reads_for_products(
    equation: Any, outputs: list[bool], policy: Policy
) -> list[bool]:
    """The same for a scan, whose carries keep their declared dtypes."""
    body = equation.params["jaxpr"].jaxpr
    first, size = scan_sizes(equation.params)
    carry = range(first, first + size)
    outputs = [*[False] * size, *outputs[size:]]
    inside = read_by_products(body, policy, outputs)
    return [v in inside and i not in carry for i, v in enumerate(body.invars)]
