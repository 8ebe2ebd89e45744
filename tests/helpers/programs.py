"""The operations of a traced program."""

import jax

from optax_lossscale._jaxprs import equations_of as equations_of


def dtypes_of(function, *args, name="dot_general"):
    """Operand dtypes of every operation of that name in a traced function."""
    program = jax.make_jaxpr(function)(*args)
    return [
        tuple(str(atom.aval.dtype) for atom in equation.invars)
        for equation in equations_of(program)
        if equation.primitive.name == name
    ]
