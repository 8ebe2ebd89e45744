"""Find what to keep in float32, so that the gradients become as exact as wanted."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from optax_lossscale._autocast.policy import LISTED, LOW, MOVES, UnknownScopeError
from optax_lossscale._checks import check_number
from optax_lossscale._operations.operation import (
    Badness,
    Operation,
    Operations,
)

# How many candidates are tried before one is chosen. Each try runs the program.
_MOST_TRIED = 24


class _Candidate(NamedTuple):
    """A primitive or a scope that could be kept in float32.

    Attributes:
      name: Its name; that of a scope ends with `/`.
      places: The places of its operations in half precision.
      products: The places of its matrix products and convolutions among these.
      blame: How much error these operations add.
    """

    name: str
    places: frozenset[int]
    products: frozenset[int]
    blame: float


def suggest_full_precision(operations: Operations, tolerance: float) -> list[str]:
    """Returns which scopes or primitives to keep in float32.

    With these the error of the gradients is at most the tolerance:

        error = norm(grads - float32_grads) / norm(float32_grads)

    over all gradients together. Pass the result to `autocast(fun, high=...)`, or wrap
    what it names in `full_precision`. The function runs again for each of up to 24
    candidates: the names whose operations add the most error. The first that suffices
    is returned, and those with the fewest operations are tried first. If none does, the
    best one is kept and the next name is looked for in the same way. No name that is
    returned can be left out. Names that would keep all matrix products in float32 are
    returned only if nothing else suffices.

    Args:
      operations: What `trace_operations` returned for a function that returns a loss.
      tolerance: The largest error, dimensionless, positive. One rounding to float16
        makes an error of about 3e-4, and one to bfloat16 one of 2e-3.

    Returns:
      Names for the argument `high` of `autocast`, sorted. An empty list means that the
      gradients are exact enough as they are.

    Raises:
      TypeError: If `operations` is a part of what `trace_operations` returned.
      ValueError: If `tolerance` is not positive, if the gradients are not finite in
        float32 either, or if not even float32 everywhere reaches the tolerance. The
        last is so where a function casts to float16 itself, as a module with
        `dtype=jnp.float16` does, or calls another function that is under `autocast`.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(ws, x):
      ...     for i, w in enumerate(ws):
      ...         with jax.named_scope(f"layer{i}"):
      ...             x = x @ w
      ...     return jnp.mean(x)
      >>> ws = [jnp.full((2, 2), number) for number in (1.0, 1e5, 1e-5)]
      >>> operations = ols.diagnostics.trace_operations(loss_fn, ws, jnp.ones((1, 2)))
      >>> names = ols.diagnostics.suggest_full_precision(operations, 0.01)
      >>> names
      ['layer1/', 'layer2/']
      >>> loss_fn = ols.autocast(loss_fn, high=names)
    """
    if not isinstance(operations, Operations):
        raise TypeError(
            "`operations` must be what `trace_operations` returned, got "
            f"{type(operations).__name__}. (It holds the function, to run it again.)"
        )
    limit = Badness(0.0, 0, check_number("tolerance", tolerance, 0.0))
    if limit.error == 0.0:
        raise ValueError(f"`tolerance` must be positive, got {tolerance}.")
    now = operations.badness(())
    if math.isnan(now.error):
        raise ValueError(
            "`operations` must have gradients that are finite in float32, got NaN or "
            "infinity. (Mend the operation that `first_nonfinite` returns.)"
        )
    if now <= limit:
        return []
    candidates = _candidates(operations)
    products = frozenset.union(*(x.products for x in candidates), frozenset())
    # What keeps all products in float32 helps always, and leaves nothing to gain.
    some = [x for x in candidates if x.name not in LOW and x.products != products]
    for tried in (some, candidates):
        chosen = _choose(operations.badness, tried, now, limit)
        if chosen is not None:
            return sorted(chosen)
    names = [candidate.name for candidate in candidates]
    raise ValueError(
        f"`tolerance` must be one that can be reached, got {tolerance}: it is not with "
        f"any of {names} in float32. (Pass a function that is written for float32, and "
        "without its own `autocast`.)"
    )


def _choose(
    badness: Callable[[Sequence[str]], Badness],
    candidates: Sequence[_Candidate],
    worst: Badness,
    limit: Badness,
) -> list[str] | None:
    """The names of some candidates that reach the limit, or None if these cannot.

    `worst` is how bad the gradients are with none of them.
    """
    chosen: list[str] = []
    while worst > limit:
        tried = {}
        for candidate in candidates:
            if candidate.name not in chosen:
                # JAX moves casts out of a loop, and forgets the scopes around it.
                with contextlib.suppress(UnknownScopeError):
                    tried[candidate.name] = badness([*chosen, candidate.name])
                if tried.get(candidate.name, worst) <= limit:
                    break
        best = min(tried, key=lambda name: tried[name], default=None)
        if best is None or tried[best] >= worst:
            return None
        worst = tried[best]
        chosen.append(best)
    for name in chosen[:-1]:
        others = [other for other in chosen if other != name]
        if badness(others) <= limit:
            chosen = others
    return chosen


def _candidates(operations: Sequence[Operation]) -> list[_Candidate]:
    """Those to be blamed most, with the fewest operations first."""
    low = {place for place, x in enumerate(operations) if x.dtype.itemsize <= 2}
    names: dict[str, set[int]] = {}
    for place, operation in enumerate(operations):
        if operation.primitive in LISTED - MOVES and not operation.is_backward:
            # Its result may be in float32, and rounded by a cast that follows.
            next_one = operations[min(place + 1, len(operations) - 1)]
            is_rounded = next_one.where == operation.where and place + 1 in low
            of_both = {place, place + 1} if is_rounded else {place}
            names.setdefault(operation.primitive, set()).update(of_both)
        parts = operation.scope.split("/") if operation.scope else []
        for size in range(1, len(parts) + 1):
            names.setdefault("/".join(parts[:size]) + "/", set()).add(place)
    candidates: dict[frozenset[int], _Candidate] = {}
    for name, all_places in names.items():
        places = frozenset(all_places & low)
        products = frozenset(x for x in places if operations[x].primitive in LOW)
        blame = sum(_blame(operations[place]) for place in places)
        if places:  # Of scopes that hold the same operations, the outermost is first.
            candidates.setdefault(places, _Candidate(name, places, products, blame))
    by_blame = sorted(candidates.values(), key=lambda x: -x.blame)
    return sorted(by_blame[:_MOST_TRIED], key=lambda x: (len(x.places), x.name))


def _blame(operation: Operation) -> float:
    """How much error an operation adds; an overflow counts most."""
    return min(operation.added_error, 1.0) + 10.0 * (operation.made_nonfinite > 0)
