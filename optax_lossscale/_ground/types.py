"""The type aliases of signatures, and the module of public classes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, get_type_hints

import jax

# Any pytree, or one leaf of it.
PyTree: TypeAlias = Any
# Arrays in a list or a tuple.
Arrays: TypeAlias = Sequence[jax.Array]
# The keys, indices and field names from the root of a pytree to a node.
KeyPath: TypeAlias = tuple[Any, ...]
# A pytree of bools that is a prefix of another tree, or a function that makes one.
Mask: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None
# The name of one axis of `pmap`, `vmap` or `shard_map`, or a tuple of names.
AxisName: TypeAlias = Hashable
# What `loss_scale_metrics` returns, for one step or stacked over several.
Metrics: TypeAlias = Mapping[str, jax.typing.ArrayLike]


_Kind = TypeVar("_Kind", bound=type)


def public(kind: _Kind) -> _Kind:
    """Names a class after the package, so that pickles and `repr` know no file.

    What it is annotated with is looked up first, in its own file.
    """
    kind.__annotations__ = get_type_hints(kind)
    kind.__module__ = "optax_lossscale"
    return kind
