"""Run the products of a function that was written for float32 in a low dtype."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast.levels import Settings, kept_leaves, make_settings
from optax_lossscale._autocast.markers import cast_arrays, traced_for
from optax_lossscale._autocast.modules import (
    are_initializing,
    as_partial,
    call_with_states,
    is_unbound,
    linen_scopes_of,
    trace,
    with_variables,
)
from optax_lossscale._autocast.rewrite import Found, evaluate, products_of
from optax_lossscale._named_calls import named_calls
from optax_lossscale._nnx import leaves_of
from optax_lossscale._types import PyTree

P = ParamSpec("P")
R = TypeVar("R")
# The products of each call of `autocast`, while `autocast_report` traces a function.
calls_of_autocast: contextvars.ContextVar[list[list[tuple[Found, Settings]]] | None]
calls_of_autocast = contextvars.ContextVar("calls_of_autocast", default=None)


@overload
def autocast(
    fun: Callable[P, R],
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    high: Sequence[str] = (),
    recompute: bool = True,
    otherwise: jax.typing.DTypeLike | None = None,
) -> Callable[P, R]: ...
@overload
def autocast(
    fun: None = None,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    high: Sequence[str] = (),
    recompute: bool = True,
    otherwise: jax.typing.DTypeLike | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def autocast(
    fun: Callable[..., Any] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    high: Sequence[str] = (),
    recompute: bool = True,
    otherwise: jax.typing.DTypeLike | None = None,
) -> Callable[..., Any]:
    """Mixed precision for a function: its products run in a low dtype, and only they.

    Matrix products and convolutions of float32 operands round these operands to
    `dtype`, the *low* dtype, and so do the products of their gradients. Every other
    operation, and every dtype that the function sees, stays as it is written. Wrap the
    loss or the model, or decorate it, and differentiate, map and compile the result as
    the function itself:

        loss_fn = ols.autocast(loss_fn)

    * *Left in float32* is a product that asks for it (`precision=HIGHEST`, as
      `jnp.linalg` does), one whose sums have a single term, a convolution that only
      moves entries, and what `high` or `full_precision` names. `autocast_report` lists
      all products and says why.
    * *Results* of products are rounded to `dtype` too, so float16 overflows at 65504.
    * *Gradients* of float32 operands are float32 sums, so nothing is lost in them.
      Small float16 cotangents become zero: use `loss_scaled`.
    * *Loops.* The body of a `lax.scan` saves its products, which are low, and what
      takes long to compute. Elementwise operations are computed again in the backward
      pass.
    * *Levels.* O0 is `fun` itself. O2 and O3 also trace `fun` with its float32
      arguments cast to `dtype`, so that activations, sums and gradients are low, as in
      a model cast by hand; float16 results become float32. Running statistics are not
      cast, and at O2 neither are the parameters of normalization layers.
    * *float8.* With `float8_e4m3fn`, products of two matrices with sizes that are
      multiples of 16 round their operands to 8 bits, each scaled by a power of two to
      its largest magnitude. All other products run in `otherwise`.
    * *Modules* of Flax and Equinox may be `fun` or arguments. `fun` may be a method.
      The result is a function without parameters: keep the module itself to train it.
    * *Tracing.* Outside of `jax.jit` the function is traced at each call.

    Args:
      fun: A pure function of pytrees, which may change Flax modules. Arguments that are
        not arrays are static. Without it, a decorator is returned.
      dtype: float16, bfloat16 or float8_e4m3fn.
      level: `"O0"`, `"O1"`, `"O2"` or `"O3"`.
      high: Scopes whose products stay as written, such as `"Net/Dense_0/"`: paths of
        modules, or names of `jax.named_scope`. Or lines: `"model.py:12 (loss_fn)"`.
      recompute: Whether loops compute cheap operations again, as said above.
      otherwise: With float8, the dtype of other products: bfloat16 (the default) or
        float16.

    Returns:
      A function with the signature of `fun` and results of the same dtypes.

    Raises:
      TypeError: If `fun` is not a function, or a dtype is not floating.
      ValueError: If a setting is unknown; when called, if a name in `high` has no
        product.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def layer(w, x):
      ...     return jax.nn.softmax(x @ w)
      >>> ols.autocast(layer)(jnp.ones((3, 2)), jnp.ones((1, 3)))
      Array([[0.5, 0.5]], dtype=float32)

    References:
      https://nvidia.github.io/apex/amp.html#opt-levels; `Float8CurrentScaling` of
      https://github.com/NVIDIA/TransformerEngine.
    """
    settings = make_settings(dtype, level, high, recompute, otherwise)
    decorate = functools.partial(_cast, settings=settings)
    return decorate if fun is None else decorate(fun)


def _cast(fun: Any, *, settings: Settings) -> Any:
    """The function with low products."""
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_cast(fun.__func__, settings=settings))
    _check_function(fun)

    @functools.wraps(fun)
    def cast_fun(*args: Any, **kwargs: Any) -> PyTree:
        if settings.level == "O0":
            calls = calls_of_autocast.get()
            if calls is not None:
                calls.append([])
            return fun(*args, **kwargs)
        tree = as_partial(fun), args, kwargs
        scopes = linen_scopes_of(fun, leaves_of(tree))
        if are_initializing(scopes):
            with traced_for(settings.dtype):
                return fun(*args, **kwargs)
        kept = kept_leaves(tree, settings) if settings.casts_arguments else None
        call: Callable[..., PyTree] = functools.partial(_call, settings, kept)
        if scopes:
            call = with_variables(scopes, call)
        return call_with_states(call, fun, args, kwargs)

    return cast_fun


def _call(
    settings: Settings,
    kept: Mapping[int, PyTree] | None,
    fun: Callable[..., PyTree],
    *args: PyTree,
) -> PyTree:
    """Returns `fun(*args)` with low products; with low arguments if `kept` is given."""
    if kept is None:
        return _call_low(settings, fun, *args)
    args = jax.tree.map(
        lambda x: x if id(x) in kept else cast_arrays(x, jnp.float32, settings.dtype),
        args,
    )
    try:
        results = _call_low(settings, fun, *args)
    except TypeError as error:
        error.add_note(
            f"`autocast` at level {settings.level} traced the function with "
            f"{settings.dtype} arguments, so a loop or a branch may mix "
            f"{settings.dtype} with float32. Cast the first carry (or the result of a "
            'branch) to one dtype, or use level "O1", which keeps every dtype as it is '
            "written."
        )
        raise
    return cast_arrays(results, settings.dtype, jnp.float32)


def _call_low(settings: Settings, fun: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Returns `fun(*args)` with low products."""
    calls = calls_of_autocast.get()
    reads_scopes = bool(settings.high) or calls is not None
    naming = named_calls() if reads_scopes else contextlib.nullcontext()
    with naming, traced_for(settings.dtype):
        traced = trace(fun, *args)
    if reads_scopes:
        found = list(products_of(traced.program.jaxpr, settings))
        equations = (each for x in found for each in (*x.calls, x.equation))
        settings.check_high({x.scope for x in found}, equations)
        if calls is not None:
            calls.append([(product, settings) for product in found])
    return evaluate(traced, settings.with_left())


