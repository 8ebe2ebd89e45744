"""What a setting may be; refused where it is made, in one wording."""

import jax
import jax.numpy as jnp
import numpy as np

# Beyond 2**126 the reciprocal of a scale is a subnormal, which XLA flushes to
# zero, and with it every gradient. Below 2**-126 the scale itself is subnormal.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def check_scale(name: str, value: jax.typing.ArrayLike) -> None:
    """Raises unless every entry of `value` is a usable loss scale."""
    check_number(name, value)
    scale = np.asarray(value, np.float64)
    if not np.all((scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)):
        raise ValueError(
            f"`{name}` must be positive, finite, and from 2**-126 to 2**126, got "
            f"{value}. (Outside, the scale or its reciprocal is flushed to zero.)"
        )


def check_number(name: str, value: object) -> None:
    """Raises unless `value` is a real number, or an array of them."""
    dtype = np.asarray(value).dtype
    if not (jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.floating)):
        raise TypeError(
            f"`{name}` must be a number, got {value!r} of type {type(value).__name__}."
        )


def static_scale(name: str, value: float) -> float:
    """A loss scale as a setting: one number, in Python's own type."""
    check_scale(name, value)
    if np.ndim(value) != 0:
        raise TypeError(f"`{name}` must be one number, got shape {np.shape(value)}.")
    return float(value)


def static_factor(name: str, value: float, low: float, high: float) -> float:
    """A factor as a setting: as float32, strictly between `low` and `high`."""
    check_number(name, value)
    with np.errstate(over="ignore"):
        factor = np.float32(value)  # What the state is really multiplied by.
    if not low < factor < high:
        raise ValueError(
            f"`{name}` must be strictly between {low:g} and {high:g}, got {value}. "
            "(Did you pass its reciprocal?)"
        )
    return float(value)


def static_count(name: str, value: int) -> int:
    """A number of steps as a setting: positive, and such that an `i32` holds it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{name}` must be an integer, got {value!r} of type "
            f"{type(value).__name__}."
        )
    if not 1 <= value <= np.iinfo(np.int32).max:
        raise ValueError(
            f"`{name}` must be at least 1 and below 2**31, got {value}. "
            "(It counts steps.)"
        )
    return int(value)
