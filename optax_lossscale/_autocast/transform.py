"""Run the products of a function that was written for float32 in a low dtype."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_lossscale._autocast.context import context, traced_for
from optax_lossscale._autocast.levels import Settings, are_kept, make_settings
from optax_lossscale._autocast.markers import cast_array
from optax_lossscale._autocast.modules import (
    are_initializing,
    as_partial,
    linen_scopes_of,
    trace_call,
)
from optax_lossscale._autocast.rewrite import evaluate, products_of
from optax_lossscale._ground.types import PyTree

P = ParamSpec("P")
R = TypeVar("R")


@overload
def autocast(
    fun: Callable[P, R],
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    high: Sequence[str] = (),
    recompute: bool = True,
) -> Callable[P, R]: ...
@overload
def autocast(
    fun: None = None,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    high: Sequence[str] = (),
    recompute: bool = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def autocast(
    fun: Callable[..., Any] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    high: Sequence[str] = (),
    recompute: bool = True,
) -> Callable[..., Any]:
    """Lets the matrix products and convolutions of a function run in half precision.

    Wrap the loss or the model, or decorate it, and differentiate, map and compile the
    result like the function itself:

        loss_fn = ols.autocast(loss_fn)

    Products of float32 operands round them to `dtype`, the *low* dtype, and so do the
    products of their gradients. Everything else stays as it is written.

    * *Some products stay in float32*: those that ask for it (`precision=HIGHEST`, as
      `jnp.linalg` does), those whose sums have a single term, inner products (neither
      factor has an axis of its own), and those that `high` or `full_precision` names.
      `autocast_report` lists all products and says why.
    * *Results* of products are rounded to `dtype` too, so float16 overflows at 65504.
    * *Gradients* of parameters are float32 sums. Those of what depends on the result of
      a low product are rounded as that result was, and small float16 ones become zero:
      use `loss_scaled`.
    * *Levels.* O0 is `fun` itself. O2 and O3 also trace `fun` with its float32
      arguments cast to `dtype`, as in a model cast by hand; float16 results become
      float32. Running statistics are not cast, and at O2 neither are the parameters of
      normalization layers.
    * *Modules* of Flax and Equinox may be `fun` or arguments. `fun` may be a method.
      The result is a function without parameters: keep the module itself to train it.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/autocast.html

    Args:
      fun: A pure function of pytrees, which may change Flax modules. Arguments that are
        not arrays of JAX, such as arrays of NumPy, reach it as they are (at O2 and O3
        float32 ones are cast). Without it, a decorator is returned.
      dtype: float16 or bfloat16.
      level: `"O0"`, `"O1"`, `"O2"` or `"O3"`.
      high: Scopes whose products stay as written, such as `"Net/Dense_0/"`: paths of
        Linen modules, or names of `jax.named_scope`. Or lines of products, such as
        `"model.py:12 (loss_fn)"`.
      recompute: Whether the body of a `lax.scan` saves, if that takes less memory, only
        its products and what is slow, and computes the rest again in the backward pass.

    Returns:
      A function with the signature of `fun` and results of the same dtypes; at O2 and
      O3 float16 results become float32. Outside `jax.jit` it is traced at each call.

    Raises:
      TypeError: If `fun` is not a function, or `dtype` is not floating.
      ValueError: If a setting is unknown; when called, if a name in `high` has no
        product.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def layer(w, x):
      ...     return jax.nn.softmax(x @ w)
      >>> ols.autocast(layer)(jnp.ones((3, 2)), jnp.ones((1, 3)))
      Array([[0.5, 0.5]], dtype=float32)

    References:
      https://nvidia.github.io/apex/amp.html#opt-levels
    """
    settings = make_settings(dtype, level, high, recompute)
    decorate = _Decorator(_decorated, settings=settings)
    return decorate if fun is None else decorate(fun)


class _Decorator(functools.partial[Any]):
    """What `autocast` returns without a function."""

    def __enter__(self) -> None:
        raise TypeError(
            "`autocast` is a decorator, not a context manager. (Wrap the function: "
            "`loss_fn = ols.autocast(loss_fn)`.)"
        )

    def __exit__(self, *_: object) -> None: ...


def _decorated(fun: Any, *, settings: Settings) -> Any:
    """The function with low products."""
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_decorated(fun.__func__, settings=settings))
    _check_function(fun)

    @functools.wraps(fun)
    def cast_fun(*args: Any, **kwargs: Any) -> PyTree:
        if context.value.is_off:
            return fun(*args, **kwargs)
        if settings.level == "O0":
            _record(None, settings)
            return fun(*args, **kwargs)
        tree = as_partial(fun), args, kwargs
        scopes = linen_scopes_of(tree)
        if are_initializing(scopes):
            with traced_for(settings.dtype):
                return fun(*args, **kwargs)
        with _explain_errors(settings):
            return _call_low(tree, scopes, settings)

    return cast_fun


def _call_low(tree: PyTree, scopes: Sequence[Any], settings: Settings) -> PyTree:
    """Traces a call, and evaluates its program with low products."""
    low = _lowered(tree, settings) if settings.casts_arguments else tree
    with traced_for(settings.dtype):
        traced = trace_call(tree, low, scopes)
    _record(traced.program.jaxpr, settings)
    if settings.high:
        found = list(products_of(traced.program.jaxpr, settings))
        equations = (each for x in found for each in (*x.calls, x.equation))
        settings.check_high({x.scope for x in found}, equations)
    results = evaluate(traced, settings)
    if settings.casts_arguments:
        results = _widened(results, tree, low, settings)
    return traced.finish(results)


def _record(program: core.Jaxpr | None, settings: Settings) -> None:
    if context.value.record is not None:
        context.value.record((program, settings))


def _lowered(tree: PyTree, settings: Settings) -> PyTree:
    """Function and arguments as O2 and O3 cast them."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = zip(leaves, are_kept(tree, settings), strict=True)
    cast = functools.partial(cast_array, old=jnp.float32, new=settings.dtype)
    return jax.tree.unflatten(structure, [x if kept else cast(x) for x, kept in pairs])


