"""What the interpreter notes for `autocast_report`, while a report is made."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple


class Note(NamedTuple):
    """How one operation computes.

    Attributes:
      operation: Name of the primitive.
      computed: Name of the dtype that it computes in.
      result: Name of the dtype of its result.
      why: The reason for that choice.
      where: Line and function that it was written in.
    """

    operation: str
    computed: str
    result: str
    why: str
    where: str


# From the identity of an equation to the equation, which keeps it alive, and its note.
_NOTES: contextvars.ContextVar[dict[int, tuple[Any, Note]] | None] = (
    contextvars.ContextVar("notes", default=None)
)


@contextlib.contextmanager
def collect_notes() -> Iterator[dict[int, tuple[Any, Note]]]:
    """Collects notes of all operations that are evaluated inside the `with` block."""
    notes: dict[int, tuple[Any, Note]] = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def is_collecting() -> bool:
    """Whether a report is being made."""
    return _NOTES.get() is not None


def add_note(equation: Any, note: Note) -> None:
    """Notes an operation, if a report is being made; a later note replaces it."""
    notes = _NOTES.get()
    if notes is not None:
        notes[id(equation)] = (equation, note)
