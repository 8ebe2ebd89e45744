"""Evaluate a program that was written for float32, operation by operation."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_lossscale._autocast.cached import (
    evaluate_cached,
    evaluate_product,
    evaluate_recomputed,
)
from optax_lossscale._autocast.choice import Choice, choose, params_in
from optax_lossscale._autocast.control_flow import Call
from optax_lossscale._autocast.float8 import Factors
from optax_lossscale._autocast.identity import identities_of, new_identity
from optax_lossscale._autocast.markers import (
    cast_at_marker,
    evaluate_without_algorithm,
    is_refused_on_cpu,
)
from optax_lossscale._autocast.nesting import nesting_of, reason_left_alone
from optax_lossscale._autocast.notes import (
    Caller,
    caller_of,
    drop_notes,
    note_operation,
    outermost_caller,
)
from optax_lossscale._autocast.policy import LOW, SENSITIVE, Policy
from optax_lossscale._autocast.products import copy_of
from optax_lossscale._autocast.rounding import parts_of, read_by_products
from optax_lossscale._autocast.values import (
    OF_ARGUMENTS,
    OF_PARAMETERS,
    OF_PRODUCTS,
    SUMS_OF_TWO,
    Origin,
    Source,
    Value,
    as_argument,
    as_literal,
    as_normalized,
    as_operand,
    cast,
    dtype_in_jax,
    has_tangent,
    identified,
    identities,
    is_float32,
    narrow,
    origin_of,
    source_of,
)
from optax_lossscale._jaxprs import context_of, flagged_variables
from optax_lossscale._normalization import computes_normalization

# Values that are cast anew for each operation that reads them, so that the gradients
# that come back from several are summed in float32.
_CAST_ANEW = (*OF_ARGUMENTS, Origin.LOOP_CONSTANT)
# Operations with float32 results that the backward pass recomputes from their
# half-precision operands, which take less memory.
_RECOMPUTED = SENSITIVE | {"atan2", "div"}


def run(
    closed: core.ClosedJaxpr,
    inputs: Sequence[Value],
    policy: Policy,
    rounded: Sequence[bool] = (),
    *,
    wide: Sequence[bool] = (),
    caller: Caller | None = None,
    rule: str = "",
) -> list[Value]:
    """Evaluates a program with casts.

    Args:
      closed: The program, written for float32.
      inputs: A value for each of its inputs.
      policy: The policy for its operations.
      rounded: For each output, whether to round it to the low dtype as soon as it is
        computed, so that every reader may see the rounded value. If empty, no output is
        rounded on request. Values that only products read are always rounded.
      wide: For each output, whether it is the gradient of a parameter, so that products
        that it consists of are in float32. If empty, none is.
      caller: What holds the program; None if nothing does.
      rule: `"forward"` or `"backward"` if the program is a derivative rule of its
        caller. A forward rule runs in place of the function itself.

    Returns:
      A value for each of its outputs, perhaps narrower than declared.
    """
    caller = caller or outermost_caller()
    if rule == "backward":
        caller = caller._replace(path=(*caller.path, rule))
    if rule:
        drop_notes(caller)
    frame = _Frame(closed, inputs, policy, rounded, wide, caller)
    for equation in closed.jaxpr.eqns:
        outputs = frame.apply(equation)
        frame.write(equation.outvars, outputs)
    return [frame.read(atom) for atom in closed.jaxpr.outvars]


class _Frame:
    """The variables of one program while it is evaluated."""

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        inputs: Sequence[Value],
        policy: Policy,
        rounded: Sequence[bool],
        wide: Sequence[bool],
        caller: Caller,
    ) -> None:
        program = closed.jaxpr
        self.policy = policy
        self.caller = caller
        self.values: dict[core.Var, Value] = {}
        self.casts: dict[tuple[core.Var, Any], Any] = {}
        self.copies: dict[Any, Any] = {}
        self.to_round = read_by_products(program, policy, rounded)
        if rounded:
            self.to_round |= flagged_variables(program.outvars, rounded)
        self.wide = parts_of(program, wide) if any(wide) else set()
        self.write(program.invars, inputs)
        self.write(program.constvars, list(map(as_argument, closed.consts)))

    def read(self, atom: core.Var | core.Literal) -> Value:
        """The value of a variable or a literal."""
        if isinstance(atom, core.Literal):
            return as_literal(atom.val, self.policy.dtype)
        return self.values[atom]

    def write(self, variables: Sequence[core.Var], values: Sequence[Value]) -> None:
        """Sets variables."""
        for variable, value in zip(variables, values, strict=True):
            identity = value.identity or new_identity()
            self.values[variable] = value._replace(identity=identity)

    def apply(self, equation: Any) -> list[Value]:
        """Evaluates one operation and returns its results."""
        # At O2 a normalization layer keeps only its products low.
        is_layer = self.policy.level == "O2" and computes_normalization(equation)
        policy = self.policy.inside(equation)
        policy = policy.products_only() if is_layer else policy
        operands = [as_operand(self.read(x), x, equation) for x in equation.invars]
        flags = [variable in self.to_round for variable in equation.outvars]
        nesting, reason = nesting_of(equation), reason_left_alone(equation, self.policy)
        if nesting is not None and reason is None:
            inner_run = functools.partial(run, caller=caller_of(self.caller, equation))
            wide = [variable in self.wide for variable in equation.outvars]
            call = Call(
                inner_run, read_by_products, equation, operands, policy, flags, wide
            )
            outputs = self._round(equation, nesting.rebuild(call), flags)
        elif reason is None and (
            marked := cast_at_marker(equation, operands, policy.dtype)
        ):
            outputs = [marked]
            choice = Choice(policy.dtype, "low_precision")
            note_operation(self.caller, equation, choice, [marked.array])
        else:
            if reason is not None:
                choice = Choice(None, reason, is_left_alone=True)
            else:
                choice = choose(equation, operands, policy)
            results = self._compute(equation, operands, choice)
            origin = origin_of(equation, operands)
            is_narrowed = choice.is_rounded and choice.dtype != policy.dtype
            if is_narrowed and equation.primitive.name in SUMS_OF_TWO:
                origin = Origin.SATURATED
            source = source_of(equation, operands)
            if choice.is_rounded:
                source = Source.PRODUCTS
            flags = [flag or choice.is_rounded for flag in flags]
            value = Value(None, origin, source=source, is_tangent=has_tangent(operands))
            values = [value._replace(array=array) for array in results]
            outputs = self._round(equation, values, flags)
            note_operation(self.caller, equation, choice, [x.array for x in outputs])
        outputs = identified(outputs, identities_of(equation, identities(operands)))
        return list(map(as_normalized, outputs)) if is_layer else outputs

    def _compute(
        self, equation: Any, operands: Sequence[Value], choice: Choice
    ) -> Sequence[Any]:
        """Computes an operation in the chosen dtype."""
        in_float32 = choice.dtype is None and equation.primitive.name in _RECOMPUTED
        if in_float32 or choice.is_recomputed:
            arrays = [operand.array for operand in operands]
            if any(dtype_in_jax(array).itemsize <= 2 for array in arrays):
                return evaluate_recomputed(equation, arrays)
        is_low = equation.primitive.name in LOW and choice.dtype == self.policy.dtype
        if is_low or choice.float8 is not None:
            return self._multiply(equation, operands, choice.float8)
        is_product = equation.primitive.name in self.policy.low
        with context_of(equation):
            arrays = [
                self._cast_operand(x, value, choice.dtype or x.aval.dtype, is_product)
                for x, value in zip(equation.invars, operands, strict=True)
            ]
        if is_refused_on_cpu(equation):
            return evaluate_without_algorithm(equation, arrays)
        return evaluate_cached(equation, arrays, params_in(equation, choice.dtype))

    def _multiply(self, equation: Any, operands: Any, float8: Factors) -> Sequence[Any]:
        """Computes a product in the low dtype, which rounds parameters itself."""
        low = self.policy.dtype
        pairs = list(zip(equation.invars, operands, strict=True))
        # A parameter is kept anyway, and what is computed from one is not.
        stand_in = tuple(value.source is Source.ARGUMENTS for value in operands[:2])
        with context_of(equation):
            copies = [self._copy(atom, value, float8) for atom, value in pairs[:2]]
            arrays = [
                value.array
                if value.source in OF_PARAMETERS
                else self._cast_operand(atom, value, low, is_product=True)
                for atom, value in pairs
            ]
        is_wide = any(x in self.wide and is_float32(x) for x in equation.outvars)
        result = jnp.dtype(jnp.float32) if is_wide else low
        params = {**params_in(equation, low), "preferred_element_type": result}
        settings = params, low, stand_in, float8
        return evaluate_product(equation, arrays, copies, *settings)

    def _copy(self, atom: Any, value: Value, float8: Factors) -> Any:
        """The one low copy of a parameter for all products that read it, or None."""
        if value.source not in OF_PARAMETERS or not is_float32(atom):
            return None
        key = atom, float8
        if key not in self.copies:
            self.copies[key] = copy_of(value.array, self.policy.dtype, float8)
        return self.copies[key]

    def _cast_operand(
        self, atom: core.Var | core.Literal, value: Value, dtype: Any, is_product: bool
    ) -> Any:
        """Casts a float32 operand to a dtype, and returns any other as it is."""
        if not is_float32(atom):
            return value.array
        if isinstance(atom, core.Literal):
            with np.errstate(over="ignore"):
                return np.asarray(value.array).astype(dtype)
        if value.origin in _CAST_ANEW:
            # Data that a product cannot hold become infinite, for the loss to show.
            return cast(value.array, dtype) if is_product else narrow(value, dtype)
        if (atom, dtype) not in self.casts:
            self.casts[atom, dtype] = cast(value.array, dtype)
        return self.casts[atom, dtype]

    def _round(
        self, equation: Any, values: Sequence[Value], flags: Sequence[bool]
    ) -> list[Value]:
        """Rounds the flagged results; arguments are cast only where they are read."""
        results = []
        for variable, value, flag in zip(equation.outvars, values, flags, strict=True):
            is_kept = value.origin in OF_ARGUMENTS or value.source in OF_PARAMETERS
            if flag and is_float32(variable) and not is_kept:
                with context_of(equation):
                    value = value._replace(array=narrow(value, self.policy.dtype))
            is_low = getattr(value.array, "dtype", None) == self.policy.dtype
            if is_low and value.source in OF_PARAMETERS:
                value = value._replace(source=Source.PRODUCTS)
            if value.origin in OF_PRODUCTS and not is_low:
                value = value._replace(origin=Origin.COMPUTED)
            results.append(value)
        return results
