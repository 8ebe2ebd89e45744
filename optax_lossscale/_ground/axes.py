"""Named axes of `pmap`, `vmap` and `shard_map`."""

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._ground.types import AxisName


@contextlib.contextmanager
def hint_at_axes(axis_name: AxisName | None) -> Iterator[None]:
    """Says what an axis name means, in the error if there is no such axis."""
    try:
        yield
    # In `shard_map` JAX asserts that it knows the name, or looks it up.
    except (NameError, AssertionError, KeyError) as error:
        error.add_note(
            "(`axis_name` must name axes of the `pmap`, `vmap` or `shard_map` around, "
            f"got {axis_name!r}; under `jit` with sharded arrays leave it out.)"
        )
        raise


def vary_over(array: jax.Array, names: tuple[Hashable, ...]) -> jax.Array:
    """Makes an array vary over all of the axes, without changing its value.

    JAX 0.12 refuses to reduce an array over several axes if it varies over only some of
    them. `lax.pvary` refuses axes over which the array varies already.
    """
    is_a_device = lax.axis_index(names) >= 0  # True on every device.
    return jnp.where(is_a_device, array, array)


def axes_varying(array: jax.Array) -> frozenset[Hashable]:
    """The axes over which an array is known to vary."""
    kind: Any = jax.typeof(array)
    # JAX 0.7 has the first name, and JAX 0.10 the second.
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
