"""What a setting may be; refused where it is made, in one wording."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

# A scale, or one for each step.
ScaleBound: TypeAlias = float | optax.Schedule

# Beyond 2**126 the reciprocal of a scale is a subnormal, which XLA flushes to
# zero, and with it every gradient. Below 2**-126 the scale itself is subnormal.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def checked_scale(name: str, value: jax.typing.ArrayLike) -> np.ndarray:
    """The value as float64; raises unless every entry is a usable loss scale."""
    scale = _as_float64(name, value)
    if not np.all((scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)):
        raise ValueError(
            f"`{name}` must be positive, finite, and from 2**-126 to 2**126, got "
            f"{value}. (Outside, the scale or its reciprocal is flushed to zero.)"
        )
    return scale


def static_scale(name: str, value: float) -> float:
    """A loss scale as a setting: one number, in Python's own type."""
    return float(checked_scale(name, _one_float64(name, value)))


def static_flag(name: str, value: bool) -> bool:
    """A choice as a setting: True or False, and nothing that merely looks like one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{name}` must be True or False, got {value!r} of type "
            f"{type(value).__name__}."
        )
    return bool(value)


def static_factor(name: str, value: float, low: float, high: float) -> float:
    """A factor as a setting: as float32, strictly between `low` and `high`."""
    number = _one_float64(name, value)
    with np.errstate(over="ignore"):
        # As float32, because that is what the state is really multiplied by.
        factor = float(number.astype(np.float32))
    if not low < factor < high:
        raise ValueError(
            f"`{name}` must be strictly between {low:g} and {high:g} in float32, got "
            f"{value}. (Did you pass its reciprocal?)"
        )
    return factor


def static_number(name: str, value: float, low: float, high: float = np.inf) -> float:
    """A finite number as a setting, from `low` to `high`."""
    number = _one_float64(name, value)
    if not (np.isfinite(number) and low <= number <= high):
        upper = f" and at most {high:g}" if np.isfinite(high) else ""
        raise ValueError(
            f"`{name}` must be finite, at least {low:g}{upper}, got {value}."
        )
    return float(number)


def static_float_dtype(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """A floating dtype as a setting."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`{name}` must be a floating dtype, got {dtype!r}.")
    return dtype


def positive_factor(name: str, scale: jax.typing.ArrayLike) -> jax.Array:
    """One factor; refused if it is concrete and no positive number."""
    if jnp.shape(scale) != ():
        raise ValueError(f"`{name}` must be one number, got shape {jnp.shape(scale)}.")
    factor = jnp.asarray(scale, jnp.float32)
    if not isinstance(factor, jax.core.Tracer) and not 0 < float(factor) < np.inf:
        raise ValueError(
            f"`{name}` must be positive and finite in float32, got {scale}."
        )
    return factor


def static_bounds(
    min_scale: ScaleBound, max_scale: ScaleBound
) -> Callable[[jax.Array], tuple[jax.typing.ArrayLike, jax.typing.ArrayLike]]:
    """The floor and the cap at a step; where the two cross, the cap wins."""
    low = _static_bound("min_scale", min_scale)
    high = _static_bound("max_scale", max_scale)
    if isinstance(low, float) and isinstance(high, float):
        if low > high:
            raise ValueError(
                f"`min_scale` must be at most `max_scale`, got {low} and {high}. (Did "
                "you swap them?)"
            )
        return lambda step_count: (low, high)

    def value_at(
        bound: ScaleBound, step_count: jax.Array, otherwise: float
    ) -> jax.Array:
        value = bound(step_count) if callable(bound) else bound
        value = jnp.asarray(value, jnp.float32)
        value = jnp.where(jnp.isnan(value), otherwise, value)
        return jnp.clip(value, SMALLEST_SCALE, LARGEST_SCALE)

    def bounds(step_count: jax.Array) -> tuple[jax.Array, jax.Array]:
        cap = value_at(high, step_count, LARGEST_SCALE)
        return jnp.minimum(value_at(low, step_count, SMALLEST_SCALE), cap), cap

    return bounds


def _static_bound(name: str, value: ScaleBound) -> ScaleBound:
    if not callable(value):
        return static_scale(name, value)
    result = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
    if getattr(result, "shape", None) != ():
        raise ValueError(
            f"`{name}` must be a schedule that gives one number a step, got {result}."
        )
    return value


def static_count(name: str, value: int, minimum: int = 1) -> int:
    """A number of steps as a setting, such that an `i32` holds it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{name}` must be an integer, got {value!r} of type "
            f"{type(value).__name__}."
        )
    if not minimum <= value <= np.iinfo(np.int32).max:
        raise ValueError(
            f"`{name}` must be at least {minimum} and below 2**31, got {value}. "
            "(It counts steps.)"
        )
    return int(value)


def as_optimizer(
    name: str, inner: optax.GradientTransformation | optax.MultiSteps
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that a setting stands for; refuses what is none."""
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"`{name}` must be an optimizer with `init` and `update`, got {inner!r} of "
            f"type {type(inner).__name__}. (Pass a made one: `optax.adam(1e-3)`.)"
        )
    return optax.with_extra_args_support(inner)


def _one_float64(name: str, value: object) -> np.ndarray:
    number = _as_float64(name, value)
    if number.ndim != 0:
        raise TypeError(f"`{name}` must be one number, got shape {number.shape}.")
    return number


def _as_float64(name: str, value: object) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{name}` must be a concrete number, got {value!r}. (Settings are fixed "
            "when the program is traced.)"
        )
    # NumPy has no integer type for 2**126.
    array = np.asarray(float(value) if type(value) is int else value)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (np.integer, np.floating)):
        raise TypeError(
            f"`{name}` must be a number, got {value!r} of type {type(value).__name__}."
        )
    return array.astype(np.float64)
