"""Run a function that was written for float32 in float16 or bfloat16."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from optax_lossscale._autocast.interpreter import run
from optax_lossscale._autocast.nesting import FULL_PRECISION, NESTED_NAMES
from optax_lossscale._autocast.nnx import parts_of, states_of, update_modules
from optax_lossscale._autocast.notes import Note, add_note
from optax_lossscale._autocast.policy import Policy, make_policy
from optax_lossscale._autocast.values import Origin, Value, as_argument, as_declared
from optax_lossscale._normalization import in_normalization
from optax_lossscale._types import PyTree


def autocast(
    fun: Callable[..., PyTree],
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    low: Sequence[str] = (),
    high: Sequence[str] = (),
) -> Callable[..., PyTree]:
    """Runs a function that was written for float32 in a low dtype where that is safe.

    Wrap the loss or the model; differentiate, map and compile the result as you would
    the function itself. It is traced, and each operation is cast by its kind:

        matrix product, convolution          dtype
        exponential, logarithm, power, sum   float32; so are norms, softmax and losses
        other elementwise, comparison        its widest operand's dtype
        any other                            as it is written

    | level | |
    |---|---|
    | `"O0"` | `fun` itself |
    | `"O1"` | the above, as `torch.autocast` does |
    | `"O2"` | almost all in `dtype`, arguments too; normalization layers in float32 |
    | `"O3"` | almost all in `dtype` |

    **Details of O1.** A product of a value with itself, such as `y * y` or `y @ y` of
    one axis, is a square, and computed in float32; `y @ y.T` is a matrix product. A
    product with an array of equal numbers is a sum, and a contraction of size 1 is
    elementwise. An argument of one axis that is added to a product is its bias, and
    the sum has the dtype of the product. It may also be a mask: a sum beyond the range
    becomes the largest number of its sign, not infinite, and so it does if it is
    scaled, shifted or moved. A Python number widens nothing unless it
    lies outside the range of the dtype: `x + 1e-9` is computed in float32. Quotients
    and gathers are computed in float32 and then rounded, because their derivatives
    overflow or lose terms in float16; only a constant divided by a value stays in
    float32. If a float32 parameter is used several times, or read at each step of a
    loop, its gradient is summed in float32. Functions with their own derivative rules
    keep them. float64, complex, integer, bool and key arrays pass through. Loop carries
    and branch results keep their dtypes, and so do the results of the function. Nothing
    is scaled here: in float16, `loss_scaled` does that.

    **Details of O2 and O3.** Sums and powers are still computed in float32, and
    scalars, such as losses, stay in float32. So does `x + 1e-8`, or any other result of
    a number that lies outside the range of the dtype. Data are rounded too: beyond
    65504 they become infinite in products and end at 65504 in sums. Only differences
    from an argument, such as a target, stay in float32. The gradient of a float16
    value is rounded to float16, so that of `log(p + 1e-8)` may overflow at 0. To
    compute the whole loss function in float32, as MindSpore and apex do, wrap only the
    model in `autocast`. Normalization layers are recognized by the name of their
    class, their function or a `jax.named_scope`. Mark any other part that should stay
    in float32 with `full_precision`.

    Args:
      fun: A pure function of pytrees, usually a loss, written for float32. Arguments
        that are not arrays are static. It may change objects of `flax.nnx`.
      dtype: float16 or bfloat16.
      level: `"O0"`, `"O1"`, `"O2"` or `"O3"`.
      low: Names of further JAX primitives to run in `dtype`, such as `"cumsum"`. Where
        the backend cannot run them in `dtype`, they stay in float32, and
        `autocast_report` says so.
      high: Names of further JAX primitives to run in float32, such as `"tanh"`.

    Returns:
      A function with the signature of `fun` and results of the same dtypes.

    Raises:
      TypeError: If `fun` is not a function, or `dtype` is not floating.
      ValueError: If `dtype` is float8, or not narrower than float32; if the level is
        unknown; if a name in `low` or `high` is not that of a primitive. When the
        result is called, if `fun` changes an argument other than an object of
        `flax.nnx` in place.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def layer(w, x):
      ...     return jax.nn.softmax(x @ w)
      >>> w, x = jnp.ones((3, 2)), jnp.ones((1, 3))
      >>> ols.autocast(layer)(w, x)  # The product in float16, the softmax in float32.
      Array([[0.5, 0.5]], dtype=float32)

    References:
      https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference;
      https://nvidia.github.io/apex/amp.html#opt-levels; `amp_level` of
      `mindspore.amp.auto_mixed_precision`.
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.")
    policy = make_policy(dtype, level, low, high, nested=NESTED_NAMES)

    @functools.wraps(fun)
    def cast_fun(*args: Any, **kwargs: Any) -> PyTree:
        if level == "O0":
            add_note(fun, Note("any", "", "", "level O0", ""))
            return fun(*args, **kwargs)
        return _call(fun, policy, args, kwargs)

    return cast_fun


