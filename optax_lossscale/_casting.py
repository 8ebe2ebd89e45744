"""What an operation computes in, and where a value comes from.

A value may be narrower than the program says. An operation that is known casts its
operands to the dtype that its list gives it; what is not known is cast to the dtype
that the program says.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from optax_lossscale._masking import evaluate
from optax_lossscale._operations import COMMUTES, LOW, MOVES, Policy
from optax_lossscale._precision import is_normalization
from optax_lossscale._tree import is_floating

ADDS = ("add", "add_any")
FULL_PRECISION = "full_precision"  # The name scope of what is left alone.
BOUNDARY = "call_with_arrays"  # The function inside which the caller's own is traced.


class Origin(enum.Enum):
    """Where a value comes from, as far as it says in what it may be computed."""

    COMPUTED = enum.auto()
    PRODUCT = enum.auto()  # A result of the low list, perhaps moved.
    ARGUMENT = enum.auto()  # An argument or a constant array, perhaps moved.
    BIAS = enum.auto()  # The same of one axis, or broadcast.
    CONSTANT = enum.auto()  # A number that the low dtype holds: widens nothing.


class Value(NamedTuple):
    """An array, perhaps narrower than the program says."""

    array: Any
    origin: Origin


def argument(array: Any) -> Value:
    """An argument, or a constant array, as a value."""
    return Value(array, Origin.BIAS if jnp.ndim(array) < 2 else Origin.ARGUMENT)


def as_operand(value: Value, atom: Any, equation: Any) -> Value:
    """A value as an operand: an argument that is broadcast is a bias."""
    is_argument = value.origin is Origin.ARGUMENT and equation.primitive.name in ADDS
    if is_argument and atom.aval.size < equation.outvars[0].aval.size:
        return Value(value.array, Origin.BIAS)
    return value


def cast(array: Any, dtype: Any) -> Any:
    """An array in a dtype."""
    same = jnp.result_type(array) == dtype
    return array if same else lax.convert_element_type(array, dtype)


def is_cast(atom: Any) -> bool:
    """Whether a value is declared as float32, so that it may be narrower."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and atom.aval.dtype == jnp.float32


