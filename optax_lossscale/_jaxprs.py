"""Read programs that JAX has traced, and evaluate their equations one by one."""

import contextlib
import functools
import itertools
import os
import sysconfig
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core, source_info_util

_JAX = os.path.dirname(jax.__file__) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
# With JAX 0.7 autocast traces under these metadata, which the equations then carry.
METADATA = "optax_lossscale_autocast"
_UNCHANGED = contextlib.nullcontext()
_AUTOCAST = os.path.join(os.path.dirname(__file__), "_autocast") + os.sep


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
    is_marked = METADATA in (equation.ctx.xla_metadata or ())
    unmarked = set_xla_metadata(**{METADATA: None}) if is_marked else _UNCHANGED
    with (
        source_info_util.user_context(source.traceback, name_stack=names),
        equation.ctx.manager,
        unmarked,
    ):
        yield


def scopes_of(equation: core.JaxprEqn) -> list[str]:
    """The names of the scopes and transformations that an equation was traced under."""
    return [element.name for element in equation.source_info.name_stack.stack]


def frames_of(equation: core.JaxprEqn) -> list[tuple[types.CodeType, int]]:
    """The functions that an equation was traced in, from the innermost outwards.

    They end where JAX began to trace the program that holds the equation. Beside each
    stands the place in it from which the next one was called.
    """
    source = equation.source_info.traceback
    frames = zip(*source.raw_frames(), strict=True) if source else ()
    # The frames of JAX 0.7 go on to what called the trace.
    return list(
        itertools.takewhile(lambda x: x[0].co_name != "trace_to_jaxpr_dynamic", frames)
    )


def where_written(equation: core.JaxprEqn) -> str | None:
    """Line and function of the innermost frame that is not JAX's or autocast's own."""
    source: Any = equation.source_info.traceback
    for code, place in frames_of(equation):
        if not _is_library(code.co_filename):
            line, column, *_ = source.code_addr2location(code, place)
            file = os.path.basename(code.co_filename)
            return f"{file}:{line}:{column} ({code.co_qualname})"
    return None


def where_called() -> str:
    """Line and function of the innermost running frame that is not theirs either."""
    for frame, line in traceback.walk_stack(None):
        if not _is_library(frame.f_code.co_filename):
            file = os.path.basename(frame.f_code.co_filename)
            return f"{file}:{line} ({frame.f_code.co_qualname})"
    return ""


@functools.cache
def _is_library(file: str) -> bool:
    """Whether a file is part of JAX, of autocast or of Python itself."""
    is_standard = file.startswith(_STANDARD) and "site-packages" not in file
    return is_standard or file.startswith((_JAX, _AUTOCAST))


def equations_of(program: core.Jaxpr | core.ClosedJaxpr) -> Iterator[core.JaxprEqn]:
    """Yields every equation of a program and of the programs nested in it."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for nested in programs_of(equation):
            yield from equations_of(nested)


def programs_of(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the programs that an equation holds."""
    for leaf in jax.tree.leaves(list(equation.params.values())):
        program = getattr(leaf, "jaxpr", leaf)
        if isinstance(program, core.Jaxpr):
            yield program


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
