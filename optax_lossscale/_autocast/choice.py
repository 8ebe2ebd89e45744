"""Choose in which dtype each operation of a program computes, and say why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._autocast.policy import LOW, MOVES, Policy
from optax_lossscale._autocast.values import (
    ADDS,
    OF_ARGUMENTS,
    Origin,
    Value,
    is_float32,
    is_move,
)
from optax_lossscale._jaxprs import evaluate
from optax_lossscale._tree import is_floating


class Choice(NamedTuple):
    """In which dtype an operation computes.

    Attributes:
      dtype: The dtype to which its float32 operands are cast; None leaves them in
        float32.
      why: The reason, for the report.
      is_rounded: Whether its results are rounded to the low dtype.
      is_left_alone: Whether it holds programs that are left as they are written.
    """

    dtype: Any
    why: str
    is_rounded: bool = False
    is_left_alone: bool = False


def choose(equation: Any, operands: Sequence[Value], policy: Policy) -> Choice:
    """Chooses for one operation; the first rule that applies decides."""
    name, pairs = equation.primitive.name, zip(operands, equation.invars, strict=True)
    floats = [operand for operand, atom in pairs if is_float32(atom)]
    if not floats:
        return Choice(None, "no float32 operands")
    if name == "convert_element_type":
        return Choice(jnp.result_type(floats[0].array), "a cast")
    if is_low(equation, policy):
        return Choice(policy.dtype, "low list")
    reason = _reason_for_declared(equation, operands, floats, policy)
    if reason is not None:
        return Choice(None, reason)
    return _choose_widest(equation, operands, floats, policy)


def _reason_for_declared(
    equation: Any, operands: Sequence[Value], floats: Sequence[Value], policy: Policy
) -> str | None:
    """Why an operation computes in the declared dtypes, or None if it need not."""
    name, origins = equation.primitive.name, {x.origin for x in operands}
    if name in policy.low:
        return _reason_not_low(equation, policy)
    if not policy.widest:
        return "part of a layer or function kept in float32"
    if name in policy.full:
        return "float32 list"
    if _has_own_update(equation):
        return "applies a function written for float32"
    if name not in policy.widest:
        return "not on a list"
    if all(x.origin is Origin.CONSTANT for x in floats):
        return "constants"
    divides_constant = name == "div" and operands[0].origin is Origin.CONSTANT
    if divides_constant and not policy.lowers_everything:
        return "a reciprocal"
    if policy.lowers_everything and name in MOVES and origins <= {*OF_ARGUMENTS}:
        return "moves an argument, which is cast where it is read"
    return None


def _choose_widest(
    equation: Any, operands: Sequence[Value], floats: Sequence[Value], policy: Policy
) -> Choice:
    """Chooses the dtype of the widest operand that is not a mere constant."""
    name, origins = equation.primitive.name, {x.origin for x in operands}
    dtypes = [
        _operand_dtype(x, policy) for x in floats if x.origin is not Origin.CONSTANT
    ]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    reads_low = policy.dtype in dtypes
    # At O2 and O3 one low operand makes the result low. Two kinds of results stay
    # float32: scalars, which may be losses, and masks of -1e9, because a row of
    # infinities would become NaN.
    is_scalar = equation.outvars[0].aval.size <= 1
    is_lowered = policy.lowers_everything and reads_low
    is_lowered &= not is_scalar and Origin.LARGE not in origins
    if _needs_float32(equation, operands):
        is_rounded = is_lowered or widest == policy.dtype
        return Choice(None, "float32, because of its derivative", is_rounded=is_rounded)
    if name in ADDS and origins == {Origin.PRODUCT, Origin.BIAS}:
        return Choice(None, "a bias, summed in float32", is_rounded=True)
    if name in ADDS and Origin.SMALL_CUBE in origins and reads_low:
        # The cube in gelu is computed in float32, because its derivative overflows in
        # float16 from 148 on, and 0 times infinity is NaN. The rest of gelu is low.
        return Choice(None, "a polynomial, then rounded", is_rounded=True)
    return Choice(widest, "widest of its operands", is_rounded=is_lowered)


def _operand_dtype(value: Value, policy: Policy) -> Any:
    """The dtype that an operand counts as; at O2 and O3 arguments count as low."""
    is_array = jnp.size(value.array) > 1
    is_lowered = value.origin in (*OF_ARGUMENTS, Origin.NORMALIZED)
    counts_as_low = policy.lowers_everything and is_array and is_lowered
    counts_as_low |= value.origin is Origin.LOOP_CONSTANT
    return policy.dtype if counts_as_low else jnp.dtype(jnp.result_type(value.array))


def _needs_float32(equation: Any, operands: Sequence[Value]) -> bool:
    """Whether the derivative overflows or loses terms where the operation does not.

    The derivative of a quotient squares the denominator, and that of a gather sums over
    all reads of the same entry.
    """
    name = equation.primitive.name
    if name == "div":
        return operands[1].origin is not Origin.CONSTANT
    return name in ("atan2", "dynamic_slice", "gather")


def _has_own_update(equation: Any) -> bool:
    """Whether a scatter applies a function, which is written for float32."""
    update = equation.params.get("update_jaxpr")
    return bool(update is not None and update.eqns)


def is_low(equation: Any, policy: Policy) -> bool:
    """Whether an operation is on the low list and can run in the low dtype here."""
    is_listed = equation.primitive.name in policy.low
    return is_listed and _reason_not_low(equation, policy) is None


def _reason_not_low(equation: Any, policy: Policy) -> str | None:
    """Why an operation on the low list does not run in the low dtype, or None."""
    name, atoms = equation.primitive.name, [*equation.invars, *equation.outvars]
    if not all(is_float32(atom) for atom in atoms if is_floating(atom.aval)):
        return "written for several dtypes"  # It stays in them.
    if name == "dot_general" and not equation.params["dimension_numbers"][0][0]:
        return "an outer product"  # It sums nothing, so there is little to gain.
    if name not in LOW and not _runs_in(policy.dtype, equation):
        return f"no {policy.dtype} on {jax.default_backend()}"
    return None


def _runs_in(dtype: Any, equation: Any) -> bool:
    """Whether this backend can lower an operation in a dtype."""
    args = [
        jax.ShapeDtypeStruct(x.aval.shape, dtype if is_float32(x) else x.aval.dtype)
        for x in equation.invars
    ]
    params = params_in(equation, dtype)
    try:
        jax.jit(lambda *arrays: evaluate(equation, arrays, params)).lower(*args)
    except Exception:  # Backends raise errors of many types.
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
        params["precision"] = None  # An algorithm is made for one dtype of operands.
    return params