def declared(atoms: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Arrays in the dtypes that the program declares."""
    return [
        cast(x, atom.aval.dtype) if is_cast(atom) else x
        for atom, x in zip(atoms, arrays, strict=True)
    ]


def read_by_products(
    program: core.Jaxpr, policy: Policy, rounded: Sequence[bool] = ()
) -> set[core.Var]:
    """The variables that go nowhere but into products, which round them anyway.

    Rounded where they are made, they are stored once, and in half the bytes.
    """
    rounded = rounded or [False] * len(program.outvars)
    elsewhere = variables_of(program.outvars, [not flag for flag in rounded])
    by_products: set[core.Var] = set()
    for equation in reversed(program.eqns):
        flags = _reads_as_products(equation, elsewhere, policy)
        by_products |= variables_of(equation.invars, flags)
        elsewhere |= variables_of(equation.invars, [not flag for flag in flags])
    return by_products - elsewhere


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants a scan has, and how many values it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # Since JAX 0.12.
    return len(constants), len(carry)


def variables_of(atoms: Sequence[Any], flags: Sequence[bool]) -> set[core.Var]:
    """The variables among some operands or results of which a flag is set."""
    pairs = zip(atoms, flags, strict=True)
    return {x for x, flag in pairs if flag and isinstance(x, core.Var)}


def _reads_as_products(
    equation: Any, elsewhere: set[core.Var], policy: Policy
) -> list[bool]:
    """Of each operand, whether it goes nowhere but into products from here."""
    name, params = equation.primitive.name, equation.params
    outputs = [variable not in elsewhere for variable in equation.outvars]
    count = len(equation.invars)
    if why_left_alone(equation, policy):
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
    if name in ("jit", "pjit", "remat2", "checkpoint", "custom_jvp_call"):
        body = params["call_jaxpr" if name == "custom_jvp_call" else "jaxpr"]
        body = getattr(body, "jaxpr", body)
        inside = read_by_products(body, policy, outputs)
        return [variable in inside for variable in body.invars]
    return [False] * count


def why_left_alone(equation: Any, policy: Policy) -> str:
    """Why an operation is left as it is written, if it is."""
    if FULL_PRECISION in str(equation.source_info.name_stack):
        return "full_precision"
    if policy.level == "O2" and _is_in_normalization(equation):
        return "normalization"
    if any(not isinstance(x.aval, jax.core.ShapedArray) for x in equation.invars):
        return "works in place"
    return ""


def _is_in_normalization(equation: Any) -> bool:
    """Whether it is in a name scope or a function of a normalization layer."""
    source = equation.source_info
    if is_normalization(str(source.name_stack)):
        return True
    functions = [frame.function_name for frame in source.traceback.frames]
    inside = next((i for i, f in enumerate(functions) if f.endswith(BOUNDARY)), 0)
    return any(is_normalization(function) for function in functions[:inside])


def choose(equation: Any, operands: Sequence[Value], policy: Policy) -> tuple[Any, str]:
    """The dtype of an operation's operands, None for the declared ones; and why."""
    name = equation.primitive.name
    floats = [
        x for x, atom in zip(operands, equation.invars, strict=True) if is_cast(atom)
    ]
    why = why_left_alone(equation, policy)
    if why:
        return None, why
    if name == "convert_element_type" and floats:
        return jnp.result_type(floats[0].array), "a cast"
    if not floats:
        return None, "no float32"
    if name in policy.full:
        return None, "float32 list"
    if name == "div" and operands[0].origin is Origin.CONSTANT and not policy.is_half:
        return None, "reciprocal"
    if is_low(equation, policy):
        return policy.dtype, "low list"
    if name in policy.low:
        return None, f"no {policy.dtype} on {jax.default_backend()}"
    if name not in policy.widest:
        return None, "not on a list"
    counts = [x for x in floats if x.origin is not Origin.CONSTANT]
    if not counts:
        return None, "constants"
    if name in ADDS and any(x.origin is Origin.PRODUCT for x in counts):
        counts = [x for x in counts if x.origin is not Origin.BIAS]
    dtypes = [
        policy.dtype
        if policy.is_half and x.origin in (Origin.ARGUMENT, Origin.BIAS)
        else jnp.result_type(x.array)
        for x in counts
    ]
    return max(dtypes, key=lambda dtype: dtype.itemsize), "widest of its operands"


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


def is_rounded(
    equation: Any, operands: Sequence[Value], dtype: Any, policy: Policy
) -> bool:
    """Whether its results are rounded to the low dtype."""
    name, params = equation.primitive.name, equation.params
    if name == "integer_pow" and params["y"] == 3 and name in policy.full:
        # The cube in gelu: the rest of it shall not be in float32, but the derivative
        # of this must be, or it overflows from 148 on, and 0 times infinity is NaN.
        return bool(jnp.result_type(operands[0].array) == policy.dtype)
    # At O2 and O3 all is, but for scalars: losses.
    is_known = dtype is not None and name in policy.widest
    return policy.is_half and is_known and equation.outvars[0].aval.size > 1


def origin_of(equation: Any, operands: Sequence[Value]) -> Origin:
    """Where a result comes from."""
    name, origins = equation.primitive.name, {x.origin for x in operands}
    if name in LOW:
        return Origin.PRODUCT
    if name in ADDS and Origin.PRODUCT in origins:
        others = origins - {Origin.PRODUCT, Origin.BIAS, Origin.CONSTANT}
        return Origin.COMPUTED if others else Origin.PRODUCT
    if name == "convert_element_type" and origins == {Origin.CONSTANT}:
        return Origin.CONSTANT
    is_float = [is_floating(atom.aval) for atom in equation.invars]
    if sum(is_float) != 1 or name not in MOVES | {"convert_element_type"}:
        return Origin.COMPUTED
    place, new = is_float.index(True), equation.outvars[0].aval
    origin, old = operands[place].origin, equation.invars[place].aval
    is_spread = new.size > old.size or new.ndim > old.ndim or new.ndim < 2
    return Origin.BIAS if origin is Origin.ARGUMENT and is_spread else origin


def is_move(equation: Any) -> bool:
    """Whether an operation moves float32 values, and does not change them."""
    name = equation.primitive.name
    atoms = [*equation.invars, *equation.outvars]
    # From float32 to float32: `x.astype(jnp.float32)` after a product vanishes.
    is_cast_to_itself = name == "convert_element_type" and all(map(is_cast, atoms))
    return name in MOVES or is_cast_to_itself


def fits(number: Any, dtype: Any) -> bool:
    """Whether the low dtype holds a number: neither overflows nor underflows."""
    info, magnitude = jnp.finfo(dtype), abs(float(number))
    if magnitude == 0 or not magnitude < float("inf"):
        return True
    return float(info.tiny) <= magnitude <= float(info.max)


def is_low(equation: Any, policy: Policy) -> bool:
    """Whether an operation is on the low list, and this backend has it in the dtype."""
    name = equation.primitive.name
    return name in LOW & policy.low or (
        name in policy.low and _runs_in(policy.dtype, equation)
    )


def _runs_in(dtype: Any, equation: core.JaxprEqn) -> bool:
    """Whether this backend takes an operation in a dtype."""
    avals: list[Any] = [atom.aval for atom in equation.invars]
    args = [
        jax.ShapeDtypeStruct(aval.shape, dtype if is_cast(atom) else aval.dtype)
        for atom, aval in zip(equation.invars, avals, strict=True)
    ]
    params = params_in(equation, dtype)
    try:
        jax.jit(lambda *arrays: evaluate(equation, arrays, params)).lower(*args)
    except Exception:  # Whatever it raises, it does not take it.
        return False
    return True
