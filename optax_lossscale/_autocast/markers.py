"""Mark functions whose products `autocast` leaves as they are written.

`full_precision` puts them in a scope with a name that nobody else will use.
`low_precision` does the same, and casts the inputs before the function is traced. For
this it has to know, while it is traced, whether `autocast` traces it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.typing import DTypeLike

from optax_lossscale._autocast.context import context, traced_for
from optax_lossscale._autocast.programs import scopes_of
from optax_lossscale._ground.nnx import map_leaves
from optax_lossscale._ground.tree import are_same
from optax_lossscale._ground.types import PyTree

_FULL, _LOW = "optax_lossscale.full_precision", "optax_lossscale.low_precision"
_REASONS = {_FULL: "full_precision", _LOW: "low_precision"}


def full_precision(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Marks a function whose products run as they are written, also under `autocast`.

    Decorate the function, or call `full_precision(fun)(x)`.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/autocast.html

    Args:
      fun: Any function, such as a loss; as a decorator, also a method. Do not store the
        result in a model, in place of a layer: its parameters would not be trained.

    Returns:
      The same function inside a `jax.named_scope` that `autocast` recognizes.

    Raises:
      TypeError: If `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> dot = ols.autocast(lambda x: ols.full_precision(jnp.dot)(x, x))
      >>> dot(jnp.float32([256.0, 256.0]))  # Infinite in float16.
      Array(131072., dtype=float32)

    References:
      `to_float` of a MindSpore cell; `torch.autocast(enabled=False)` inside another.
    """
    marked: Callable[..., PyTree] = _marked(fun, _call_full)
    return marked


def low_precision(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Marks a function that takes arrays of the low dtype, such as a fused kernel.

    Decorate a function that refuses float32 or is faster without it: cuDNN's
    attention, a kernel of Pallas, a call by `jax.ffi`. Under `autocast` its float32
    inputs are cast to the low dtype before it is traced, its body runs as it is
    written, and its results in the low dtype are cast back to float32 if any input was
    cast. Outside of `autocast`, and inside `full_precision` or another
    `low_precision`, it is the function itself.

    * *Inputs* are all float32 arrays in the arguments, also in pytrees. Arrays to which
      `fun` is bound, or that it closes over, are not cast: pass them as arguments.
      Modules of `flax.nnx` and `flax.linen` pass through with their parameters. A
      number beyond the range becomes infinite, so pass a mask as booleans.
    * *Gradients* of inputs are computed in the low dtype and then cast to float32. So
      pass activations, and keep products with weights outside.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/autocast.html

    Args:
      fun: Any function; as a decorator, also a method.

    Returns:
      A function with the same signature.

    Raises:
      TypeError: If `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def kernel(x):
      ...     print(x.dtype)
      ...     return x * 2
      >>> ols.autocast(ols.low_precision(kernel))(jnp.ones(3))
      float16
      Array([2., 2., 2.], dtype=float32)

    References:
      `torch.amp.custom_fwd(cast_inputs=torch.float16)`.
    """
    marked: Callable[..., PyTree] = _marked(fun, _call_cast)
    return marked


def _marked(fun: Any, call: Callable[..., PyTree]) -> Any:
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_marked(fun.__func__, call))
    if isinstance(fun, type) or not callable(fun):
        hint = " (Mark a method of a class, or an object.)" if callable(fun) else ""
        raise TypeError(f"`fun` must be a function, got {fun!r}.{hint}")

    @functools.wraps(fun)
    def marked_fun(*args: Any, **kwargs: Any) -> PyTree:
        return call(fun, args, kwargs)

    return marked_fun


def _call_full(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    with jax.named_scope(_FULL), traced_for(None):
        return fun(*args, **kwargs)


def _call_cast(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    dtype = context.value.dtype
    # A backward rule is traced under the names of its function.
    names = [element.name for element in source_info_util.current_name_stack().stack]
    if dtype is None or any(name in _REASONS for name in names):
        return fun(*args, **kwargs)
    inputs = args, kwargs
    args, kwargs = cast_arrays(inputs, jnp.float32, dtype)
    with jax.named_scope(_LOW), traced_for(None):
        results = fun(*args, **kwargs)
    if are_same(*map(jax.tree.leaves, (inputs, (args, kwargs)))):
        return results  # Nothing was cast, so low results are as written.
    return cast_arrays(results, dtype, jnp.float32)


def cast_arrays(tree: PyTree, old: DTypeLike, new: DTypeLike) -> PyTree:
    """Casts the arrays of one dtype in a tree, but not those of `flax.nnx` modules."""
    return map_leaves(lambda leaf: cast_array(leaf, old, new), tree)


def cast_array(leaf: PyTree, old: DTypeLike, new: DTypeLike) -> PyTree:
    """Casts an array of one dtype; any other object is returned as it is."""
    is_old = isinstance(leaf, jax.Array | np.ndarray | np.generic) and leaf.dtype == old
    return lax.convert_element_type(leaf, new) if is_old else leaf


def reason_of_marker(equation: core.JaxprEqn) -> str | None:
    """The name of the function that marked an operation to be left as it is written."""
    scopes = scopes_of(equation)
    return next((_REASONS[scope] for scope in scopes if scope in _REASONS), None)
