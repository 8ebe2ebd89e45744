"""Run a function that was written for float32 in float16 or bfloat16."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.tree_util import Partial

from optax_lossscale._autocast.arguments import (
    Rest,
    call_unchanged,
    partition,
)
from optax_lossscale._autocast.eager import compile_once
from optax_lossscale._autocast.interpreter import run
from optax_lossscale._autocast.markers import tracing_for
from optax_lossscale._autocast.modules import as_partial, call_with_states
from optax_lossscale._autocast.named_calls import named_calls
from optax_lossscale._autocast.nesting import NESTED_NAMES
from optax_lossscale._autocast.notes import (
    Caller,
    Note,
    add_note,
    is_collecting,
    note_call,
    without_notes,
)
from optax_lossscale._autocast.policy import Policy, make_policy
from optax_lossscale._autocast.reads import MayChangeError, is_immutable, is_plain
from optax_lossscale._autocast.scopes import (
    are_initializing,
    call_with_variables,
    scopes_of,
)
from optax_lossscale._autocast.values import Origin, as_argument, as_declared
from optax_lossscale._jaxprs import all_scopes_of
from optax_lossscale._nnx import is_module, leaves_of, one_of_each
from optax_lossscale._normalization import in_normalization
from optax_lossscale._types import PyTree

P = ParamSpec("P")
R = TypeVar("R")


@overload
def autocast(
    fun: Callable[P, R],
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    low: Sequence[str] = (),
    high: Sequence[str] = (),
    also: jax.typing.DTypeLike | None = None,
    keep: Callable[[str], bool] | None = None,
) -> Callable[P, R]: ...
@overload
def autocast(
    fun: None = None,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    low: Sequence[str] = (),
    high: Sequence[str] = (),
    also: jax.typing.DTypeLike | None = None,
    keep: Callable[[str], bool] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def autocast(
    fun: Callable[..., Any] | None = None,
    dtype: jax.typing.DTypeLike = jnp.float16,
    *,
    level: str = "O1",
    low: Sequence[str] = (),
    high: Sequence[str] = (),
    also: jax.typing.DTypeLike | None = None,
    keep: Callable[[str], bool] | None = None,
) -> Callable[..., Any]:
    """Runs a function that was written for float32 in a low dtype where that is safe.

    Wrap the loss or the model, or decorate it: `@autocast` or `@autocast(level="O2")`.
    Differentiate, map and compile the result as you would the function itself. It is
    traced, and each operation is cast by its kind:

    | operation | is computed in |
    |---|---|
    | matrix product, convolution | `dtype` |
    | exponential, logarithm, power, sum (also in norms, softmax, losses) | float32 |
    | other elementwise operation, comparison | its widest operand's dtype |
    | any other | the dtype in which it is written |

    `level` says how far this goes:

    | level | meaning |
    |---|---|
    | `"O0"` | `fun` itself |
    | `"O1"` | the table above, as `torch.autocast` does |
    | `"O2"` | almost all in `dtype`, arguments too; normalization layers in float32 |
    | `"O3"` | almost all in `dtype` |

    **Details of O1.**

    * *Squares.* A product of a value with itself, such as `y * y`, or `y @ y` of one
      axis, is computed in float32. `y @ y.T` is a matrix product.
    * *Sums.* A matrix product with a vector of equal numbers is a sum, and a
      contraction of size 1 is elementwise; both are computed in float32.
    * *Biases and masks.* An argument of one axis that is added to a product is its
      bias. The sum is computed in float32 and rounded. The argument may also be a mask:
      a sum beyond the range, and what is scaled, shifted or moved after it, becomes the
      largest number of its sign instead of infinite.
    * *Python numbers* widen nothing unless they lie outside the range of the dtype:
      `x + 1e-9` is computed in float32.
    * *Quotients and gathers* are computed in float32 and then rounded, because their
      derivatives overflow or lose terms in float16. A constant divided by a value stays
      in float32.
    * *Gradients* of float32 parameters are float32 sums. The product that gives one has
      operands in the low dtype and a float32 result, and this result is summed over
      devices, over the steps of a loop and over several uses of a parameter. The same
      holds for a weight that is computed from parameters without a product, a loop or
      a branch, such as `w / norm(w)`. There is one exception. GPUs have no convolution
      with a float32 result; if a sharded `jit` distributes one over several GPUs, its
      weight gradient is summed over them in the low dtype. (Inside `pmap` and
      `shard_map` it is summed in float32.)
    * *Dtypes.* Only float32 arrays are cast. An array that your code casts to float16
      stays float16, even in an exponential. float64, complex, integer, bool and key
      arrays pass through. Loop carries and branch results keep their dtypes, and so do
      the results of the function.
    * *Functions with their own derivative rules* keep these rules.
    * *Rounding.* If a rounded value is read in float32 in the same program, XLA for GPU
      may leave out the rounding. The value is then more precise.
    * *Scaling.* Nothing is scaled here: in float16, `loss_scaled` does that.

    **Details of O2 and O3.** These stay in float32: sums, powers, scalars such as
    losses, differences from an argument such as a target, and results of a number
    outside the range of the dtype, such as `x + 1e-8`. Data are rounded too: beyond
    65504 they become infinite in products, and end at 65504 in sums. The gradient of a
    float16 value is rounded to float16, so that of `log(p + 1e-8)` may overflow at 0.
    The gradient of a weight that is computed from parameters, even as `-w`, is rounded
    as well.
    To compute the whole loss function in float32, as MindSpore and apex do, wrap only
    the model in `autocast`. Normalization layers are recognized by the name of their
    class, their function or a `jax.named_scope`. Mark any other part that should stay
    in float32 with `full_precision`.

    **Fused kernels** are chosen when a function is traced, in float32. Mark one that
    needs low inputs, such as cuDNN's attention, with `low_precision`.

    **float8** (experimental: it has not run on a GPU yet). With `float8_e4m3fn` all is
    as with bfloat16, but matrix products round their operands to 8 bits. Each operand
    is scaled by a power of two, so that its largest magnitude just fits, and the result
    is scaled back. The products of the backward pass do the same: the cotangent is
    rounded to `float8_e5m2`, and the gradient of a float32 weight is still a float32
    sum. Nothing has to be stored between steps, and no loss scale is needed.

    * *Which products.* Those that have a parameter as a factor, or anything else that
      is computed from arguments without a product. In the product of `m x k` with
      `k x n`, all three sizes must be multiples of 16. Convolutions, the products of
      attention and all others are computed in bfloat16; `autocast_report` says why.
    * *NaN and infinities* in an operand become NaN where they are read. Finite numbers
      stay finite, unless the largest magnitudes of both factors multiply to more than
      about 1e43. Below about 1e-31 the product is zero.
    * *One scale for each array.* An entry that is about `2**18` times as large as the
      others rounds them all to zero. Under `vmap` the whole batch has one scale, and a
      product that had no batch when `fun` was traced may not qualify: wrap the function
      that calls `vmap`. Under `pmap` and `shard_map` each device has its own.
    * *Hardware.* NVIDIA GPUs from compute capability 8.9 on (Ada, Hopper, Blackwell)
      multiply float8. Elsewhere XLA multiplies the rounded numbers in a wider dtype,
      which gives the same results, and takes longer than bfloat16.

    **Modules.** `fun` may be a module or a method of one, in its class or bound. If a
    call changes a module of `flax.nnx` or a bound module of `flax.linen`, such as its
    batch statistics or dropout counts, the change reaches that module. For this an NNX
    module must be an argument, be `fun` itself or be bound to `fun`, for example by
    `functools.partial`; a change of any other NNX module raises an error. While a linen
    module makes its parameters, nothing is cast.

    **Outside `jit`** the function is traced at each call, because what it reads may
    have changed. It is compiled once instead if it reads only its arguments, numbers,
    arrays and functions of JAX, or of your own that do the same, and if the arguments
    are arrays and constants in dicts, lists and tuples.

    Args:
      fun: A pure function of pytrees, usually a loss, written for float32. Arguments
        that are not arrays are static. It may change modules, as said above. Without
        it, a decorator with the other settings is returned.
      dtype: float16, bfloat16 or float8_e4m3fn.
      level: `"O0"`, `"O1"`, `"O2"` or `"O3"`.
      low: Names of further JAX primitives to run in `dtype`, such as `"cumsum"`. Where
        the backend cannot run them in `dtype`, they stay in float32, and
        `autocast_report` says so.
      high: What else to run in float32: names of JAX primitives, such as `"tanh"`, and
        of scopes, which end with `/`, such as `"Net/Dense_0/"`. A scope is the path of
        a module, or a `jax.named_scope`; `diagnostics.trace_operations` lists them, and
        `diagnostics.suggest_full_precision` returns such names.
      also: With float8, the dtype of what is not computed in float8: bfloat16, which is
        the default, or float16, which needs `loss_scaled`.
      keep: With float8, `keep(scope) -> bool` says of each scope, such as
        `"Net/Dense_0"`, whether its products stay in `also`, as those of a model's
        first and last layers should. It is asked for each product that could be in
        float8.

    Returns:
      A function with the signature of `fun` and results of the same dtypes; without
      `fun`, a decorator that makes one.

    Raises:
      TypeError: If `fun` is not a function, such as a class or a dtype, if `dtype` or
        `also` is not floating, or if `keep` is not a function of True or False.
      ValueError: If `dtype` is another float8 dtype, or not narrower than float32; if
        `also` is neither float16 nor bfloat16; if `also` or `keep` is given without
        float8; if the level is unknown; if a name in `low` or `high` is not that of a
        primitive. When the result is called, if no operation is in a scope that `high`
        names; if `fun` changes an argument in place that is not a module, or a module
        of `flax.nnx` that is not an argument.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def layer(w, x):
      ...     return jax.nn.softmax(x @ w)
      >>> w, x = jnp.ones((3, 2)), jnp.ones((1, 3))
      >>> ols.autocast(layer)(w, x)  # The product in float16, the softmax in float32.
      Array([[0.5, 0.5]], dtype=float32)

      In float8, a number between two neighbours is rounded to the nearer one.

      >>> w, x = jnp.ones((16, 16)), jnp.full((16, 16), 17.0)
      >>> ols.autocast(jnp.dot, jnp.float8_e4m3fn)(x, w)[0, 0]  # 17 becomes 16.
      Array(256., dtype=float32)

    References:
      https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference;
      https://nvidia.github.io/apex/amp.html#opt-levels; `amp_level` of
      `mindspore.amp.auto_mixed_precision`; `Float8CurrentScaling` of
      https://github.com/NVIDIA/TransformerEngine; for `keep`, `module_filter_fn` of
      https://github.com/pytorch/ao/tree/main/torchao/float8.
    """
    policy = make_policy(dtype, level, low, high, also, keep, nested=NESTED_NAMES)

    def decorate(fun: Callable[..., Any]) -> Any:
        cast_fun = _cast(fun, policy=policy)
        if isinstance(cast_fun, types.FunctionType):
            settings: Any = {"level": level, "low": low, "also": also, "keep": keep}
            again = functools.partial(autocast, fun, dtype, **settings)
            # A wrapper may copy the attributes of the function, and so needs its own.
            cast_fun.autocast = Again(  # type: ignore[attr-defined]
                id(cast_fun), lambda more: again(high=[*high, *more])
            )
        return cast_fun

    return decorate if fun is None else decorate(fun)


class Again(NamedTuple):
    """How to make a function that `autocast` returned once more.

    Attributes:
      function_id: The identity of that function.
      with_high: Makes the same with more names in `high`.
    """

    function_id: int
    with_high: Callable[[Sequence[str]], Callable[..., Any]]


def _cast(fun: Any, *, policy: Policy) -> Any:
    """The function that evaluates `fun` with casts."""
    if isinstance(fun, staticmethod | classmethod):
        return type(fun)(_cast(fun.__func__, policy=policy))
    _check_function(fun)

    @functools.wraps(fun)
    def cast_fun(*args: Any, **kwargs: Any) -> PyTree:
        if not policy.reads_scopes:
            return call_cast(*args, **kwargs)
        with named_calls(fun, (args, kwargs)):
            return call_cast(*args, **kwargs)

    def call_cast(*args: Any, **kwargs: Any) -> PyTree:
        note_call()
        if policy.level == "O0":
            add_note(Caller(()), fun, Note("any", "-", "-", "level O0", ""))
            return fun(*args, **kwargs)
        tree = (as_partial(fun), args, kwargs)
        leaves = leaves_of(tree)
        scopes = scopes_of(fun, leaves)
        if are_initializing(scopes):
            with tracing_for(policy.dtype):
                return fun(*args, **kwargs)
        kinds = one_of_each(leaves)
        has_modules = any(map(is_module, kinds))
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in kinds)
        must_trace = is_traced or is_collecting() or policy.keep is not None
        if not (has_modules or scopes or must_trace):
            results = _call_compiled(policy, fun, args, kwargs)
            if results is not None:
                return results.func(*results.args)
        call = functools.partial(_call, policy)
        if has_modules:
            in_layers = functools.partial(_in_layers_of, tree)
            call = functools.partial(call, in_layers=in_layers)
        if scopes:
            call = functools.partial(call_with_variables, call, scopes)
        if has_modules:
            is_update = not is_collecting()
            return call_with_states(call, fun, args, kwargs, is_update=is_update)
        return call(fun, args, kwargs)

    return cast_fun


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
    if hint or not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.{hint}")


def _is_dtype(value: Any) -> bool:
    if isinstance(value, type):
        dtype = getattr(value, "dtype", None)
        return issubclass(value, np.generic) or isinstance(dtype, np.dtype)
    is_name = isinstance(value, str) and value.startswith(("bfloat", "float"))
    return is_name or isinstance(value, np.dtype)


def _call_compiled(
    policy: Policy, fun: Callable[..., PyTree], args: PyTree, kwargs: PyTree
) -> Partial | None:
    """The results of `_call` from a program compiled once, or None if there is none."""
    arrays, rest = partition((args, kwargs))
    if not _is_concrete(arrays, rest):
        return None
    call = functools.partial(_call_for_arrays, policy)
    # 1, 1.0 and True are equal, but may give other results.
    compiled = compile_once(fun, policy, call, (rest, repr(rest.others)))
    with contextlib.suppress(MayChangeError):
        return None if compiled is None else compiled(*arrays)
    return None


def _call_for_arrays(
    policy: Policy,
    fun: Callable[..., PyTree],
    static: tuple[Rest, str],
    captured: Sequence[tuple[Any, Any]],
    *arrays: Any,
) -> Partial:
    """The same as `_call`, with the arrays of its arguments and results apart."""
    args, kwargs = static[0].merge(arrays)
    results, rest = partition(_call(policy, fun, args, kwargs, captured=captured))
    if not is_plain(rest.structure) or not all(map(is_immutable, rest.others)):
        raise MayChangeError  # Every call would give the same object, such as a set.
    return Partial(rest.merge, results)


def _call(
    policy: Policy,
    fun: Callable[..., PyTree],
    args: PyTree,
    kwargs: PyTree,
    *,
    in_layers: Callable[[PyTree], list[bool]] = in_normalization,
    captured: Sequence[tuple[Any, Any]] = (),
) -> PyTree:
    """Traces a call, and evaluates it with casts.

    `in_layers` says for each leaf whether it belongs to a normalization layer.
    `captured` holds constant arrays of the program, and what to read in their place.
    """
    arrays, rest = partition((args, kwargs))

    @without_notes()
    def trace(*arrays: jax.Array) -> Partial:
        with tracing_for(policy.dtype):
            results = call_unchanged(fun, *rest.merge(arrays))
        results, other_results = partition(results)
        # A `Partial` is a pytree of its arrays, with the function as static data.
        return Partial(other_results.merge, results)

    closed, results = jax.make_jaxpr(trace, return_shape=True)(*arrays)
    if policy.scopes:
        policy.check_scopes(all_scopes_of(closed.jaxpr))
    instead = {id(constant): array for constant, array in captured}
    consts = [instead.get(id(constant), constant) for constant in closed.consts]
    closed = core.ClosedJaxpr(closed.jaxpr, consts)
    inputs = list(map(as_argument, arrays))
    if policy.level == "O2":  # Parameters of normalization layers stay in float32.
        flags = itertools.compress(in_layers((args, kwargs)), rest.flags)
        inputs = [
            value._replace(origin=Origin.COMPUTED) if flag else value
            for value, flag in zip(inputs, flags, strict=True)
        ]
    outputs = [value.array for value in run(closed, inputs, policy)]
    return results.func(as_declared(closed.jaxpr.outvars, outputs))


def _in_layers_of(tree: PyTree, other: PyTree) -> list[bool]:
    """The same as `in_normalization(tree)`, for the leaves of a tree in another one."""
    pairs = zip(jax.tree.leaves(tree), in_normalization(tree), strict=True)
    found = {id(leaf): leaf for leaf, is_in_layer in pairs if is_in_layer}
    return [id(leaf) in found for leaf in jax.tree.leaves(other)]


def _is_concrete(arrays: Sequence[Any], rest: Rest) -> bool:
    """Whether all arrays have values, and no other argument can change."""
    kinds: Any = jax.core.Tracer | jax.ShapeDtypeStruct
    has_values = not any(isinstance(array, kinds) for array in arrays)
    if not has_values or not is_plain(rest.structure):
        return False
    # These settings look at each operation.
    names = ("jax_debug_nans", "jax_debug_infs")
    is_debugging = any(getattr(jax.config, name) for name in names)
    return not is_debugging and all(map(is_immutable, rest.others))
