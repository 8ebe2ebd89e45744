"""Checks of settings: each raises a clear error as soon as the setting is given."""

import math
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._ground.types import PyTree, ScaleBound

# Beyond 2**126 the reciprocal of a scale is subnormal. XLA flushes it to zero, and
# with it every gradient. Below 2**-126 the scale itself is subnormal.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def check_concrete(name: str, tree: PyTree, instead: str) -> None:
    """Refuses traced arrays, which have no values, and says what to do instead."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise TypeError(
            f"`{name}` must hold arrays with values, got traced ones, as inside `jit`. "
            f"({instead})"
        )


def check_scales(name: str, value: ArrayLike) -> np.ndarray:
    """Returns the value as float64, if every entry is a usable loss scale."""
    scale = _as_float64(name, value)
    if not np.all((scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)):
        raise ValueError(
            f"`{name}` must be positive, finite, and from 2**-126 to 2**126, got "
            f"{value}. (Outside, the scale or its reciprocal is flushed to zero.)"
        )
    return scale


def check_scale(name: str, value: float) -> float:
    """Returns one loss scale as a Python number."""
    return float(check_scales(name, _one_float64(name, value)))


def check_flag(name: str, value: bool) -> bool:
    """Returns True or False, and refuses values that are merely truthy or falsy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{name}` must be True or False, got {value!r} of type "
            f"{type(value).__name__}."
        )
    return bool(value)


def check_bool(name: str, value: ArrayLike | None) -> jax.Array | None:
    """Returns one bool as an array, which may be traced."""
    if value is None:
        return None
    # Without this check a loss passed by mistake would count as True, even if NaN.
    if not jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.bool_):
        meant = "loss < threshold" if name == "accept" else "jnp.isfinite(loss)"
        raise TypeError(
            f"`{name}` must be a bool, got {value!r}. (Did you mean `{meant}`?)"
        )
    if jnp.shape(value) != ():
        raise ValueError(
            f"`{name}` must be a scalar, got shape {jnp.shape(value)}. (Did you mean "
            "`all_finite(...)` or `jnp.all(...)`?)"
        )
    return jnp.asarray(value)


def check_factor(name: str, value: float, low: float, high: float) -> float:
    """Returns a factor rounded to float32, strictly between `low` and `high`."""
    number = _one_float64(name, value)
    with np.errstate(over="ignore", divide="ignore"):
        # The scale is multiplied in float32, so the rounded factor must be in range.
        factor = float(number.astype(np.float32))
        is_inverted = low < 1 / number < high
    if not low < factor < high:
        hint = " (Did you pass its reciprocal?)" if is_inverted else ""
        raise ValueError(
            f"`{name}` must be strictly between {low:g} and {high:g} in float32, got "
            f"{value}.{hint}"
        )
    if factor < SMALLEST_SCALE:
        raise ValueError(
            f"`{name}` must be at least 2**-126, got {value}. (XLA flushes smaller "
            "numbers to zero.)"
        )
    return factor


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


def check_number(name: str, value: float, low: float, high: float = np.inf) -> float:
    """Returns a finite number from `low` to `high`."""
    number = _one_float64(name, value)
    if not (np.isfinite(number) and low <= number <= high):
        upper = f" and at most {high:g}" if np.isfinite(high) else ""
        raise ValueError(
            f"`{name}` must be finite, at least {low:g}{upper}, got {value}."
        )
    return float(number)


def check_float_dtype(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Returns a floating dtype."""
    try:  # NumPy would read None as float64.
        is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # Not a dtype at all.
        is_floating = False
    if not is_floating:
        meant = dtype_meant(dtype)
        hint = f" (Did you mean {meant}?)" if meant else ""
        raise TypeError(f"`{name}` must be a floating dtype, got {dtype!r}.{hint}")
    return dtype


def dtype_meant(value: object) -> str | None:
    """The dtype that a name means elsewhere: "fp16", "bf16", "mixed_float16"."""
    name = re.search("(?i)(b?)f[a-z]*16$", str(value))
    return None if name is None else f"{name[1].lower()}float16"


def check_positive(name: str, scale: ArrayLike) -> jax.Array:
    """Returns one factor as an array; the value of a traced one is not checked."""
    if jnp.shape(scale) != ():
        raise ValueError(f"`{name}` must be one number, got shape {jnp.shape(scale)}.")
    factor = jnp.asarray(scale, jnp.float32)
    if not isinstance(factor, jax.core.Tracer) and not 0 < float(factor) < np.inf:
        raise ValueError(
            f"`{name}` must be positive and finite in float32, got {scale}."
        )
    return factor


def check_bounds(
    min_scale: ScaleBound, max_scale: ScaleBound, *, of_powers_of_two: bool = False
) -> Callable[[jax.Array], tuple[ArrayLike, ArrayLike]]:
    """Returns a function from the step count to the floor and the cap.

    Where a scheduled floor exceeds the cap, the cap wins. A scheduled value outside the
    range of loss scales is clipped to it; a scheduled NaN means no bound at that step.
    If scales are powers of two, fixed bounds must have one between them.
    """
    low = _check_bound("min_scale", min_scale)
    high = _check_bound("max_scale", max_scale)
    if isinstance(low, float) and isinstance(high, float):
        if low > high:
            raise ValueError(
                f"`min_scale` must be at most `max_scale`, got {low} and {high}. (Did "
                "you swap them?)"
            )
        power = 2.0 ** math.floor(math.log2(np.float32(high)))
        if of_powers_of_two and power < np.float32(low):
            raise ValueError(
                "`min_scale` and `max_scale` must have a power of two between them, "
                f"got {min_scale} and {max_scale}. (The scale is a power of two.)"
            )
        return lambda step_count: (low, high)

    def value_at(bound: ScaleBound, step_count: jax.Array, if_nan: float) -> jax.Array:
        value = bound(step_count) if callable(bound) else bound
        value = jnp.asarray(value, jnp.float32)
        value = jnp.where(jnp.isnan(value), if_nan, value)
        return jnp.clip(value, SMALLEST_SCALE, LARGEST_SCALE)

    def bounds(step_count: jax.Array) -> tuple[jax.Array, jax.Array]:
        cap = value_at(high, step_count, LARGEST_SCALE)
        return jnp.minimum(value_at(low, step_count, SMALLEST_SCALE), cap), cap

    return bounds


def _check_bound(name: str, value: ScaleBound) -> ScaleBound:
    if not callable(value):
        return check_scale(name, value)
    result = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
    if getattr(result, "shape", None) != ():
        raise ValueError(
            f"`{name}` must be a schedule that gives one number a step, got {result}."
        )
    return value


def check_count(name: str, value: int, minimum: int = 1) -> int:
    """Returns a number of steps that an `i32` can hold."""
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


def python_number(name: str, value: ArrayLike) -> float:
    """Returns a setting as a number of Python, an integer if it is whole."""
    check_concrete(name, value, "It is static. Give a Python number.")
    number = np.asarray(value).item()
    is_whole = isinstance(number, float) and number.is_integer()
    return int(number) if is_whole else number


def check_optimizer(
    name: str, inner: optax.GradientTransformation | optax.MultiSteps
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose `update` takes extra arguments."""
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` takes no extra arguments, its `update` does.
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    is_numpyro = hasattr(inner, "eval_and_update")
    if is_numpyro or not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"`{name}` must be an optimizer with `init` and `update`, got {inner!r} of "
            f"type {type(inner).__name__}. ({_optimizer_hint(inner)})"
        )
    return optax.with_extra_args_support(inner)


def _optimizer_hint(inner: object) -> str:
    if hasattr(inner, "adjust"):
        return "The rule comes second: `loss_scaled(optimizer, rule)`."
    if hasattr(inner, "eval_and_update"):
        return "NumPyro's optimizers are not Optax's. Write `optax.adam(1e-3)`."
    return "Call the factory: `optax.adam(1e-3)`."


def _one_float64(name: str, value: object) -> np.ndarray:
    number = _as_float64(name, value)
    if number.ndim != 0:
        raise TypeError(f"`{name}` must be one number, got shape {number.shape}.")
    return number


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


def _as_float64(name: str, value: object) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{name}` must be a concrete number, got {value!r}. (Settings are fixed "
            "when the program is traced.)"
        )
    array = _as_numpy(value)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (np.integer, np.floating)):
        raise TypeError(
            f"`{name}` must be a number, got {value!r:.60} of type "
            f"{type(value).__name__}."
        )
    return array.astype(np.float64)