def full_precision(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Marks a function so that `autocast` leaves it alone, and it runs as written.

    Args:
      fun: Any function, such as a layer or a loss.

    Returns:
      The same function inside a `jax.named_scope` that autocast recognizes.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> dot = ols.autocast(lambda x: ols.full_precision(jnp.dot)(x, x))
      >>> dot(jnp.float32([256.0, 256.0]))  # Infinite in float16.
      Array(131072., dtype=float32)

    References:
      `to_float` of a MindSpore cell; `torch.autocast(enabled=False)` inside another.
    """

    @functools.wraps(fun)
    def full_fun(*args: Any, **kwargs: Any) -> PyTree:
        with jax.named_scope(FULL_PRECISION):
            return fun(*args, **kwargs)

    return full_fun


def _call(
    fun: Callable[..., PyTree], policy: Policy, args: PyTree, kwargs: PyTree
) -> PyTree:
    """Traces a call, and evaluates it with casts."""
    arrays, merge = partition((args, kwargs))

    def trace(*arrays: jax.Array) -> tuple[Partial, Partial]:
        args, kwargs = merge(arrays)
        parts = parts_of((args, kwargs))
        states_before, _ = partition(states_of((args, kwargs)))
        results, merge_results = partition(fun(*args, **kwargs))
        if not _are_same(parts, parts_of((args, kwargs))):
            raise ValueError(
                "`fun` must not change its arguments in place: under `autocast` the "
                "change would be lost. (Return the new value instead.)"
            )
        states, merge_states = partition(states_of((args, kwargs)))
        if _are_same(states, states_before):
            states = []
        # A `Partial` is a pytree of its arrays, with the function as static data.
        return Partial(merge_results, *results), Partial(merge_states, *states)

    closed, (results, states) = jax.make_jaxpr(trace, return_shape=True)(*arrays)
    inputs = _inputs((args, kwargs), arrays, policy)
    outputs = [value.array for value in run(closed, inputs, policy)]
    outputs = as_declared(closed.jaxpr.outvars, outputs)
    count = len(results.args)
    if states.args:
        update_modules((args, kwargs), states.func(outputs[count:]))
    return results.func(outputs[:count])


def _inputs(tree: PyTree, arrays: Sequence[Any], policy: Policy) -> list[Value]:
    """The arrays of a call as values; at O2 normalization parameters stay float32."""
    in_layers = itertools.compress(
        in_normalization(tree), map(_is_array, jax.tree.leaves(tree))
    )
    return [
        Value(array, Origin.COMPUTED)
        if in_layer and policy.level == "O2"
        else as_argument(array)
        for array, in_layer in zip(arrays, in_layers, strict=True)
    ]


def partition(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The arrays of a tree, and a function that puts other arrays in their places."""
    leaves, structure = jax.tree.flatten(tree)
    flags = [_is_array(leaf) for leaf in leaves]
    others = [None if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]

    def merge(arrays: Sequence[Any]) -> PyTree:
        given = iter(arrays)
        merged = [next(given) if f else x for x, f in zip(others, flags, strict=True)]
        return jax.tree.unflatten(structure, merged)

    arrays = itertools.compress(leaves, flags)
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays], merge


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(one is other for one, other in pairs)
