"""What is in a traced program."""

import jax
from jax.extend import core


def equations_of(program):
    """Every equation of a program and of the programs within it."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values())):
            if isinstance(getattr(leaf, "jaxpr", leaf), core.Jaxpr):
                yield from equations_of(leaf)


def dtypes_of(function, *args, name="dot_general"):
    """Operand dtypes of every operation of that name in a traced function."""
    program = jax.make_jaxpr(function)(*args)
    return [
        tuple(str(atom.aval.dtype) for atom in equation.invars)
        for equation in equations_of(program)
        if equation.primitive.name == name
    ]
