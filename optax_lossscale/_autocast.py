"""Run a function that was written for float32 in float16 or bfloat16."""

import collections
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from optax_lossscale._casting import (
    FULL_PRECISION,
    Origin,
    Value,
    argument,
    declared,
    is_cast,
)
from optax_lossscale._evaluator import run
from optax_lossscale._operations import Policy, make_policy
from optax_lossscale._precision import in_normalization
from optax_lossscale._state import PyTree


def autocast(
    fun: Callable[..., PyTree],
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    low: Sequence[str] = (),
    high: Sequence[str] = (),
) -> Callable[..., PyTree]:
    """Runs a function that was written for float32 in a low dtype where that is safe.

    The function is traced, and each operation cast by what it is:

        product of matrices, convolution     dtype; what adds a bias to it, too
        exponential, logarithm, power, sum   float32: so are norms, softmax and losses
        other elementwise, comparison        the widest of its operands
        all others                           as they are written

    A Python number widens nothing, unless the dtype cannot hold it: `x + 1e-9` is in
    float32. Functions with derivative rules of their own keep them. float64, complex,
    integer, bool and key arrays pass through. Loops carry, and branches give, what they
    did; results have the dtypes that they have without it. Nothing is scaled here: in
    float16, `loss_scaled` does that.

    | level | |
    |---|---|
    | `"O0"` | `fun` itself |
    | `"O1"` | the above, as `torch.autocast` |
    | `"O2"` | all in `dtype`, arguments too; normalization layers in float32 |
    | `"O3"` | all in `dtype` |

    At O2 and O3 sums are still added up in float32, and scalars, such as losses, stay
    there. A normalization layer is known by the name of its class, function or
    `jax.named_scope`. Mark what else shall stay with `full_precision`.

    Args:
      fun: A pure function of pytrees, usually a loss, written for float32. Arguments
        that are no arrays are static. Modules of `flax.nnx` may change.
      dtype: float16 or bfloat16.
      level: One of the above.
      low: More names of JAX primitives to run in `dtype`, such as `"cumsum"`. What this
        backend cannot run in it stays in float32; `autocast_report` says so.
      high: More to run in float32, such as `"tanh"`.

    Returns:
      A function with the signature of `fun`. It can be differentiated, mapped and
      compiled as `fun` can.

    Raises:
      TypeError: If `fun` is no function, or `dtype` is not floating.
      ValueError: If `dtype` is not narrower than float32, or is float8; the level is
        unknown; a name in `low` or `high` is no primitive's. When called, if `fun`
        changes an argument in place.

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
    policy = make_policy(dtype, level, low, high)
    if level == "O0":
        return fun

    @functools.wraps(fun)
    def cast_fun(*args: Any, **kwargs: Any) -> PyTree:
        return _call(fun, policy, args, kwargs)

    cast_fun.policy = policy  # type: ignore[attr-defined]
    return cast_fun


def full_precision(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Marks a function that `autocast` leaves alone: it runs as it is written.

    Args:
      fun: Any function, such as a layer or a loss.

    Returns:
      The same, in a `jax.named_scope` that autocast knows.

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


def autocast_report(fun: Callable[..., PyTree], *args: Any, **kwargs: Any) -> None:
    """Prints in what each operation computes under `autocast`, and why.

    Nothing is run. One line for all operations that agree in every column.

    Args:
      fun: What `autocast` returned, perhaps jitted; of any other function, what it
        would do with its defaults.
      *args: Its arguments; arrays, or `jax.ShapeDtypeStruct`.
      **kwargs: Its keyword arguments.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     return jnp.sum((x @ w) ** 2)
      >>> ols.autocast_report(loss_fn, jnp.ones((3, 2)), jnp.ones((1, 3)))
      times  operation    dtype    why           where
          1  dot_general  float16  low list      <doctest ...
          1  integer_pow  float32  float32 list  <doctest ...
          1  reduce_sum   float32  float32 list  <doctest ...
    """
    fun = inspect.unwrap(fun, stop=lambda function: hasattr(function, "policy"))
    policy = getattr(fun, "policy", None) or make_policy(jnp.float16, "O1", (), ())
    fun = inspect.unwrap(fun)
    notes: dict[int, tuple[str, ...]] = {}

    def note(equation: core.JaxprEqn, dtype: Any, why: str) -> None:
        atoms = [*filter(is_cast, equation.invars), *equation.outvars]
        result = jnp.dtype(dtype or getattr(atoms[0].aval, "dtype", None)).name
        where = source_info_util.summarize(equation.source_info).rsplit("/")[-1]
        notes[id(equation)] = (equation.primitive.name, result, why, where)

    arrays, merge = _partition((args, kwargs))
    policy = policy._replace(note=note)
    jax.eval_shape(lambda *arrays: _call(fun, policy, *merge(arrays)), *arrays)
    counts = collections.Counter(notes.values())
    rows = [(str(count), *row) for row, count in counts.items()]
    rows.insert(0, ("times", "operation", "dtype", "why", "where"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for times, *rest in rows:
        cells = [x.ljust(w) for x, w in zip(rest, widths[1:], strict=True)]
        print("  ".join([times.rjust(widths[0]), *cells]).rstrip())


def _call(
    fun: Callable[..., PyTree], policy: Policy, args: PyTree, kwargs: PyTree
) -> PyTree:
    """Traces a call, and evaluates it with casts."""
    arrays, merge = _partition((args, kwargs))
    merge_results, changed = merge, [False]

    def call_with_arrays(*arrays: jax.Array) -> list[jax.Array]:
        nonlocal merge_results, changed
        given = merge(arrays)
        results, merge_results = _partition(fun(*given[0], **given[1]))
        after, _ = _partition(given)
        changed = [old is not new for old, new in zip(arrays, after, strict=False)]
        _check_changes(len(arrays) - len(after), changed, (args, kwargs))
        return [
            *results,
            *(x for x, is_new in zip(after, changed, strict=True) if is_new),
        ]

    closed = jax.make_jaxpr(call_with_arrays)(*arrays)
    kept = [policy.level == "O2" and flag for flag in in_normalization((args, kwargs))]
    is_array = map(_is_array, jax.tree.leaves((args, kwargs)))
    inputs = [
        argument(array) if not keep else Value(array, Origin.COMPUTED)
        for array, keep in zip(arrays, itertools.compress(kept, is_array), strict=True)
    ]
    outputs = [value.array for value in run(closed, inputs, policy)]
    outputs = declared(closed.jaxpr.outvars, outputs)
    count = len(outputs) - sum(changed)
    if any(changed):
        new = iter(outputs[count:])
        updated = [next(new) if c else x for x, c in zip(arrays, changed, strict=True)]
        _update_modules((args, kwargs), merge(updated))
    return merge_results(outputs[:count])


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _partition(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The arrays of a tree, and what puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    flags = [_is_array(leaf) for leaf in leaves]
    others = [None if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]

    def merge(arrays: Sequence[Any]) -> PyTree:
        given = iter(arrays)
        merged = [next(given) if f else x for x, f in zip(others, flags, strict=True)]
        return jax.tree.unflatten(structure, merged)

    return list(itertools.compress(leaves, flags)), merge


def _is_module(node: object) -> bool:
    """Whether a node is one of `flax.nnx`, whose variables may be changed in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Module)


def _check_changes(missing: int, changed: Sequence[bool], tree: PyTree) -> None:
    """Raises if anything was changed in place that is not in a module."""
    in_module = [
        _is_module(node)
        for node in jax.tree.leaves(tree, is_leaf=_is_module)
        for _ in filter(_is_array, jax.tree.leaves(node))
    ]
    if missing or any(c and not m for c, m in zip(changed, in_module, strict=True)):
        raise ValueError(
            "`fun` must not change its arguments in place: under `autocast` the change "
            "would be lost. (Return what is new.)"
        )


def _update_modules(old: PyTree, new: PyTree) -> None:
    """Gives modules the variables that a call has changed in place."""
    old = jax.tree.leaves(old, is_leaf=_is_module)
    for module, updated in zip(
        old, jax.tree.leaves(new, is_leaf=_is_module), strict=True
    ):
        if _is_module(module):
            nnx = sys.modules["flax.nnx"]
            nnx.update(module, nnx.state(updated))
