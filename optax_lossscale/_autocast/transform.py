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
from jax.extend import source_info_util

from optax_lossscale._autocast.choice import FULL_PRECISION, Choice
from optax_lossscale._autocast.interpreter import NOTE, run
from optax_lossscale._autocast.policy import Policy, make_policy
from optax_lossscale._autocast.values import Origin, Value, argument, declared, is_cast
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

    The function is traced, and each operation cast by what it is:

        product of matrices, convolution     dtype
        exponential, logarithm, power, sum   float32: so are norms, softmax and losses
        other elementwise, comparison        the widest of its operands
        all others                           as they are written

    An argument of one axis that is added to a product is its bias, and the sum has the
    product's dtype. A Python number widens nothing, unless it is out of the dtype's
    range: `x + 1e-9` is in float32. Quotients and gathers are computed in float32 and
    then rounded, as their derivatives overflow or lose terms in float16. The gradient
    of a float32 parameter that is used several times, and of all that a loop reads at
    each step, is summed in float32. Functions with derivative rules of their own keep
    them. float64, complex, integer, bool and key arrays pass through. Loops carry, and
    branches give, what they did; results have the dtypes that they have without it.
    Nothing is scaled here: in float16, `loss_scaled` does that.

    | level | |
    |---|---|
    | `"O0"` | `fun` itself |
    | `"O1"` | the above, as `torch.autocast` |
    | `"O2"` | all in `dtype`, arguments too; normalization layers in float32 |
    | `"O3"` | all in `dtype` |

    At O2 and O3 sums are still added up in float32, and scalars, such as losses, stay
    there. What goes with the data is rounded too: targets beyond 65504 become infinite.
    Autocast the model, not the loss, and the loss stays in float32, as it does in
    MindSpore and apex. A normalization layer is known by the name of its class, of its
    function or of a `jax.named_scope`. Mark what else shall stay with `full_precision`.

    Args:
      fun: A pure function of pytrees, usually a loss, written for float32. Arguments
        that are no arrays are static. Objects of `flax.nnx` may be changed in it.
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

    @functools.wraps(fun)
    def cast_fun(*args: Any, **kwargs: Any) -> PyTree:
        if level == "O0":
            NOTE.get()(None, None)
            return fun(*args, **kwargs)
        return _call(fun, policy, args, kwargs)

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
    notes: dict[int, tuple[str, ...]] = {}

    def note(equation: Any, choice: Choice | None) -> None:
        if choice is None:
            notes[0] = ("any", "", "level O0", "")
            return
        atoms = [*filter(is_cast, equation.invars), *equation.outvars]
        dtype = jnp.dtype(choice.dtype or getattr(atoms[0].aval, "dtype", None)).name
        where = source_info_util.summarize(equation.source_info).rsplit("/")[-1]
        notes[id(equation)] = (equation.primitive.name, dtype, choice.why, where)

    while isinstance(fun, jax.stages.Wrapped):  # What is jitted may be traced already.
        fun = inspect.getattr_static(fun, "__wrapped__")
    arrays, merge = _partition((args, kwargs))

    def call(fun: Callable[..., PyTree]) -> Callable[..., list[Any]]:
        def call_with(*arrays: jax.Array) -> list[Any]:
            args, kwargs = merge(arrays)
            return _partition(fun(*args, **kwargs))[0]

        return call_with

    token = NOTE.set(note)
    try:
        jax.eval_shape(call(fun), *arrays)
        if not notes:
            jax.eval_shape(call(autocast(fun)), *arrays)
    finally:
        NOTE.reset(token)
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
    merge_results = merge_states = merge
    count = 0

    def call_with_arrays(*arrays: jax.Array) -> list[jax.Array]:
        nonlocal merge_results, merge_states, count
        given = merge(arrays)
        before = _parts(given)
        states_before, _ = _partition(_states_of(given))
        results, merge_results = _partition(fun(*given[0], **given[1]))
        if not _are_same(before, _parts(given)):
            raise ValueError(
                "`fun` must not change its arguments in place: under `autocast` the "
                "change would be lost. (Return what is new.)"
            )
        states, merge_states = _partition(_states_of(given))
        count = len(results)
        return [*results, *([] if _are_same(states, states_before) else states)]

    closed = jax.make_jaxpr(call_with_arrays)(*arrays)
    is_array = map(_is_array, jax.tree.leaves((args, kwargs)))
    kept = itertools.compress(in_normalization((args, kwargs)), is_array)
    inputs = [
        Value(array, Origin.COMPUTED)
        if is_kept and policy.level == "O2"
        else argument(array)
        for array, is_kept in zip(arrays, kept, strict=True)
    ]
    outputs = [value.array for value in run(closed, inputs, policy)]
    outputs = declared(closed.jaxpr.outvars, outputs)
    if outputs[count:]:
        modules = filter(_is_module, _parts((args, kwargs)))
        for module, state in zip(modules, merge_states(outputs[count:]), strict=True):
            sys.modules["flax.nnx"].update(module, state)
    return merge_results(outputs[:count])


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _partition(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The arrays of a tree, and what puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    flags = [_is_array(leaf) for leaf in leaves]
    others = [None if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]

    def merge(arrays: Sequence[Any]) -> PyTree:
        given = iter(arrays)
        merged = [next(given) if f else x for x, f in zip(others, flags, strict=True)]
        return jax.tree.unflatten(structure, merged)

    arrays = itertools.compress(leaves, flags)
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays], merge


# Objects of `flax.nnx` may be changed in place; nothing else may.


def _is_module(node: object) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, getattr(nnx, "Pytree", nnx.Module))


def _is_state(node: object) -> bool:
    """Whether a node is a state of nnx, of which `nnx.merge` makes modules."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)


def _parts(tree: PyTree) -> list[Any]:
    """The leaves of a tree, modules as leaves, states left out."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: _is_module(x) or _is_state(x))
    return [leaf for leaf in leaves if not _is_state(leaf)]


def _states_of(tree: PyTree) -> list[PyTree]:
    modules = filter(_is_module, _parts(tree))
    return [sys.modules["flax.nnx"].state(module) for module in modules]


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(one is other for one, other in pairs)
