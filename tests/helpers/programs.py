"""The operations of a traced program."""

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_lossscale._autocast.programs import equations_of as equations_of


def casts_left_out_on_gpu(function, *args):
    """How many casts from float32 to less, and back, XLA for GPU would leave out."""
    closed = jax.make_jaxpr(function)(*args)
    return _undone(closed.jaxpr, [False] * len(closed.jaxpr.invars))[0]


def _undone(program, are_rounded):
    """The casts left out in a program, and which of its results were just rounded."""
    rounded = dict(zip(program.invars, are_rounded, strict=True))
    count = 0

    def was_rounded(atom):
        return not isinstance(atom, core.Literal) and rounded.get(atom, False)

    for equation in program.eqns:
        flags = [was_rounded(atom) for atom in equation.invars]
        results = [False] * len(equation.outvars)
        if equation.primitive.name == "convert_element_type":
            old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
            count += flags[0] and new == jnp.float32
            results = [old == jnp.float32 and new.itemsize < 4]
        elif equation.primitive.name == "stop_gradient":  # Nothing, once compiled.
            results = flags
        elif "jaxpr" in equation.params:  # A call of a jitted function.
            inner = equation.params["jaxpr"]
            inner_count, results = _undone(getattr(inner, "jaxpr", inner), flags)
            count += inner_count
        rounded.update(zip(equation.outvars, results, strict=True))
    return count, [was_rounded(atom) for atom in program.outvars]
