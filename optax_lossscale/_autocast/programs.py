"""Read and change programs that JAX has traced."""

import functools
import os
import re
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import convert_element_type_p
from jax.typing import ArrayLike

from optax_lossscale._autocast.jax_internals import (
    frames_of,
    is_closed_call,
    is_scope,
    line_of,
)
from optax_lossscale._ground.tree import are_same

# An input of an equation.
Atom: TypeAlias = core.Var | core.Literal
Program: TypeAlias = core.Jaxpr | core.ClosedJaxpr

_JAX = os.path.dirname(jax.__file__) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_AUTOCAST = os.path.dirname(__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Scopes that JAX adds in checkpoints, and those of markers for autocast.
_NOT_SHOWN = ("checkpoint", "rematted_computation")
_NO_SCOPES = ("optax_lossscale.", "*")
# Names that end with a scope, after a transformation, which has a star.
_TWICE = re.compile(r"(\*.*/[^*/]+/)\1+")


def bind(
    primitive: core.Primitive, inputs: Sequence[ArrayLike], params: dict[str, Any]
) -> Sequence[jax.Array]:
    """Returns the outputs of a primitive as a sequence, even of one."""
    bind_params = primitive.get_bind_params(params)
    # JAX 0.7 returns the functions of a call apart from its other parameters.
    functions, bind_params = (
        bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    )
    outputs = primitive.bind(*functions, *inputs, **bind_params)
    return outputs if primitive.multiple_results else [outputs]


def is_floating_variable(variable: core.Var) -> bool:
    """Whether a variable is a floating array or a `jax.Ref` to one; a token is not."""
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def read(atom: Atom, values: Mapping[core.Var, jax.Array]) -> jax.Array:
    """The value of a literal, or that of a variable."""
    value: jax.Array = atom.val if isinstance(atom, core.Literal) else values[atom]
    return value


def aval_of(atom: Atom) -> jax.core.ShapedArray:
    """The shape and dtype of a variable or a literal that is an array."""
    return cast(jax.core.ShapedArray, atom.aval)


def cast_equation(equation: core.JaxprEqn, old: Atom, new: Atom) -> core.JaxprEqn:
    """The equation that casts a value, with the lines and scopes of another one."""
    aval = aval_of(new)
    changed: core.JaxprEqn = equation.replace(
        primitive=convert_element_type_p,
        invars=[old],
        outvars=[cast(core.Var, new)],
        params={"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None},
    )
    return changed


def scopes_of(equation: core.JaxprEqn) -> list[str]:
    """The names of the scopes and transformations that an equation was traced under."""
    return [element.name for element in equation.source_info.name_stack.stack]


def is_transposed(equation: core.JaxprEqn) -> bool:
    """Whether a backward pass made an equation, whatever its scopes are called."""
    return any(
        element.name == "transpose" and not is_scope(element)
        for element in equation.source_info.name_stack.stack
    )


def is_recomputed(equation: core.JaxprEqn) -> bool:
    """Whether `jax.checkpoint` computes an equation again for a backward pass."""
    return "rematted_computation" in scopes_of(equation)


def scope_of(equation: core.JaxprEqn) -> tuple[str, ...]:
    """The names of the scopes alone, such as those of the modules of Flax Linen.

    In a derivative rule JAX writes the names around it twice, from a transformation on:
    a product in jvp/Net/rule is transposed to one in transpose/jvp/Net/jvp/Net/rule.
    """
    stack = [(is_scope(x), x.name) for x in equation.source_info.name_stack.stack]
    names = [
        name if flag else f"*{name}"
        for flag, name in stack
        if flag or name != "transpose"
    ]
    path = _TWICE.sub(r"\1", "".join(f"{name}/" for name in names))
    shown = (name for name in path.split("/") if name and name not in _NOT_SHOWN)
    return tuple(name for name in shown if not name.startswith(_NO_SCOPES))


def where_written(equation: core.JaxprEqn) -> str | None:
    """Line and function of the innermost frame that is not JAX's or Python's own."""
    return _where(equation, _is_library)


def line_in_code(equation: core.JaxprEqn) -> str | None:
    """The line that `high` and messages name: the user's, or else a library's."""
    return user_line(equation) or where_written(equation)


def user_line(equation: core.JaxprEqn) -> str | None:
    """Line and function of the innermost frame that no installed library holds."""
    return _where(equation, _is_installed)


def _where(equation: core.JaxprEqn, is_passed: Callable[[str], bool]) -> str | None:
    for code, place in frames_of(equation):
        if not is_passed(code.co_filename):
            return place_in(code, line_of(equation, code, place))
    return None


def place_in(code: types.CodeType, line: int) -> str:
    """A line of a function, such as `"model.py:12 (loss_fn)"`.

    Jupyter writes each cell into a file of its own; its lines are those of a `cell`.
    """
    folder, name = os.path.split(code.co_filename)
    file = "cell" if "ipykernel" in os.path.basename(folder) else name
    return f"{file}:{line} ({code.co_qualname})"


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


def jaxpr_of(program: Program) -> core.Jaxpr:
    """The program itself, without the constants that may be kept beside it."""
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def consts_of(program: Program) -> Sequence[Any]:
    """The constants that are kept beside a program, for its `constvars`."""
    return program.consts if isinstance(program, core.ClosedJaxpr) else ()


def with_equations(
    program: Program, equations: Sequence[core.JaxprEqn], **changes: Any
) -> Program:
    """The program with other equations, and perhaps other variables or effects.

    It is the same object if nothing changes.
    """
    jaxpr = jaxpr_of(program)
    if not changes and are_same(equations, jaxpr.eqns):
        return program
    jaxpr = jaxpr.replace(eqns=list(equations), **changes)
    if isinstance(program, core.ClosedJaxpr):
        return core.ClosedJaxpr(jaxpr, program.consts)
    return jaxpr


_CHANGED: WeakKeyDictionary[Program, dict[Hashable, Any]] = WeakKeyDictionary()


def changed_once(
    program: Program, key: Hashable, change: Callable[[], Program]
) -> Program:
    """The result of `change()`; of an object and a key always the same.

    JAX keeps what it compiled by the identity of a program. If two threads change one
    at the same time, both take what the first has made.
    """
    of_program = _CHANGED.setdefault(program, {})
    if key not in of_program:
        changed = change()  # None stands for the program itself, so that it can go.
        of_program.setdefault(key, None if changed is program else changed)
    return program if of_program[key] is None else of_program[key]


def equations_of(program: Program) -> Iterator[core.JaxprEqn]:
    """Yields every equation of a program and of the programs nested in it."""
    for equation in jaxpr_of(program).eqns:
        yield equation
        for nested in programs_of(equation):
            yield from equations_of(nested)


def programs_of(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the programs that an equation holds, or runs if JAX keeps it closed."""
    for parameter in equation.params.values():
        if is_closed_call(parameter):
            yield jax.make_jaxpr(parameter.expand)(*parameter.in_avals).jaxpr
        for program in _programs_in(parameter):
            yield jaxpr_of(program)


def with_params(equation: core.JaxprEqn, params: dict[str, Any]) -> core.JaxprEqn:
    """The equation with other parameters; the same object if they are the same."""
    if are_same([*params.values()], [*equation.params.values()]):
        return equation
    changed: core.JaxprEqn = equation.replace(params=params)
    return changed


def with_programs(
    equation: core.JaxprEqn, change: Callable[[Program], Program]
) -> core.JaxprEqn:
    """The equation with changed programs; the same object if nothing changes."""
    changed = {
        name: with_programs_in(param, change) for name, param in equation.params.items()
    }
    return with_params(equation, changed)


def with_programs_in(parameter: Any, change: Callable[[Program], Program]) -> Any:
    """A parameter with changed programs; the same object if nothing changes."""
    programs = _programs_in(parameter)
    changed = [*map(change, programs)]
    if are_same(programs, changed):
        return parameter
    new = iter(changed)
    return jax.tree.map(lambda _: next(new), parameter)


def _programs_in(parameter: Any) -> list[Program]:
    """The programs in a parameter that is one, or that holds nothing else.

    What a library keeps beside settings of its own is its own: Equinox compares such
    programs with copies, which are not in the equation.
    """
    is_several = isinstance(parameter, tuple | list)
    programs = [x for x in parameter if x is not None] if is_several else [parameter]
    are_programs = (isinstance(x, core.Jaxpr | core.ClosedJaxpr) for x in programs)
    return programs if all(are_programs) else []
