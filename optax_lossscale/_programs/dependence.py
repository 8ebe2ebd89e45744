"""What a traced value was computed from."""

from collections.abc import Iterable

from jax.extend import core

from optax_lossscale._ground.tree import is_floating_array
from optax_lossscale._ground.types import Arrays
from optax_lossscale._programs.jax_internals import inputs_of
from optax_lossscale._programs.jaxprs import equations_of, is_transposed, programs_of


def are_gradients_without(
    grads: Arrays, params: Iterable[object], scale: object
) -> bool:
    """Whether derivatives were computed from the parameters, but not from a scale.

    Only what was computed in the same trace is seen. In case of doubt the answer is
    False: about gradients that come from outside the trace, and if they depend on any
    scalar that was given to it, because that may be the scale.
    """
    of_scale = inputs_of([scale]).keys()
    if not of_scale:  # It is a number in the program, as after an `init` inside `jit`.
        return False
    inputs = inputs_of(grads)
    own = {id(param) for param in params}
    scales = of_scale | {
        key
        for key, (array, equation) in inputs.items()
        if equation is None and is_floating_array(array) and not array.ndim
    }
    equations = [equation for _, equation in inputs.values() if equation is not None]
    are_scaled = not (scales - own).isdisjoint(inputs)
    are_of_params = not own.isdisjoint(inputs)
    return are_of_params and not are_scaled and any(map(_is_backward, equations))


def _is_backward(equation: core.JaxprEqn) -> bool:
    """Whether an equation, or one in it, is part of a backward pass."""
    programs = programs_of(equation)
    inside = (each for program in programs for each in equations_of(program))
    return any(map(is_transposed, (equation, *inside)))
