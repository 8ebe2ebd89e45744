"""Find the arrays among arguments, and find out whether a call changed an argument."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._nnx import explain_changes, is_nnx, is_state
from optax_lossscale._types import PyTree


def is_array(leaf: object) -> bool:
    """Whether a leaf is an array that JAX can trace; any other leaf is static."""
    if isinstance(leaf, np.ndarray):  # Not of strings, dates or objects, for example.
        return leaf.dtype.isnative and hasattr(jnp, leaf.dtype.name)
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


class Rest(NamedTuple):
    """What remains of a tree without its arrays; equal for trees that differ in them.

    Attributes:
      structure: The structure of the tree.
      others: Its leaves, with None in the places of arrays.
      flags: For each leaf, whether it is an array.
    """

    structure: Any
    others: tuple[Any, ...]
    flags: tuple[bool, ...]

    def merge(self, arrays: Sequence[Any]) -> PyTree:
        """The tree with these arrays in its places."""
        given, pairs = iter(arrays), zip(self.others, self.flags, strict=True)
        leaves = [next(given) if is_array else other for other, is_array in pairs]
        return jax.tree.unflatten(self.structure, leaves)


def partition(tree: PyTree) -> tuple[list[Any], Rest]:
    """The arrays of a tree, and the rest of it."""
    leaves, structure = jax.tree.flatten(tree)
    flags = tuple(map(is_array, leaves))
    pairs = zip(leaves, flags, strict=True)
    others = tuple(None if flag else leaf for leaf, flag in pairs)
    arrays = itertools.compress(leaves, flags)
    rest = Rest(structure, others, flags)
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays], rest


def call_unchanged(
    fun: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PyTree:
    """Returns `fun(*args, **kwargs)`; refuses changes that would be lost."""
    parts = _parts_of((args, kwargs))
    with explain_changes():
        results = fun(*args, **kwargs)
    if not are_same(parts, _parts_of((args, kwargs))):
        raise ValueError(
            "`fun` must not change its arguments in place: under `autocast` the "
            "change would be lost. (Return the new value instead.)"
        )
    return results


def _parts_of(tree: PyTree) -> list[Any]:
    """What a tree consists of, to be compared with what it consists of later.

    The parts are its leaves, with modules as leaves and without states, and its
    structure. A node that makes new leaves each time it is flattened, such as
    `self.array * 1`, has its attributes as one part instead.
    """
    parts, again = (_flatten(tree, is_nnx) for _ in range(2))
    if are_same(parts, again):
        return [part for part in parts if not is_state(part)]
    children, again = (_flatten(tree, lambda x: x is not tree) for _ in range(2))
    if are_same(children, again):
        return [part for child in children for part in _parts_of(child)]
    return [dict(getattr(tree, "__dict__", {}))]


def are_same(parts: Sequence[Any], later: Sequence[Any]) -> bool:
    """Whether two lists of parts agree, so that nothing was changed in place."""
    return len(parts) == len(later) and all(map(_is_same, parts, later))


def _is_same(part: Any, later: Any) -> bool:
    if isinstance(part, dict):  # Attributes; new ones may be caches.
        return all(later.get(name) is value for name, value in part.items())
    if isinstance(part, jax.tree_util.PyTreeDef):
        try:
            return bool(part == later)
        except ValueError:  # Parts of the structure that cannot be compared.
            return False
    return part is later


def _flatten(tree: PyTree, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The leaves and the structure of a tree."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    return [*leaves, structure]
