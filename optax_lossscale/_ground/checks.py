"""Checks of settings: each raises a clear error as soon as the setting is given."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._ground.types import PyTree

# Beyond 2**126 the reciprocal of a scale is subnormal. XLA flushes it to zero, and
# with it every gradient. Below 2**-126 the scale itself is subnormal.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def check_number(
    name: str, value: ArrayLike, low: float, high: float = np.inf
) -> float:
    """Returns a finite number from `low` to `high`."""
    number = _as_number(name, value)
    if not (np.isfinite(number) and low <= number <= high):
        upper = f" and at most {high:g}" if np.isfinite(high) else ""
        raise ValueError(
            f"`{name}` must be finite, at least {low:g}{upper}, got {value}."
        )
    return number


def check_scale(name: str, value: ArrayLike) -> float:
    """Returns one loss scale as a Python number."""
    scale = _as_number(name, value)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(
            f"`{name}` must be positive, finite, and from 2**-126 to 2**126, got "
            f"{value}. (Outside, the scale or its reciprocal is flushed to zero.)"
        )
    return scale


def check_factor(name: str, value: ArrayLike, low: float, high: float) -> float:
    """Returns a factor strictly between `low` and `high`, also in float32."""
    number = _as_number(name, value)
    with np.errstate(over="ignore"):
        in_float32 = float(np.float32(number))
    if not (low < in_float32 < high and in_float32 >= SMALLEST_SCALE):
        is_inverted = number != 0 and low < 1 / number < high
        hint = " (Did you pass its reciprocal?)" if is_inverted else ""
        raise ValueError(
            f"`{name}` must be strictly between {low:g} and {high:g} in float32, got "
            f"{value}.{hint}"
        )
    return number


def check_count(name: str, value: int, minimum: int = 1) -> int:
    """Returns a number of steps that an `i32` can hold."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{name}` must be an integer, got {shown(value)} of type "
            f"{type(value).__name__}."
        )
    if not minimum <= value <= np.iinfo(np.int32).max:
        raise ValueError(
            f"`{name}` must be at least {minimum} and below 2**31, got {value}. "
            "(It counts steps.)"
        )
    return int(value)


def check_flag(name: str, value: bool) -> bool:
    """Returns True or False, and refuses values that are merely truthy or falsy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{name}` must be True or False, got {shown(value)} of type "
            f"{type(value).__name__}."
        )
    return bool(value)


def check_bool(name: str, value: ArrayLike, meant: str) -> jax.Array:
    """Returns one bool as an array, which may be traced."""
    # Without this check a loss passed by mistake would count as True, even if NaN.
    is_bool = jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.bool_)
    if not is_bool or jnp.shape(value) != ():
        raise TypeError(
            f"`{name}` must be a bool, got {shown(value)}. (Did you mean `{meant}`?)"
        )
    return jnp.asarray(value)


def check_verdict(name: str, value: ArrayLike | None, meant: str) -> jax.Array:
    """Returns one bool as an array; True for None."""
    return jnp.asarray(True) if value is None else check_bool(name, value, meant)


def check_float_dtype(name: str, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Returns a floating dtype."""
    try:  # NumPy would read None as float64.
        is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # Not a dtype at all.
        is_floating = False
    if not is_floating:
        meant = _dtype_meant(dtype)
        hint = f" (Did you mean {meant}?)" if meant else ""
        raise TypeError(f"`{name}` must be a floating dtype, got {shown(dtype)}.{hint}")
    return dtype


def _dtype_meant(value: object) -> str | None:
    """The dtype that a name means elsewhere: "fp16", "bf16", "mixed_float16"."""
    name = re.search("(?i)(b?)f[a-z]*16$", str(value))
    return None if name is None else f"{name[1].lower()}float16"


def check_concrete(name: str, tree: PyTree, instead: str) -> None:
    """Refuses traced arrays, which have no values, and says what to do instead."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        raise TypeError(
            f"`{name}` must hold arrays with values, got traced ones, as inside `jit`. "
            f"({instead})"
        )


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
            f"`{name}` must be an optimizer with `init` and `update`, got one of type "
            f"{type(inner).__name__}. ({_optimizer_hint(inner)})"
        )
    return optax.with_extra_args_support(inner)


def _optimizer_hint(inner: object) -> str:
    if hasattr(inner, "adjust"):
        return "Are the arguments swapped? Write `loss_scaled(optimizer, rule)`."
    if hasattr(inner, "eval_and_update"):
        return "NumPyro's optimizers are not Optax's. Write `optax.adam(1e-3)`."
    if hasattr(inner, "opt_state"):
        return "Wrap its transformation, before the optimizer is made: `tx`."
    return "Call the factory: `optax.adam(1e-3)`."


def shown(value: object) -> str:
    """A value in a message, without the entries of an array."""
    shape = getattr(value, "shape", None)
    return f"{value!r:.60}" if shape is None else f"an array of shape {shape}"


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{name}` must be a concrete number, got {shown(value)}. (Settings are "
            "fixed when the program is traced.)"
        )
    is_bool = jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.bool_)
    is_number = isinstance(value, int | float | jax.Array | np.ndarray | np.generic)
    if is_bool or not is_number or np.shape(value):
        raise TypeError(
            f"`{name}` must be a number, got {shown(value)} of type "
            f"{type(value).__name__}."
        )
    return float(value)
