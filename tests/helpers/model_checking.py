"""Compares a system with a model of it after every history of events.

Histories are too many to run one by one, but most of them lead to the same states. So,
as a model checker does, `explore` keeps the states that were reached: pairs of a state
of the system and a state of the model. It applies each event to all of them at once,
and merges pairs that are equal. If the two differ after an event, it raises an error
with the history that led there.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

BATCH = 256  # So many states does a compiled program take.

Counts = tuple[int, ...]


class After(NamedTuple):
    """What an event makes of a state, and what else it returns."""

    state: Any
    returned: Any = ()


class Machine(Protocol):
    """A system and its model.

    A state of the system is a pytree of arrays. The functions below take many states of
    one mode at once, with a leading axis. A mode is whatever selects the program.

    Attributes:
      counters: The places of numbers that only count, among all numbers of a state.
        States that differ only there are merged, if their counts are of one class.
    """

    counters: Sequence[int]

    def first(self) -> tuple[Hashable, Any, Hashable]:
        """The first mode, state of the system and state of the model."""

    def apply(self, mode: Hashable, states: Any, event: Any) -> tuple[Hashable, After]:
        """The mode and the states of the system after an event."""

    def follow(
        self, mode: Hashable, model: Hashable, counts: Counts, event: Any
    ) -> tuple[Hashable, tuple[float, ...]]:
        """The state of the model after it, and the numbers that `apply` must return."""

    def class_of(self, counts: Counts) -> Hashable:
        """What the system may read of its counts."""

    def with_larger_counts(self, states: Any) -> Any:
        """The same states with other counts of the same class."""


class Explored(NamedTuple):
    """How much was compared; `is_closed` says that longer histories add no state."""

    states: int
    transitions: int
    histories: int
    is_closed: bool


class _Reached(NamedTuple):
    """States of one mode, and the place of each in the list of all that were found."""

    states: Any
    models: list[Hashable]
    places: list[int]


def explore(machine: Machine, events: Sequence[Any], length: int) -> Explored:
    """Compares the system with its model after all histories of at most that length."""
    mode, state, model = machine.first()
    states = jax.tree.map(lambda leaf: np.asarray(leaf)[None], state)
    came_from: list[tuple[int, Any]] = [(-1, None)]
    seen = set(_keys(machine, mode, states, [model]))
    newest = {mode: _Reached(states, [model], [0])}
    transitions = 0
    for _ in range(length):
        found: dict[Hashable, list[_Reached]] = {}
        for (mode, reached), event in itertools.product(newest.items(), events):
            new_mode, after, models = _compare(machine, mode, reached, event, came_from)
            transitions += len(models)
            fresh, keys = [], _keys(machine, new_mode, after, models)
            for i, key in enumerate(keys):
                if key not in seen:
                    seen.add(key)
                    fresh.append(i)
            places = range(len(came_from), len(came_from) + len(fresh))
            came_from += [(reached.places[i], event) for i in fresh]
            if fresh:
                new = _Reached(_at(after, fresh), [models[i] for i in fresh], [*places])
                found.setdefault(new_mode, []).append(new)
        newest = {mode: _joined(parts) for mode, parts in found.items()}
    histories = sum(len(events) ** steps for steps in range(1, length + 1))
    return Explored(len(seen), transitions, histories, not newest)


def _compare(
    machine: Machine,
    mode: Hashable,
    reached: _Reached,
    event: Any,
    came_from: list[tuple[int, Any]],
) -> tuple[Hashable, Any, list[Hashable]]:
    """Mode, states and models after an event; raises if the two differ."""
    new_mode, after = machine.apply(mode, reached.states, event)
    counts = _counts(machine, reached.states)
    followed = [
        machine.follow(mode, model, each, event)
        for model, each in zip(reached.models, counts, strict=True)
    ]
    expected = np.asarray([row for _, row in followed], np.float64)

    larger = machine.with_larger_counts(reached.states)
    _, counted = machine.apply(mode, larger, event)
    without = _without_counts(machine, numbers(counted.state))
    for actual, right, tree, what in (
        (numbers(after), expected, after, ""),
        (without, _without_counts(machine, numbers(after.state)), (), "counts matter "),
    ):
        wrong = _differ(actual, right)
        if wrong.any():
            i = int(np.argmax(wrong.any(axis=1)))
            history = [*_history(came_from, reached.places[i]), event]
            shown = _difference(tree, actual[i], right[i])
            happened = "; ".join(map(str, history))
            raise AssertionError(f"{what}after {happened}:\n{shown}")
    return new_mode, after.state, [model for model, _ in followed]


def numbers(states: Any) -> np.ndarray:
    """All numbers of many states, a row for each; float64 holds each of them."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(states)]
    rows = [leaf.reshape(len(leaf), -1).astype(np.float64) for leaf in leaves]
    return np.concatenate(rows, axis=1)


def in_batches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function over any number of states, with one compiled program."""
    # There are many programs and few states, so compiling takes most of the time.
    options = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(jax.vmap(function), compiler_options=options)

    def run(*args: Any) -> Any:
        total = len(jax.tree.leaves(args)[0])
        results = []
        for start in range(0, total, BATCH):
            # The last is repeated, to fill the batch.
            places = np.minimum(np.arange(start, start + BATCH), total - 1)
            result = jax.device_get(compiled(*_at(args, places)))
            results.append(_at(result, slice(min(BATCH, total - start))))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results)

    return run


def _at(states: Any, places: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[places], states)


def _joined(parts: list[_Reached]) -> _Reached:
    states, models, places = zip(*parts, strict=True)
    return _Reached(
        jax.tree.map(lambda *leaves: np.concatenate(leaves), *states),
        [*itertools.chain(*models)],
        [*itertools.chain(*places)],
    )


def _counts(machine: Machine, states: Any) -> list[Counts]:
    columns = numbers(states)[:, machine.counters].astype(int)
    return [*map(tuple, columns.tolist())]


def _without_counts(machine: Machine, rows: np.ndarray) -> np.ndarray:
    return np.delete(rows, machine.counters, axis=1)


def _keys(
    machine: Machine, mode: Hashable, states: Any, models: list[Hashable]
) -> list[Hashable]:
    rows = _without_counts(machine, numbers(states))
    counts = _counts(machine, states)
    return [
        (mode, row.tobytes(), machine.class_of(each), model)
        for row, each, model in zip(rows, counts, models, strict=True)
    ]


def _differ(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where numbers differ; a zero is not its negative, and NaN is NaN."""
    assert actual.shape == expected.shape
    same = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    return ~(same | (np.isnan(actual) & np.isnan(expected)))


def _history(came_from: list[tuple[int, Any]], place: int) -> list[Any]:
    events = []
    while place > 0:
        place, event = came_from[place]
        events.append(event)
    return events[::-1]


def _difference(tree: Any, actual: np.ndarray, expected: np.ndarray) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [
        jax.tree_util.keystr(path) for path, leaf in leaves for _ in leaf[0].flat
    ] or [""] * len(actual)
    return "\n".join(
        f"  {name}: {ours} instead of {right}"
        for name, ours, right in zip(names, actual, expected, strict=True)
        if _differ(np.asarray([ours]), np.asarray([right])).any()
    )
