"""Checks of what is drawn."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.typing import ArrayLike


def check_numbers(name: str, values: ArrayLike) -> np.ndarray:
    """Returns an array of numbers or bools, and refuses strings and ragged lists."""
    array = _as_numpy(values)
    if array.dtype.kind in "OSU":
        hint = " (Convert text: `float(text)`, or `text == 'True'` for a bool.)"
        raise TypeError(
            f"`{name}` must hold numbers or bools, and have one shape throughout, got "
            f"{values!r:.60}.{hint if array.dtype.kind in 'SU' else ''}"
        )
    return array


def check_mapping(name: str, value: object, meant: str) -> None:
    """Refuses what is no mapping from labels, and says what may have been meant."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`{name}` must map labels to {name.replace('_', ' ')}, got an object of "
            f"type {type(value).__name__}. (Did you mean `{{{meant}}}`?)"
        )


def _as_numpy(value: object) -> np.ndarray:
    """An array, of one object if the parts of `value` differ in shape."""
    try:
        array = np.asarray(jax.device_get(value))
    except ValueError:
        return np.asarray(None)
    # NumPy's integers are too small for 2**126, so it makes an array of objects.
    is_large = array.dtype == object and all(
        isinstance(x, int | float) for x in array.flat
    )
    return array.astype(np.float64) if is_large else array