def _check_function(fun: Any) -> None:
    """Refuses what only looks like a function, and says what was meant."""
    hint = ""
    if _is_dtype(fun):
        name = getattr(fun, "__name__", str(fun))
        hint = f" (Did you mean `autocast(dtype=jnp.{name})`?)"
    elif isinstance(fun, str):
        hint = f" (Did you mean `autocast(level={fun!r})`?)"
    elif isinstance(fun, type):
        hint = " (Decorate a method of the class, or pass one of its objects.)"
    elif not callable(fun) and hasattr(fun, "init"):
        hint = " (Decorate the loss function. For an optimizer: `loss_scaled`.)"
    elif not callable(fun):
        hint = " (Decorate the function itself: `autocast(loss_fn)(params, batch)`.)"
    elif is_unbound(fun):
        hint = " (A linen module is called by `apply`: `autocast(model.apply)`.)"
    if hint:
        shown = repr(fun) if isinstance(fun, type | str) else type(fun).__name__
        raise TypeError(f"`fun` must be a function, got {shown}.{hint}")


def _is_dtype(value: object) -> bool:
    if isinstance(value, type):
        dtype = getattr(value, "dtype", None)
        return issubclass(value, np.generic) or isinstance(dtype, np.dtype)
    is_name = isinstance(value, str) and value.startswith(("bfloat", "float"))
    return is_name or isinstance(value, np.dtype)
