"""How gradients depend on a loss scale."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from optax_lossscale._programs.follow import equations_before, follow_back
from optax_lossscale._programs.jax_internals import (
    constant_of,
    origin_of,
    trace_of,
    traces_around,
)
from optax_lossscale._programs.jaxprs import equations_of, is_transposed, programs_of
from optax_lossscale._programs.powers import CONSTANT, Powers, PowersRule, first_power

Scaling: TypeAlias = Literal[
    "scaled", "scaled twice", "unscaled", "by another scale", "never scaled"
]
_RULE = PowersRule()
_LOOPS = ("fori_loop", "scan", "while_body")


def scaling_of(
    grads: Sequence[Any], params: Iterable[Any], scale: Any
) -> Scaling | None:
    """How gradients depend on a loss scale; None in case of doubt.

    Only what was computed in the trace of the scale, and in those around it, is seen.
    Another argument may hold the same scale, so there is doubt if the gradients are
    proportional to one. An array that a jitted function closes over is the same at
    every call, so it cannot be this scale.

    Args:
      grads: The scaled gradients.
      params: The parameters, none of which is a scale.
      scale: The loss scale of the state that `update` was given.
    """
    own = origin_of(scale)
    if not isinstance(own, jax.core.Tracer) or constant_of(own) is not None:
        return None  # A number in the program, as after an `init` inside `jit`.
    known = {id(origin_of(param)): CONSTANT for param in params}
    known[id(own)] = first_power(id(own))

    def of_input(origin: Any) -> Powers:
        number = constant_of(origin)
        if number is not None:
            return _RULE.of_constant(number)
        return first_power(id(origin)) if _may_be_scale(origin, own) else CONSTANT

    facts = follow_back(grads, known, of_input, _RULE)
    powers = [dict(fact.of) for fact in facts if not fact.is_zero]
    of_own = [power.pop(id(own), "none") for power in powers]
    of_others = {power for each in powers for power in each.values()}
    if 2 in of_own:
        return "scaled twice"
    if 1 in of_own:
        return "scaled"
    if not powers or {*of_own} - {0, "none"} or {1, None} & of_others:
        return None
    if 0 in of_own:
        return "unscaled"
    if not _are_derivatives(grads):
        return None
    return "by another scale" if 0 in of_others else "never scaled"


def _may_be_scale(origin: Any, own: Any) -> bool:
    """Whether an input of a trace may have the value of a scale."""
    # Under `pmap`, an input has an axis of the devices, of size 1.
    if not isinstance(origin, jax.core.Tracer) or origin.size != own.size:
        return False
    is_outside = trace_of(origin) is not trace_of(own)
    if is_outside and traces_around(own)[0] in _LOOPS:
        return False  # The scale changes from one iteration to the next.
    return jnp.issubdtype(origin.dtype, jnp.floating)


def _are_derivatives(grads: Sequence[Any]) -> bool:
    """Whether gradients were computed in a backward pass."""
    found = equations_before(grads)
    programs = (program for each in found for program in programs_of(each))
    inside = (each for program in programs for each in equations_of(program))
    return any(map(is_transposed, found)) or any(map(is_transposed, inside))


def is_constant_under_jit(scale: Any) -> bool:
    """Whether a number becomes a constant of a function that `jax.jit` traces.

    A loop outside `jit` is traced at each call, so there a constant does no harm.
    """
    if isinstance(scale, jax.core.Tracer):
        return False
    # Under `jit`, an operation on a number that is known gives a traced one.
    return "jit" in traces_around(jnp.negative(scale))
