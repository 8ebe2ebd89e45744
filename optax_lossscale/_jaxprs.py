"""Read programs that JAX has traced, and evaluate their equations one by one."""

import contextlib
import contextvars
import functools
import itertools
import os
import sysconfig
import types
from collections.abc import Iterator, Sequence
from traceback import walk_stack
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core, source_info_util

_JAX = os.path.dirname(jax.__file__) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
# With JAX 0.7 autocast traces under these metadata, which the equations then carry.
METADATA = "optax_lossscale_autocast"
# Scopes that JAX adds in checkpoints, and those of markers for autocast.
_NOT_SHOWN = ("checkpoint", "rematted_computation", "optax_lossscale.")
_ARE_LINES_KEPT = contextvars.ContextVar("are_lines_kept", default=False)
_SERIALS = itertools.count()
_UNCHANGED = contextlib.nullcontext()
# Since then, in a differentiated function, an operation of a jitted function with
# `inline=True` has the line for which it was traced first, not that of its call.
INLINING_KEEPS_LINES = jax.__version_info__ >= (0, 11)
_PACKAGE = os.path.dirname(__file__) + os.sep
_AUTOCAST = os.path.join(_PACKAGE, "_autocast") + os.sep


def evaluate(
    equation: core.JaxprEqn,
    inputs: Sequence[Any],
    params: dict[str, Any] | None = None,
    *,
    is_located: bool = True,
) -> Sequence[Any]:
    """Returns the outputs of one equation, computed in the context of the equation."""
    with context_of(equation, is_located=is_located):
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
def context_of(equation: core.JaxprEqn, *, is_located: bool = True) -> Iterator[None]:
    """Restores what an equation was traced under: names, line, mesh and settings.

    If not `is_located`, without names, and each operation has its own line.
    """
    traceback: Any
    names, traceback = source_info_util.current_name_stack(), _NoTraceback()
    if is_located:
        names = names + equation.source_info.name_stack
        traceback = _traceback_of(equation)
    is_marked = METADATA in (equation.ctx.xla_metadata or ())
    unmarked = set_xla_metadata(**{METADATA: None}) if is_marked else _UNCHANGED
    with (
        source_info_util.user_context(traceback, name_stack=names),
        equation.ctx.manager,
        unmarked,
    ):
        yield


def scopes_of(equation: core.JaxprEqn) -> list[str]:
    """The names of the scopes and transformations that an equation was traced under."""
    return [element.name for element in equation.source_info.name_stack.stack]


def scope_of(equation: core.JaxprEqn) -> tuple[str, ...]:
    """The names of the scopes alone, such as those of the modules of Flax Linen."""
    stack = list(equation.source_info.name_stack.stack)
    while stack and not _is_scope(stack[-1]):
        stack.pop()
    # JAX repeats the whole stack, from a transformation on, in derivative rules.
    for size in range(len(stack) // 2, 0, -1):
        while stack[-size:] == stack[-2 * size : -size] and not _is_scope(stack[-size]):
            del stack[-size:]
    scopes = [element.name for element in stack if _is_scope(element)]
    half = len(scopes) // 2
    if scopes[:half] == scopes[half:]:
        del scopes[half:]  # JAX writes them twice in the backward pass of a loop.
    path = "/".join(scopes)
    names = path.split("/") if path else []
    return tuple(name for name in names if not name.startswith(_NOT_SHOWN))


def _is_scope(element: Any) -> bool:
    """Whether an element of a name stack is a scope, not a transformation."""
    return type(element).__name__ == "Scope"


def all_scopes_of(
    program: core.Jaxpr, around: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yields the names of the scopes around each equation, in nested programs too."""
    for equation in program.eqns:
        scope = (*around, *scope_of(equation))
        yield scope
        for nested in programs_of(equation):
            yield from all_scopes_of(nested, scope)


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
            file = file_name(code.co_filename)
            return f"{file}:{line}:{column} ({code.co_qualname})"
    return None


def user_line(equation: core.JaxprEqn) -> str | None:
    """Line and function of the innermost frame that no installed library holds."""
    source: Any = equation.source_info.traceback
    for code, place in frames_of(equation):
        if not _is_installed(code.co_filename):
            line, *_ = source.code_addr2location(code, place)
            return f"{file_name(code.co_filename)}:{line} ({code.co_qualname})"
    return None


def where_called() -> str:
    """Line and function of the innermost running frame that is not theirs either."""
    for frame, line in walk_stack(None):
        if not _is_library(frame.f_code.co_filename):
            file = file_name(frame.f_code.co_filename)
            return f"{file}:{line} ({frame.f_code.co_qualname})"
    return ""


@contextlib.contextmanager
def keep_lines(*, is_kept: bool = True) -> Iterator[None]:
    """Gives equations of libraries, inside the `with` block, the line around them.

    So an operation of a derivative rule has the line that called the function. Not so
    in programs that JAX keeps for several calls.
    """
    token = _ARE_LINES_KEPT.set(is_kept)
    try:
        yield
    finally:
        _ARE_LINES_KEPT.reset(token)


def _traceback_of(equation: core.JaxprEqn) -> Any:
    """The traceback that an equation is to have; None for that around it."""
    is_kept = _ARE_LINES_KEPT.get() and user_line(equation) is None
    return None if is_kept else equation.source_info.traceback


class _NoTraceback:
    """In place of a traceback, this makes JAX take a new one for each operation."""

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        """Nothing for the errors that JAX raises inside."""


def file_name(file: str) -> str:
    """The name of a file; Jupyter writes each cell into a file of its own."""
    folder, name = os.path.split(file)
    return "cell" if "ipykernel" in os.path.basename(folder) else name


@functools.cache
def _is_library(file: str) -> bool:
    """Whether a file is part of JAX, of autocast or of Python itself."""
    is_standard = file.startswith(_STANDARD) and "site-packages" not in file
    return is_standard or file.startswith((_JAX, _AUTOCAST))


@functools.cache
def _is_installed(file: str) -> bool:
    """Whether a file is part of any installed library, of this one or of Python."""
    is_package = "site-packages" in file or "dist-packages" in file
    return is_package or file.startswith((_STANDARD, _PACKAGE))


@contextlib.contextmanager
def trace_anew() -> Iterator[None]:
    """Keeps JAX from reusing what it has traced, so that Python code runs."""
    with set_xla_metadata(trace_anew=str(next(_SERIALS))):
        yield


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
