"""What surrounds a trace: the low dtype of `autocast`, and a record of its calls.

JAX does not reuse what it traced in another context. So a jitted function is traced
once for each low dtype, and anew for each record. A thread has a context of its own.
The package imports this file at once: a context that is made while JAX traces a
function would have it traced again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

# The program of a call, as it was traced, and its `Settings`. O0 has no program.
Call: TypeAlias = tuple[Any, Any]


class Context(NamedTuple):
    """What `autocast` says to the functions that it traces.

    Attributes:
      dtype: The low dtype; None outside of `autocast`, and in a marked function.
      record: Takes each call of `autocast`, if somebody asks for them.
      is_off: Whether `autocast` leaves every function as it is written.
    """

    dtype: jnp.dtype | None = None
    record: Callable[[Call], None] | None = None
    is_off: bool = False


context = jax.make_user_context(Context())


def traced_for(dtype: jnp.dtype | None) -> contextlib.AbstractContextManager[None]:
    """A context in which functions are traced for a low dtype, or for none."""
    inner: contextlib.AbstractContextManager[None]
    inner = context(context.value._replace(dtype=dtype))
    return inner


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """A context in which `autocast` leaves every function as it is written."""
    inner: contextlib.AbstractContextManager[None]
    inner = context(context.value._replace(is_off=True))
    return inner


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """A context in which JAX traces anew, and the list of the calls in it."""
    calls: list[Call] = []
    with context(context.value._replace(record=calls.append)):
        yield calls
    calls.clear()  # JAX keeps the context beside what it traced.
