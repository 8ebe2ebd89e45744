"""Compares a system with a model of it after every history of events.

Histories are too many to run one by one, but most of them lead to the same states. So,
as a model checker does, `explore` keeps the states that were reached: pairs of a state
of the system and a state of the model. It applies each event to all of them at once,
and merges pairs that are equal. If the two differ after an event, it raises an error
with the history that led there.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

BATCH = 256  # The number of states in one call of the compiled program.


class Machine(Protocol):
    """A system and its model.

    The states of the system are a pytree of arrays, with a leading axis for many states
    at once.
    """

    def first(self) -> tuple[Any, Hashable]:
        """The first state of the system, and that of the model."""

    def apply(self, states: Any, event: Any) -> tuple[Any, Any]:
        """The states of the system after an event, and what else it returns."""

    def follow(
        self, model: Hashable, row: np.ndarray, event: Any
    ) -> tuple[Hashable, tuple[float, ...]]:
        """The state of the model after it, and all numbers that `apply` must return.

        Those of the system before it are a `row`.
        """

    def merged(self, states: Any) -> Any:
        """The same states; those that differ only in their counts become equal."""


def explore(machine: Machine, events: Sequence[Any], length: int) -> int:
    """Compares the two after all histories of at most that length; counts states."""
    states, model = machine.first()
    models, histories, seen = [model], [()], set()
    for _ in range(length):
        parts, new_models, new_histories = [], [], []
        for event in events:
            after = machine.apply(states, event)
            followed = [
                machine.follow(model, row, event)
                for model, row in zip(models, numbers(states), strict=True)
            ]
            _compare(after, [row for _, row in followed], histories, event)
            merged, fresh = machine.merged(after[0]), []
            for i, row in enumerate(numbers(merged)):
                key = row.tobytes(), followed[i][0]
                if key not in seen:
                    seen.add(key)
                    fresh.append(i)
            parts.append(jax.tree.map(lambda leaf, at=fresh: leaf[at], merged))
            new_models += [followed[i][0] for i in fresh]
            new_histories += [(*histories[i], event) for i in fresh]
        if not new_models:  # Longer histories lead nowhere else.
            break
        states = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        models, histories = new_models, new_histories
    return len(seen)


def _compare(after: Any, expected: Any, histories: Any, event: Any) -> None:
    """Raises if any number differs; a zero is not its negative, and NaN is NaN."""
    actual, expected = numbers(after), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    same = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    wrong = ~(same | (np.isnan(actual) & np.isnan(expected)))
    if wrong.any():
        i = int(np.argmax(wrong.any(axis=1)))
        happened = "; ".join(map(str, (*histories[i], event)))
        one = jax.tree.map(lambda leaf: leaf[i], after)
        raise AssertionError(
            f"after {happened}:\n{one}\nat {np.flatnonzero(wrong[i])} of\n{expected[i]}"
        )


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
            batch = jax.tree.map(lambda leaf, at=places: leaf[at], args)
            result = jax.device_get(compiled(*batch))
            end = min(BATCH, total - start)
            results.append(jax.tree.map(lambda leaf, end=end: leaf[:end], result))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results)

    return run
