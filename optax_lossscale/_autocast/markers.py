"""Mark functions that `autocast` leaves as they are written.

A function learns when it is traced whether `autocast` traces it, and for which dtype.
This is part of the keys of JAX's caches: a jitted function that was traced outside
`autocast` is traced again inside it, and the other way round.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import source_info_util

from optax_lossscale._autocast.values import Origin, Value, narrow, recomputed
from optax_lossscale._jaxprs import METADATA, evaluate, scopes_of
from optax_lossscale._nnx import flatten, is_state, is_variable
from optax_lossscale._types import PyTree

# Name scopes that no one else will use. The casts of `low_precision` have their own.
_FULL, _LOW = "optax_lossscale.full_precision", "optax_lossscale.low_precision"
_CAST = "optax_lossscale.low_precision.cast"
_REASONS = {_FULL: "full_precision", _LOW: "low_precision"}
_ARRAYS = (jax.Array, np.ndarray, np.generic)
# The low dtype for which `autocast` traces, or None.
_DTYPE: Any
if hasattr(jax, "make_user_context"):
    _DTYPE = jax.make_user_context(None)
else:  # JAX 0.7.
    _DTYPE = contextvars.ContextVar("autocast_dtype", default=None)


def full_precision(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Marks a function so that `autocast` leaves it alone, and it runs as written.

    Args:
      fun: Any function, such as a layer or a loss.

    Returns:
      The same function inside a `jax.named_scope` that autocast recognizes.

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

    Under `autocast` its float32 inputs are cast to the low dtype before it is traced,
    and its body runs as it is written. Use it for what refuses float32 or is faster
    without it: cuDNN's attention, kernels of Pallas, calls by `jax.ffi`. Outside
    `autocast` it is the function itself.

    * *Inputs* are all float32 arrays in the arguments, also in pytrees such as Equinox
      modules. Other arguments pass through, and so do modules of `flax.nnx` and
      `flax.linen` with their parameters. Arrays to which `fun` is bound, or that it
      closes over, are not cast either: pass them as arguments.
    * *Masks.* An argument of the function under `autocast`, or a number such as -1e9,
      that is beyond the range of the low dtype becomes the largest number of its sign
      instead of infinite. Other inputs become infinite.
    * *Results* in the low dtype count as float32 again, as those of a product do, if
      an input was cast. The next product reads them without a cast. Results of other
      dtypes keep them.
    * *Gradients* of inputs are cast to float32 after `fun` has computed them in the low
      dtype. So pass it activations, and keep products with weights outside.
    * *Inside* `full_precision`, or another `low_precision`, it does nothing: their
      bodies run as they are written.

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
    marked: Callable[..., PyTree] = _marked(fun, _call_low)
    return marked


def _marked(fun: Any, call: Callable[..., PyTree]) -> Any:
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_marked(fun.__func__, call))
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.")

    @functools.wraps(fun)
    def marked_fun(*args: Any, **kwargs: Any) -> PyTree:
        return call(fun, args, kwargs)

    return marked_fun


def _call_full(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    with jax.named_scope(_FULL), tracing_for(None):
        return fun(*args, **kwargs)


def _call_low(fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    dtype = _traced_for()
    # The backward pass traces a derivative rule under the names of its function.
    names = [element.name for element in source_info_util.current_name_stack().stack]
    if dtype is None or any(name in _REASONS for name in names):
        return fun(*args, **kwargs)
    low = {name: _cast_arrays(x, jnp.float32, dtype) for name, x in kwargs.items()}
    in_order = [_cast_arrays(x, jnp.float32, dtype) for x in args]
    with jax.named_scope(_LOW), tracing_for(None):
        results = fun(
            *(x for x, _ in in_order), **{name: x for name, (x, _) in low.items()}
        )
    if any(is_cast for _, is_cast in [*in_order, *low.values()]):
        results, _ = _cast_arrays(results, dtype, jnp.float32)
    return results


def _cast_arrays(tree: PyTree, old: Any, new: Any) -> tuple[PyTree, bool]:
    """Casts the arrays of one dtype in a tree; also returns whether there are any.

    A tree without such arrays stays the same object.
    """
    found = []

    def to_new(leaf: Any) -> Any:
        if is_state(leaf) or is_variable(leaf):
            return jax.tree.map(to_new, leaf, is_leaf=lambda node: node is not leaf)
        if not (isinstance(leaf, _ARRAYS) and leaf.dtype == old):
            return leaf
        found.append(leaf)
        if isinstance(leaf, jax.Array):
            return lax.convert_element_type(leaf, new)
        return _cast_constant(leaf, jnp.dtype(new))

    leaves, structure = flatten(tree)
    with jax.named_scope(_CAST):
        leaves = [to_new(leaf) for leaf in leaves]
    return structure.unflatten(leaves) if found else tree, bool(found)


def _cast_constant(constant: Any, dtype: Any) -> Any:
    """Casts an array of NumPy, which stays one; large finite numbers stay finite."""
    limit, wide = float(jnp.finfo(dtype).max), np.asarray(constant, np.float32)
    inside = np.where(np.isfinite(wide), np.clip(wide, -limit, limit), wide)
    return inside.astype(dtype)[()]


def cast_at_marker(equation: Any, operands: Sequence[Value], low: Any) -> Value | None:
    """The result of a cast to or from the low dtype that `low_precision` made.

    None for any other operation. What is cast back stays low, as a product's result.
    """
    name = equation.primitive.name
    if name != "convert_element_type" or _CAST not in scopes_of(equation):
        return None
    old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    value = operands[0]
    if (old, new) == (low, jnp.float32):
        return recomputed(value, value.array, Origin.PRODUCT)
    if (old, new) == (jnp.float32, low):
        # A number such as -1e9 may be a mask, which must stay finite.
        is_wide = value.origin is Origin.WIDE
        value = value._replace(origin=Origin.SATURATED) if is_wide else value
        return recomputed(value, narrow(value, low), Origin.COMPUTED)
    return None


def reason_of_marker(equation: Any) -> str | None:
    """The name of the function that marked an operation to be left as it is written."""
    scopes = scopes_of(equation)
    return next((_REASONS[scope] for scope in scopes if scope in _REASONS), None)


def is_refused_on_cpu(equation: Any) -> bool:
    """Whether `low_precision` marked a product whose algorithm a CPU does not have.

    `jax.nn.dot_product_attention` names one for float16. Where it computes, it catches
    the error of a CPU. Where it is traced, the error would come later.
    """
    algorithm = equation.params.get("precision")
    return (
        isinstance(algorithm, lax.DotAlgorithm | lax.DotAlgorithmPreset)
        and reason_of_marker(equation) == _REASONS[_LOW]
        and jax.default_backend() == "cpu"
        and not _runs(algorithm)
    )


@functools.cache
def _runs(algorithm: lax.DotAlgorithm | lax.DotAlgorithmPreset) -> bool:
    vector = jax.ShapeDtypeStruct((1,), jnp.float16)
    try:
        jax.jit(functools.partial(jnp.dot, precision=algorithm)).lower(vector, vector)
    except ValueError:
        return False
    return True


def evaluate_without_algorithm(equation: Any, arrays: Sequence[Any]) -> Sequence[Any]:
    """Computes a product; on a CPU by the default algorithm, elsewhere as written."""
    without = {**equation.params, "precision": None}
    outputs: Sequence[Any] = lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: evaluate(equation, arrays, without),
        default=lambda *arrays: evaluate(equation, arrays),
    )
    return outputs


@contextlib.contextmanager
def tracing_for(dtype: Any) -> Iterator[None]:
    """What is traced inside the `with` block is traced by `autocast` for a dtype.

    For None, it is left as it is written.
    """
    if dtype == _traced_for():
        yield
    elif not isinstance(_DTYPE, contextvars.ContextVar):
        with _DTYPE(dtype):
            yield
    else:  # These metadata are part of the keys of caches. None removes them.
        token = _DTYPE.set(dtype)
        try:
            with set_xla_metadata(**{METADATA: dtype and str(dtype)}):
                yield
        finally:
            _DTYPE.reset(token)


def _traced_for() -> Any:
    """The low dtype for which `autocast` traces, or None."""
    is_variable = isinstance(_DTYPE, contextvars.ContextVar)
    return _DTYPE.get() if is_variable else _DTYPE.value
