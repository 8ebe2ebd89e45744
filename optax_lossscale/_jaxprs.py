"""Read programs that JAX has traced, and evaluate their equations one by one."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util


def evaluate(
    equation: core.JaxprEqn,
    inputs: Sequence[Any],
    params: dict[str, Any] | None = None,
) -> Sequence[Any]:
    """Returns the outputs of one equation, computed in the context of the equation."""
    with context_of(equation):
        params = equation.params if params is None else params
        return bind(equation.primitive, inputs, params)


def bind(
    primitive: core.Primitive, inputs: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    """Returns the outputs of a primitive as a sequence, even of one."""
    bind_params = primitive.get_bind_params(params)
    # JAX 0.7 returns the functions of a call apart from its other parameters.
    functions, bind_params = (
        bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    )
    outputs = primitive.bind(*functions, *inputs, **bind_params)
    return outputs if primitive.multiple_results else [outputs]


@contextlib.contextmanager
def context_of(equation: core.JaxprEqn) -> Iterator[None]:
    """Restores what an equation was traced under: its names, mesh and settings."""
    source = equation.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with (
        source_info_util.user_context(source.traceback, name_stack=names),
        equation.ctx.manager,
    ):
        yield


def equations_of(program: core.Jaxpr | core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """Yields every equation of a program and of the programs nested in it."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values())):
            if isinstance(getattr(leaf, "jaxpr", leaf), core.Jaxpr):
                yield from equations_of(leaf)


def flagged_variables(atoms: Sequence[Any], flags: Sequence[bool]) -> set[core.Var]:
    """The variables, among some operands or results, whose flag is set."""
    pairs = zip(atoms, flags, strict=True)
    return {atom for atom, flag in pairs if flag and isinstance(atom, core.Var)}


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants a scan reads, and how many values it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Only JAX 0.12 and later come here.
    constants, carry, _ = params["ft_in"].unpack()  # pragma: no cover
    return len(constants), len(carry)  # pragma: no cover
