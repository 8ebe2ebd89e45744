"""What the interpreter notes for `autocast_report`, while a report is made."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from optax_lossscale._autocast.choice import Choice
from optax_lossscale._autocast.values import is_float32
from optax_lossscale._jaxprs import programs_of, where_called, where_written
from optax_lossscale._tree import is_floating


class Note(NamedTuple):
    """How one operation computes.

    Attributes:
      operation: Name of the primitive.
      computed: Name of the dtype that it computes in.
      result: Name of the dtype of its first result, perhaps rounded.
      why: The reason for that choice.
      where: Line and function that it was written in; inside a library function of
        JAX, where that function was called.
    """

    operation: str
    computed: str
    result: str
    why: str
    where: str


class Caller(NamedTuple):
    """The operations that hold a program, which tell its evaluations apart.

    Attributes:
      path: What holds the program, from the outermost to the innermost.
      where: Line and function of the innermost of them.
    """

    path: tuple[Any, ...]
    where: str = ""


# From the identities along a path to the path, which keeps them alive, and a note.
_Notes = dict[tuple[int, ...], tuple[tuple[Any, ...], Note]]
_NOTES: contextvars.ContextVar[_Notes | None] = contextvars.ContextVar(
    "notes", default=None
)


_IS_CALLED: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar(
    "is_called", default=None
)


@contextlib.contextmanager
def watch_for_calls() -> Iterator[list[bool]]:
    """Yields a list that is empty until `autocast` is called in the `with` block."""
    calls: list[bool] = []
    token = _IS_CALLED.set(calls)
    try:
        yield calls
    finally:
        _IS_CALLED.reset(token)


def note_call() -> None:
    """Notes that `autocast` is called, for `watch_for_calls`."""
    calls = _IS_CALLED.get()
    if calls is not None:
        calls.append(True)


@contextlib.contextmanager
def collect_notes() -> Iterator[_Notes]:
    """Collects notes of all operations that are evaluated inside the `with` block."""
    notes: _Notes = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Collects none: `autocast` inside `autocast` is noted by the outer one alone."""
    token = _NOTES.set(None)
    try:
        yield
    finally:
        _NOTES.reset(token)


def is_collecting() -> bool:
    """Whether a report is being made."""
    return _NOTES.get() is not None


def note_operation(
    caller: Caller, equation: Any, choice: Choice, results: Sequence[Any]
) -> None:
    """Notes how an operation computed, if a report is being made.

    If it holds programs that are left alone, their operations are noted instead.
    """
    if not is_collecting():
        return
    programs = list(programs_of(equation)) if choice.is_left_alone else []
    inner_caller = caller_of(caller, equation)
    for inner in (inner for program in programs for inner in program.eqns):
        results = [variable.aval for variable in inner.outvars]
        note_operation(inner_caller, inner, choice, results)
    if not programs:
        dtypes = [getattr(result, "dtype", None) for result in results[:1]]
        note = Note(
            operation=equation.primitive.name,
            computed=_name_of(_computed_in(equation, choice)),
            result=_name_of(*dtypes),
            why=choice.why,
            where=where_written(equation) or caller.where,
        )
        add_note(caller, equation, note)


def outermost_caller() -> Caller:
    """The caller of a program that no operation holds, another one at each call."""
    return Caller((object(),), where_called() if is_collecting() else "")


def caller_of(caller: Caller, equation: Any) -> Caller:
    """The caller of the programs that an operation of a caller's program holds."""
    if not is_collecting():
        return caller  # Derivative rules keep it, and should not keep whole programs.
    return Caller((*caller.path, equation), where_written(equation) or caller.where)


def _computed_in(equation: Any, choice: Choice) -> Any:
    """The dtype that an operation computes in, or None if it has no operand."""
    if choice.float8 is not None:
        return choice.float8[0]
    if choice.dtype is not None and any(map(is_float32, equation.invars)):
        return choice.dtype
    results = [getattr(x.aval, "dtype", None) for x in equation.outvars[:1]]
    floats = [x.aval.dtype for x in equation.invars if is_floating(x.aval)]
    others = [getattr(x.aval, "dtype", None) for x in equation.invars]
    # A `select_n` of integers has a condition, too; a comparison has a bool result.
    moved = [dtype for dtype in results if dtype in others]
    return next(iter([*floats, *moved, *others, *results]), None)


def _name_of(dtype: Any = None) -> str:
    if dtype is None:
        return "-"
    return "float0" if dtype == jax.dtypes.float0 else str(dtype.name)


def add_note(caller: Caller, operation: Any, note: Note) -> None:
    """Adds a note to the report that is being made, if any.

    A program may be evaluated twice where it runs once. So a later note of the same
    operation of the same caller replaces the earlier one.
    """
    notes = _NOTES.get()
    if notes is not None:
        path = (*caller.path, operation)
        notes[tuple(map(id, path))] = path, note


def drop_notes(caller: Caller) -> None:
    """Drops the notes of a caller's programs, in whose place others will run."""
    notes, prefix = _NOTES.get(), tuple(map(id, caller.path))
    for key in list(notes or ()):
        if notes and key[: len(prefix)] == prefix:
            del notes[key]