def _widened(
    results: list[jax.Array], tree: PyTree, low: PyTree, settings: Settings
) -> list[jax.Array]:
    """Results of O2 and O3: what is returned untouched is what was given."""
    given = dict(zip(map(id, jax.tree.leaves(low)), jax.tree.leaves(tree), strict=True))
    cast = functools.partial(cast_array, old=settings.dtype, new=jnp.float32)
    return [given[id(x)] if id(x) in given else cast(x) for x in results]


@contextlib.contextmanager
def _explain_errors(settings: Settings) -> Iterator[None]:
    """Adds to an error of JAX what `autocast` has to do with it."""
    try:
        yield
    except jax.errors.TracerArrayConversionError as error:
        error.add_note(
            "`autocast` traces the function. Outside `jit`, arrays of NumPy among its "
            "arguments stay arrays of NumPy, which a traced array cannot index. Pass "
            "arrays of JAX (`jax.tree.map(jnp.asarray, batch)`), or call it under "
            "`jax.jit`."
        )
        raise
    except jax.errors.UnexpectedTracerError as error:
        error.add_note(
            "`autocast` traces the function, and loses what it writes into objects "
            "that are not its arguments, such as a module of `flax.linen` in a "
            "closure. Return what it writes, pass modules as arguments, or wrap the "
            "model, such as `model.apply`, in place of the loss."
        )
        raise
    except (TypeError, ValueError) as error:
        if settings.casts_arguments and settings.dtype.name in str(error):
            error.add_note(
                f"`autocast` at level {settings.level} traced the function with "
                f"{settings.dtype} arguments in place of float32. If it mixes the two "
                "where JAX asks for one dtype (in an operation of `jax.lax`, the carry "
                "of a loop, the results of branches), cast one of them, or use level "
                '"O1", which keeps every dtype as it is written.'
            )
        raise


def _check_function(fun: Any) -> None:
    if isinstance(fun, type) or not callable(fun):
        shown = repr(fun) if isinstance(fun, type | str) else type(fun).__name__
        raise TypeError(
            f"`fun` must be a function, got {shown}. (Settings have names, as in "
            '`autocast(dtype=jnp.bfloat16, level="O2")`. Decorate the methods of a '
            "class.)"
        )
