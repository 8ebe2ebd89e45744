"""Choose in which dtype each operation of a program computes, and say why."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._autocast.float8 import OF_VALUES, Factors, reason_not_float8
from optax_lossscale._autocast.identity import free_sizes, is_square, summed_size
from optax_lossscale._autocast.policy import LOW, MOVES, SENSITIVE, Policy
from optax_lossscale._autocast.values import (
    ADDS,
    MAY_MASK,
    OF_ARGUMENTS,
    OF_PRODUCTS,
    SUMS_OF_TWO,
    Origin,
    Value,
    dtype_in_jax,
    identities,
    is_float32,
    is_move,
    keeps_masks,
)
from optax_lossscale._jaxprs import evaluate
from optax_lossscale._tree import is_floating

# Functions that are constant where their operand is large.
_BOUNDED = ("erf", "logistic", "tanh")


class Choice(NamedTuple):
    """In which dtype an operation computes.

    Attributes:
      dtype: The dtype to which its float32 operands are cast; None leaves them in
        float32.
      why: The reason, for the report.
      is_rounded: Whether its results are rounded to the low dtype.
      is_left_alone: Whether it holds programs that are left as they are written.
      is_recomputed: Whether the backward pass computes it again from low operands,
        which take less memory than float32 ones.
      float8: If it is a product of operands in float8, the float8 dtypes of these.
    """

    dtype: Any
    why: str
    is_rounded: bool = False
    is_left_alone: bool = False
    is_recomputed: bool = False
    float8: Factors = None


def choose(equation: Any, operands: Sequence[Value], policy: Policy) -> Choice:
    """Chooses for one operation; the first rule that applies decides."""
    name, pairs = equation.primitive.name, zip(operands, equation.invars, strict=True)
    floats = [operand for operand, atom in pairs if is_float32(atom)]
    if not floats:
        choice = Choice(None, "no float32 operands")
        is_low_product = name in LOW and _dtypes_of(equation) == {policy.dtype}
        return _in_float8(choice, equation, operands, policy, is_low_product)
    if name == "convert_element_type":
        return Choice(jnp.result_type(floats[0].array), "a cast")
    if name not in policy.low - LOW:
        if is_square(equation, identities(operands)):
            return Choice(None, "a square", is_recomputed=True)
        if _is_sum(equation, operands):
            return Choice(None, "a sum", is_recomputed=True)
    if is_low(equation, policy):
        choice = Choice(policy.dtype, "low list")
        return _in_float8(choice, equation, operands, policy, name in LOW)
    reason = _reason_for_declared(equation, operands, floats, policy)
    if reason is not None:
        return Choice(None, reason)
    return _choose_widest(equation, operands, floats, policy)


def _in_float8(
    choice: Choice,
    equation: Any,
    operands: Sequence[Value],
    policy: Policy,
    is_low_product: bool,
) -> Choice:
    """The choice for an operation, in float8 if it is a product that may be."""
    if not (policy.has_float8 and is_low_product):
        return choice
    reason = reason_not_float8(equation, operands, policy)
    if reason is None:
        return choice._replace(float8=OF_VALUES)
    return choice._replace(why=f"{choice.why}; not float8: {reason}")


def _reason_for_declared(
    equation: Any, operands: Sequence[Value], floats: Sequence[Value], policy: Policy
) -> str | None:
    """Why an operation computes in the declared dtypes, or None if it need not."""
    name, origins = equation.primitive.name, {x.origin for x in floats}
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
    values = [x for x in floats if x.origin is not Origin.CONSTANT]
    dtypes = [_operand_dtype(x, policy) for x in values]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    # At O2 and O3 one low operand makes the result low. Two kinds of results stay
    # float32: scalars, which may be losses, and those of numbers that the low dtype
    # cannot hold: a row of infinities would become NaN, and `x + 1e-8` zero. The cube
    # in gelu overflows from 41 on, and only its tanh is low again.
    is_scalar = equation.outvars[0].aval.size <= 1
    is_lowered = policy.lowers_everything and _reads_low(values, policy)
    is_lowered &= not is_scalar and Origin.WIDE not in origins
    is_lowered &= not (name in SUMS_OF_TWO and Origin.POWER in origins)
    becomes_low = is_lowered or widest == policy.dtype
    if _needs_float32(equation, operands):
        return Choice(
            None, "float32, because of its derivative", is_rounded=becomes_low
        )
    if name in ADDS and Origin.BIAS in origins and origins & {*OF_PRODUCTS}:
        return Choice(None, "a bias, summed in float32", is_rounded=True)
    if Origin.POWER in origins and name in _BOUNDED:
        return Choice(policy.dtype, "bounded, so its operand may overflow")
    if name == "sub" and policy.lowers_everything and origins & {*OF_ARGUMENTS}:
        # The other operand may be a prediction, and the argument its target.
        return Choice(None, "a difference from an argument")
    if name in SENSITIVE and Origin.SATURATED in origins:
        # The derivative of `exp(x) * x` at a mask is 0 times the mask times the scale.
        return Choice(None, "may hold a mask, so in float32")
    is_arithmetic = name in (*SUMS_OF_TWO, "mul", "div")
    may_mask = bool(origins & MAY_MASK) and keeps_masks(equation, operands)
    if becomes_low and is_arithmetic and may_mask:
        # In the low dtype a mask of -1e9, rounded to the end of the range, would
        # overflow here.
        return Choice(None, "may hold a mask, so in float32", is_rounded=True)
    return Choice(widest, "widest of its operands", is_rounded=is_lowered)


def _reads_low(values: Sequence[Value], policy: Policy) -> bool:
    """Whether an operand counts as low; arguments do if no other array is wide."""
    arrays = [
        x for x in values if x.origin not in OF_ARGUMENTS and jnp.size(x.array) > 1
    ]
    return any(_operand_dtype(x, policy) == policy.dtype for x in arrays or values)


def _operand_dtype(value: Value, policy: Policy) -> Any:
    """The dtype that an operand counts as; at O2 and O3 arguments count as low."""
    is_array = jnp.size(value.array) > 1
    is_lowered = value.origin in (*OF_ARGUMENTS, Origin.NORMALIZED)
    counts_as_low = policy.lowers_everything and is_array and is_lowered
    counts_as_low |= value.origin is Origin.LOOP_CONSTANT
    return policy.dtype if counts_as_low else jnp.dtype(dtype_in_jax(value.array))


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
    name = equation.primitive.name
    if not _dtypes_of(equation) <= {jnp.dtype(jnp.float32), policy.dtype}:
        return "written for several dtypes"  # It stays in them.
    if name == "dot_general" and summed_size(equation) <= 1:
        return "an outer product"  # It sums nothing, so there is little to gain.
    if name not in LOW and not _runs_in(policy.dtype, equation):
        return f"no {policy.dtype} on {jax.default_backend()}"
    return None


def _dtypes_of(equation: Any) -> set[Any]:
    """The floating dtypes of an operation's operands and results."""
    atoms = [*equation.invars, *equation.outvars]
    return {atom.aval.dtype for atom in atoms if is_floating(atom.aval)}


def _is_sum(equation: Any, operands: Sequence[Value]) -> bool:
    """Whether a product with an array of equal numbers stands for a sum."""
    if equation.primitive.name != "dot_general":
        return False
    pairs = zip(free_sizes(equation), operands, strict=True)
    return any(size == 1 and x.origin is Origin.CONSTANT for size, x in pairs)


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
    if dtype is None:
        return params
    if equation.primitive.name == "convert_element_type" and is_move(equation):
        params["new_dtype"] = dtype
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    if isinstance(params.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        params["precision"] = None  # An algorithm is made for one dtype of operands.
    return params
