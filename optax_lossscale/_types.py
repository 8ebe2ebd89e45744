"""The type aliases of signatures."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import jax
import optax

# Any pytree of arrays.
PyTree: TypeAlias = Any
# A pytree of bools that is a prefix of another tree, or a function that makes one.
Mask: TypeAlias = PyTree | Callable[[PyTree], PyTree] | None
# The name of one axis of `pmap`, `vmap` or `shard_map`, or a tuple of names.
AxisName: TypeAlias = Hashable
# A floor or a cap of the loss scale: one number, or a number for each step.
ScaleBound: TypeAlias = float | optax.Schedule
# What `loss_scale_metrics` returns, for one step or stacked over several.
Metrics: TypeAlias = Mapping[str, jax.typing.ArrayLike]
