"""How gradients depend on a loss scale, read from the trace that computed them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import div_p, mul_p

from optax_lossscale._autocast.follow import look_into
from optax_lossscale._autocast.jax_internals import (
    constant_of,
    equation_of,
    origin_of,
    program_around,
    trace_of,
    traces_around,
)
from optax_lossscale._autocast.programs import equations_of, is_transposed, programs_of

_BRANCHES = ("cond", "switch")
_LOOPS = ("fori_loop", "scan", "while_body")


class _Source(NamedTuple):
    """What a value was computed from.

    With a loss scale `s`, these are

    | value | factors | divisors |
    |---|---|---|
    | `s`, `loss * s` and its gradients | `s` | |
    | `1 / s` | | `s` |
    | `grads / s`, `grads * (1 / s)` | `s` | `s` |
    | `(grads / s) * s` | `s` | |

    Attributes:
      factors: The numbers that it depends on in any way but by a division.
      divisors: The numbers that it was divided by, and not multiplied by again.
      is_number: Whether it was computed from numbers and constants alone.
    """

    factors: frozenset[int] = frozenset()  # Arrays by their identity.
    divisors: frozenset[int] = frozenset()
    is_number: bool = False


_DATA = _Source()
_CONSTANT = _Source(is_number=True)


class _SourceRule:
    """What is known of the results of one operation, for `look_into`."""

    constant = _CONSTANT

    def of_operation(self, equation: Any, inputs: Sequence[_Source]) -> list[_Source]:
        result = _merged(inputs)
        if equation.primitive is mul_p:
            one, other = sorted(inputs, key=lambda source: source.is_number)
            if other.is_number:
                result = _product(one, other)
        elif equation.primitive is div_p and inputs[1].is_number:
            one, other = inputs
            reciprocal = _Source(other.divisors, other.factors, is_number=True)
            result = _product(one, reciprocal)
        return [result] * len(equation.outvars)

    def join(self, one: _Source, other: _Source) -> _Source:
        return _merged([one, other])


def _merged(sources: Sequence[_Source]) -> _Source:
    """What a value comes from that is computed from several.

    It is divided by a number only if all that depend on any number are: scaled
    gradients that are multiplied by something of the true ones, as in a clip, are still
    scaled.
    """
    # Without such sources, as where a number is broadcast, all count.
    scaled = [source for source in sources if source.factors] or sources
    divisors = [source.divisors for source in scaled]
    return _Source(
        frozenset().union(*(source.factors for source in sources)),
        frozenset.intersection(*divisors) if divisors else frozenset(),
        all(source.is_number for source in sources),
    )


def _product(one: _Source, number: _Source) -> _Source:
    """What a value comes from that is multiplied by a number."""
    return _Source(
        one.factors | number.factors,
        (one.divisors - number.factors) | number.divisors,
        one.is_number,
    )


def scaling_of(
    grads: Sequence[Any], params: Iterable[Any], scale: Any
) -> Literal["never scaled", "unscaled"] | None:
    """Whether gradients were computed without a loss scale, or are divided by one.

    None if they are right, and in case of doubt. Only what was computed in the trace of
    the scale, and in those around it, is seen. Another argument may hold the same
    scale, so there is doubt if the gradients depend on any floating scalar.

    Args:
      grads: The gradients that `update` is given.
      params: The parameters, none of which is a scale.
      scale: The loss scale of the state that `update` is given.
    """
    own = origin_of(scale)
    if _is_constant(own):
        return None  # As after an `init` inside `jit`.
    # The scale may be an entry of an array that stacks several states.
    roots = _inputs_of(own)
    traced_for, is_input = traces_around(own)[0], equation_of(own) is None
    is_of_branch = traced_for in _BRANCHES and is_input
    if is_of_branch and all(equation_of(origin_of(grad)) is None for grad in grads):
        return "never scaled" if _is_never_scaled_around(own) else None

    def of_input(origin: Any) -> _Source:
        if _is_constant(origin):
            return _CONSTANT
        if id(origin) in roots:
            return _Source(frozenset([id(origin)]))
        # The scale changes from one iteration to the next.
        is_fixed = traced_for in _LOOPS and trace_of(origin) is not trace_of(own)
        if is_fixed or not _may_be_scale(origin, own):
            return _DATA
        return _Source(frozenset([id(origin)]), is_number=True)

    known = {id(origin_of(param)): _DATA for param in params}
    known[id(own)] = _Source(frozenset([id(own)]), is_number=True)
    equations, sources = _follow_back(grads, known, of_input)
    factors = _merged(sources).factors
    if id(own) in factors:
        is_unscaled = any(id(own) in source.divisors for source in sources)
        return "unscaled" if is_unscaled else None
    if any(source.factors & source.divisors for source in sources):
        # In a branch, this may be the scale under another name.
        return None if is_of_branch else "unscaled"
    return "never scaled" if not factors and _has_derivative(equations) else None


def _is_constant(origin: Any) -> bool:
    """Whether an array is a number or an array that the program holds."""
    return not isinstance(origin, jax.core.Tracer) or constant_of(origin) is not None


def _may_be_scale(array: Any, own: Any) -> bool:
    """Whether an array may have the value of a scale, by its type."""
    # Under `pmap`, an input has an axis of the devices, of size 1.
    is_floating = jnp.issubdtype(array.dtype, jnp.floating)
    return bool(is_floating and array.size == own.size)


def _is_never_scaled_around(own: Any) -> bool:
    """Whether no derivative depends on a number, in the trace around a branch.

    A branch does not know where its inputs come from.
    """
    equations, inputs = program_around(own)
    derivatives = [equation for equation in equations if _has_derivative([equation])]
    arrays = [array for equation in derivatives for array in equation.in_tracers]

    def of_input(origin: Any) -> _Source:
        may_be_scale = not _is_constant(origin) and _may_be_scale(origin, own)
        return _Source(frozenset([id(origin)])) if may_be_scale else _DATA

    _, sources = _follow_back(arrays, {}, of_input)
    # Without such an input, the scale is a number in the program.
    has_scale = any(_may_be_scale(variable.aval, own) for variable in inputs)
    return bool(derivatives) and has_scale and not _merged(sources).factors


def _follow_back(
    arrays: Sequence[Any],
    known: Mapping[int, _Source],
    of_input: Callable[[Any], _Source],
) -> tuple[list[Any], list[_Source]]:
    """The equations that traced arrays were computed by, and what these come from."""
    results: dict[int, _Source] = {}  # By the identity of a variable.
    done: dict[int, Any] = {}  # Equations by their identity.

    def equations_before(arrays: Iterable[Any]) -> list[Any]:
        origins = [
            origin for origin in map(origin_of, arrays) if id(origin) not in known
        ]
        equations = filter(None, map(equation_of, origins))
        return [equation for equation in equations if id(equation) not in done]

    def source_of(array: Any) -> _Source:
        origin = origin_of(array)
        if id(origin) in known:
            return known[id(origin)]
        is_input = equation_of(origin) is None
        return of_input(origin) if is_input else results[id(origin.val)]

    rest = equations_before(arrays)
    while rest:
        equation = rest[-1]
        if id(equation) not in done and (
            before := equations_before(equation.in_tracers)
        ):
            rest.extend(before)
            continue
        rest.pop()
        if id(equation) not in done:
            done[id(equation)] = equation
            inputs = list(map(source_of, equation.in_tracers))
            outputs: Sequence[_Source] = [_DATA] * len(equation.outvars)
            if any(source is not _DATA for source in inputs):
                outputs = look_into(equation, inputs, _SourceRule()).outputs
            results.update(zip(map(id, equation.outvars), outputs, strict=True))
    return list(done.values()), list(map(source_of, arrays))


def _inputs_of(array: Any) -> set[int]:
    """The identities of the floating inputs that a traced array was computed from."""
    rest, inputs, done = [array], set[int](), set[int]()
    while rest:
        origin = origin_of(rest.pop())
        equation = equation_of(origin)
        if equation is None and not _is_constant(origin):
            if jnp.issubdtype(origin.dtype, jnp.floating):
                inputs.add(id(origin))
        elif equation is not None and id(equation) not in done:
            done.add(id(equation))
            rest.extend(equation.in_tracers)
    return inputs


def _has_derivative(equations: Iterable[Any]) -> bool:
    """Whether some were made by a backward pass."""
    for equation in equations:
        inside = (e for p in programs_of(equation) for e in equations_of(p))
        if is_transposed(equation) or any(map(is_transposed, inside)):
            return True
    return False


def is_constant_under_jit(scale: Any) -> bool:
    """Whether a number becomes a constant of a function that `jax.jit` traces.

    A loop outside `jit` is traced at each call, so there a constant does no harm.
    """
    if isinstance(scale, jax.core.Tracer):
        return False
    # Under `jit`, an operation on a number that is known gives a traced one.
    return "jit" in traces_around(jnp.negative(scale))
