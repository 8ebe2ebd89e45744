"""What an operation of a program computes in, and why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from optax_lossscale._autocast.policy import COMMUTES, LOW, MOVES, Policy
from optax_lossscale._autocast.values import (
    ADDS,
    OF_ARGUMENTS,
    Origin,
    Value,
    is_cast,
    is_move,
)
from optax_lossscale._jaxprs import evaluate, flagged_variables, scan_sizes
from optax_lossscale._normalization import is_normalization
from optax_lossscale._tree import is_floating

FULL_PRECISION = "full_precision"  # The name scope of what is left alone.
BOUNDARY = "call_with_arrays"  # The function inside which the caller's own is traced.
HAVE_RULES = ("custom_jvp_call", "custom_vjp_call")
ENTERED = ("jit", "pjit", "remat2", "checkpoint", "custom_jvp_call")


class Choice(NamedTuple):
    """What an operation computes in: a dtype, or None for the declared ones."""

    dtype: Any
    why: str
    is_rounded: bool = False  # Whether its results are rounded to the low dtype.


def choose(equation: Any, operands: Sequence[Value], policy: Policy) -> Choice:
    """What an operation computes in."""
    name, origins = equation.primitive.name, {x.origin for x in operands}
    floats = [
        x for x, atom in zip(operands, equation.invars, strict=True) if is_cast(atom)
    ]
    why = why_left_alone(equation)
    if why:
        return Choice(None, why)
    if name == "convert_element_type" and floats:
        return Choice(jnp.result_type(floats[0].array), "a cast")
    if not floats:
        return Choice(None, "no float32")
    if is_low(equation, policy):
        return Choice(policy.dtype, "low list")
    if name in policy.low and name not in LOW:
        return Choice(None, f"no {policy.dtype} on {jax.default_backend()}")
    if not policy.widest:
        return Choice(None, "inside what stays in float32")
    if name in policy.full:
        return Choice(None, "float32 list")
    if name not in policy.widest or _has_own_update(equation):
        return Choice(None, "not on a list")
    counts = [x for x in floats if x.origin is not Origin.CONSTANT]
    if not counts:
        return Choice(None, "constants")
    if name == "div" and operands[0].origin is Origin.CONSTANT and not policy.is_half:
        return Choice(None, "a reciprocal")
    if policy.is_half and name in MOVES and origins <= {*OF_ARGUMENTS}:
        return Choice(None, "moves an argument, which is cast where it is read")
    widths = [_width(x, policy) for x in counts]
    is_low_meant = policy.dtype in widths
    # At O2 and O3 what is low makes its results so; but not a scalar, perhaps a loss,
    # and not a mask of -1e9, or a row of nothing else were NaN.
    is_rounded = policy.is_half and is_low_meant and equation.outvars[0].aval.size > 1
    is_rounded &= Origin.LARGE not in origins
    widest = max(widths, key=lambda dtype: dtype.itemsize)
    if _needs_float32(equation, operands):
        is_rounded |= widest == policy.dtype
        return Choice(None, "float32, as is its derivative", is_rounded)
    if name in ADDS and origins == {Origin.PRODUCT, Origin.BIAS}:
        return Choice(None, "a bias, summed in float32", True)
    if name in ADDS and Origin.SMALL_CUBE in origins and is_low_meant:
        # The rest of gelu shall not be in float32; the derivative of its cube must be,
        # or it overflows from 148 on, and 0 times infinity is NaN.
        return Choice(None, "a polynomial, then rounded", True)
    return Choice(widest, "widest of its operands", is_rounded)


def _width(value: Value, policy: Policy) -> Any:
    """The dtype that an operand counts as; arguments, at O2 and O3, as the low one."""
    is_lowered = policy.is_half and jnp.size(value.array) > 1
    counts_low = is_lowered and value.origin in (*OF_ARGUMENTS, Origin.NORMALIZED)
    counts_low |= value.origin is Origin.HELD
    return policy.dtype if counts_low else jnp.dtype(jnp.result_type(value.array))


def _needs_float32(equation: Any, operands: Sequence[Value]) -> bool:
    """Whether a derivative overflows, or loses terms, where the operation does not.

    Quotients are differentiated with the square of the denominator, and a gather by a
    sum over all that read the same entry.
    """
    name = equation.primitive.name
    if name == "div":
        return operands[1].origin is not Origin.CONSTANT
    return name in ("atan2", "dynamic_slice", "gather")


def _has_own_update(equation: Any) -> bool:
    """Whether a scatter applies a function, which is written for float32."""
    update = equation.params.get("update_jaxpr")
    return bool(update is not None and update.eqns)


def why_left_alone(equation: Any) -> str:
    """Why an operation is left as it is written, if it is."""
    if FULL_PRECISION in str(equation.source_info.name_stack):
        return "full_precision"
    if any(not isinstance(x.aval, jax.core.ShapedArray) for x in equation.invars):
        return "works in place"
    are_floats = all(is_floating(variable.aval) for variable in equation.outvars)
    has_rule = equation.primitive.name in HAVE_RULES
    return "a rule for what is no float" if has_rule and not are_floats else ""


def policy_for(equation: Any, policy: Policy) -> Policy:
    """The policy for an operation: in normalization, at O2, all but products stay."""
    is_kept = policy.level == "O2" and _is_in_normalization(equation)
    return policy.without_narrowing() if is_kept else policy


def _is_in_normalization(equation: Any) -> bool:
    """Whether it is in a name scope or a function of a normalization layer."""
    source = equation.source_info
    if is_normalization(str(source.name_stack)):
        return True
    functions = [frame.function_name for frame in source.traceback.frames]
    inside = next((i for i, f in enumerate(functions) if f.endswith(BOUNDARY)), 0)
    return any(is_normalization(function) for function in functions[:inside])


def is_low(equation: Any, policy: Policy) -> bool:
    """Whether an operation is on the low list, and this backend has it in the dtype."""
    name, params = equation.primitive.name, equation.params
    atoms = [*equation.invars, *equation.outvars]
    if not all(is_cast(atom) for atom in atoms if is_floating(atom.aval)):
        return False  # What was written for other dtypes stays in them.
    if name == "dot_general" and not params["dimension_numbers"][0][0]:
        return False  # An outer product: nothing is summed, and little gained.
    if name in LOW:
        return name in policy.low
    return name in policy.low and _runs_in(policy.dtype, equation)


def _runs_in(dtype: Any, equation: Any) -> bool:
    """Whether this backend takes an operation in a dtype."""
    args = [
        jax.ShapeDtypeStruct(x.aval.shape, dtype if is_cast(x) else x.aval.dtype)
        for x in equation.invars
    ]
    params = params_in(equation, dtype)
    try:
        jax.jit(lambda *arrays: evaluate(equation, arrays, params)).lower(*args)
    except Exception:  # Whatever it raises, it does not take it.
        return False
    return True


def params_in(equation: Any, dtype: Any) -> dict[str, Any]:
    """The parameters of an operation whose operands are cast to a dtype."""
    params = dict(equation.params)
    if equation.primitive.name == "convert_element_type" and is_move(equation):
        params["new_dtype"] = dtype
    if dtype is None:
        return params
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if isinstance(params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        params["precision"] = None  # Algorithms are written for their operands' dtype.
    return params


def read_by_products(
    program: core.Jaxpr, policy: Policy, rounded: Sequence[bool] = ()
) -> set[core.Var]:
    """The variables that go nowhere but into products, which round them anyway.

    Rounded where they are made, they are stored once, and in half the bytes.
    """
    rounded = rounded or [False] * len(program.outvars)
    elsewhere = flagged_variables(program.outvars, [not flag for flag in rounded])
    by_products: set[core.Var] = set()
    for equation in reversed(program.eqns):
        flags = _reads_as_products(equation, elsewhere, policy)
        by_products |= flagged_variables(equation.invars, flags)
        elsewhere |= flagged_variables(equation.invars, [not flag for flag in flags])
    return by_products - elsewhere


def _reads_as_products(
    equation: Any, elsewhere: set[core.Var], policy: Policy
) -> list[bool]:
    """Of each operand, whether it goes nowhere but into products from here."""
    name, params = equation.primitive.name, equation.params
    outputs = [variable not in elsewhere for variable in equation.outvars]
    count = len(equation.invars)
    if why_left_alone(equation):
        return [False] * count
    if is_low(equation, policy):
        return [True] * count
    if name in COMMUTES or is_move(equation):
        return [all(outputs)] * count
    if name == "scan":
        body, (first, size) = params["jaxpr"].jaxpr, scan_sizes(params)
        carry = range(first, first + size)
        outputs[:size] = [False] * size
        inside = read_by_products(body, policy, outputs)
        return [v in inside and i not in carry for i, v in enumerate(body.invars)]
    if name in ENTERED:
        body = params["call_jaxpr" if name in HAVE_RULES else "jaxpr"]
        body = getattr(body, "jaxpr", body)
        inside = read_by_products(body, policy, outputs)
        return [variable in inside for variable in body.invars]
    return [False] * count
