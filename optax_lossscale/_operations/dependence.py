"""Find on what the results of a program depend."""

from collections.abc import Sequence

from jax.extend import core
from jax.extend.core import Primitive, primitives

from optax_lossscale._jaxprs import flagged_variables

# Operations that hold one program, with their own operands and results.
INLINED: tuple[Primitive | str, ...] = (
    primitives.jit_p,
    "remat2",  # JAX 0.7 has no `remat_p`.
    primitives.closed_call_p,
    "eval_jaxpr",
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
)


def body_of(equation: core.JaxprEqn) -> core.ClosedJaxpr:
    """The program of an operation that holds one."""
    for param in equation.params.values():
        if isinstance(param, core.ClosedJaxpr):
            return param
        if isinstance(param, core.Jaxpr):
            return core.ClosedJaxpr(param, ())
    raise ValueError(f"{equation.primitive} holds no program")


def needed(
    program: core.Jaxpr, flags: Sequence[bool], *, for_effects: bool = False
) -> set[core.Var]:
    """The variables that the flagged results of a program depend on.

    If `for_effects`, also those that its effects depend on, such as printing.
    """
    variables = flagged_variables(program.outvars, flags)
    for equation in reversed(program.eqns):
        outputs = [variable in variables for variable in equation.outvars]
        if not any(outputs) and not (for_effects and equation.effects):
            continue
        inputs = [True] * len(equation.invars)
        if equation.primitive in INLINED or equation.primitive.name in INLINED:
            body = body_of(equation).jaxpr
            inside = needed(body, outputs, for_effects=for_effects)
            inputs = [variable in inside for variable in body.invars]
        variables |= flagged_variables(equation.invars, inputs)
    return variables


def forward_in_loop(
    body: core.Jaxpr, is_forward: Sequence[bool], first: int, size: int
) -> list[bool]:
    """For each result of a loop's body, whether more than gradients depend on it.

    Its first `size` results are carried, and are its inputs from `first` on.
    """
    flags, carry = list(is_forward), body.invars[first : first + size]
    while True:
        inside = needed(body, flags)
        pairs = zip(carry, flags, strict=False)
        wanted = [flag or variable in inside for variable, flag in pairs]
        if wanted == flags[:size]:
            return flags
        flags = [*wanted, *flags[size:]]
