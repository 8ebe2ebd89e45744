"""Run a function and its gradient operation by operation, and keep their numbers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_lossscale._autocast.arguments import partition
from optax_lossscale._autocast.modules import (
    as_partial,
    call_partial,
    call_with_states,
)
from optax_lossscale._autocast.named_calls import named_calls
from optax_lossscale._autocast.notes import watch_for_calls
from optax_lossscale._autocast.transform import Again, autocast
from optax_lossscale._checks import check_concrete, check_scale
from optax_lossscale._grad import scaled_value_and_grad
from optax_lossscale._jaxprs import file_name, trace_anew
from optax_lossscale._nnx import modules_of
from optax_lossscale._operations.operation import (
    Badness,
    Operations,
    operations_of,
)
from optax_lossscale._operations.shadow import run
from optax_lossscale._operations.values import Context, Tape, Value, as_argument
from optax_lossscale._rules import static_loss_scale
from optax_lossscale._tree import is_floating
from optax_lossscale._types import PyTree


class _Program(NamedTuple):
    """A function and its gradient as a program.

    Attributes:
      closed: The program; its first input is the loss scale.
      arrays: Its other inputs.
      is_forward: For each result, whether it is not a gradient.
    """

    closed: core.ClosedJaxpr
    arrays: list[jax.Array]
    is_forward: list[bool]


def trace_operations(
    fun: Callable[..., Any],
    *args: Any,
    dtype: jax.typing.DTypeLike = jnp.float16,
    level: str = "O1",
    loss_scale: float = 1.0,
    argnums: int | Sequence[int] = 0,
) -> Operations:
    """Runs a function and its gradient, and returns the numbers of every operation.

    The answer to "my loss is NaN: where?". The function runs once, operation by
    operation, as it would under `autocast`, and beside it the same program in float32,
    in which no number is ever rounded to fewer than 32 bits:

        operations = ols.diagnostics.trace_operations(loss_fn, params, x, y)
        ols.diagnostics.print_operation_report(operations)

    Pass the function that computes the loss, not the training step, and outside `jit`.
    Modules of Flax and Equinox may be arguments; a call changes none of them, not even
    batch statistics or dropout counts.

    * *Which operations.* All whose results are floating, in the forward and in the
      backward pass, also inside jitted functions, loops, branches, `jax.checkpoint`,
      `shard_map` and derivative rules. An operation in a loop is listed once, with its
      worst numbers, and one that `jax.checkpoint` repeats too. A fused kernel counts as
      one operation. The condition of a `while_loop` is not listed.
    * *In float32* the program takes the same branches, and makes the same number of
      iterations, as the program in half precision does.
    * *Without a loss.* If the function returns no floating scalar, alone or first in a
      tuple, there is nothing to differentiate, and only the forward pass is listed.
    * *Cost.* Only statistics are kept. The first call compiles each kind of operation,
      so it takes some seconds, and later ones are fast.

    Args:
      fun: A function that returns a loss, or a tuple or list that begins with one. If
        it is under `autocast`, or calls a function that is, it runs as it is. Otherwise
        it runs as `autocast(fun, dtype, level=level)`.
      *args: Its arguments, with values. Bind keyword arguments by `functools.partial`.
      dtype: float16, bfloat16 or float8_e4m3fn.
      level: `"O0"` to `"O3"`, as in `autocast`. `"O0"` traces a model that casts by
        itself, such as one with `dtype=jnp.float16`, exactly as it is.
      loss_scale: The loss scale, dimensionless, from `2**-126` to `2**126`.
      argnums: What to differentiate by, as in `scaled_value_and_grad`.

    Returns:
      A list of `Operation`, in order of execution. It keeps the function and its
      arguments, so that `suggest_full_precision` can run them again.

    Raises:
      TypeError: If `fun` is not a function, if an argument has no values, as inside
        `jit`, or raised by JAX, for example for a first argument of integers.
      ValueError: If `loss_scale` is outside its range, or raised by `autocast`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     return jnp.mean(x @ w)
      >>> w, x = jnp.full((3, 2), 300.0), jnp.full((1, 3), 200.0)
      >>> for operation in ols.diagnostics.trace_operations(loss_fn, w, x)[:3]:
      ...     print(operation.primitive, operation.dtype, operation.largest)
      convert_element_type float16 200.0
      convert_element_type float16 300.0
      dot_general float16 inf

    References:
      Benz, Hildebrandt and Hack, A dynamic program analysis to find floating-point
      accuracy problems, PLDI 2012, run a program beside itself in a wider format
      (https://doi.org/10.1145/2254064.2254118).
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.")
    check_concrete("args", args, "Call it outside `jit`.")
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
        raise TypeError("`args` must hold arrays with values, got `ShapeDtypeStruct`s.")
    loss_scale = check_scale("loss_scale", loss_scale)

    where = _where_defined(fun)
    if modules_of(function := as_partial(fun)):  # As an argument, they may change.
        fun, args = call_partial, (function, *args)
        argnums = jax.tree.map(lambda number: number + (number >= 0), argnums)
    calls_autocast, has_loss = _look_at(fun, args)
    if calls_autocast:
        with_high = _again(fun)
    else:
        low = functools.partial(autocast, fun, dtype, level=level)
        with_high = lambda high: low(high=high)  # noqa: E731

    def program_with(high: Sequence[str]) -> _Program:
        cast_fun = with_high(high)
        grad_fun = _with_gradients(cast_fun, argnums) if has_loss else None
        with named_calls(fun, args):
            return _trace_call(grad_fun or _forward(cast_fun), args)

    def badness(high: Sequence[str]) -> Badness:
        program = program_with(high)
        tape, results = _run(program, loss_scale, context)
        flags = program.is_forward
        is_measured = flags if all(flags) else [not flag for flag in flags]
        return _badness(tape, list(itertools.compress(results, is_measured)))

    context = Context(where)
    tape, _ = _run(program_with(()), loss_scale, context)
    return Operations(operations_of(tape, loss_scale), badness)


def _badness(tape: Tape, values: Sequence[Value]) -> Badness:
    """How far the results of a program are from those in float32."""
    bad = difference = norm = size = 0.0
    for value in values:
        if not is_floating(value.array):
            continue
        array, reference = (
            np.asarray(x).astype(np.complex128) for x in (value.array, value.reference)
        )
        is_finite = np.isfinite(array)
        if not np.isfinite(reference).all():
            return Badness(0.0, 0, math.nan)
        bad, size = bad + float(np.sum(~is_finite)), size + float(array.size)
        array, reference = array[is_finite], reference[is_finite]
        difference += float(np.sum(np.abs(array - reference) ** 2))
        norm += float(np.sum(np.abs(reference) ** 2))
    error = math.sqrt(difference / norm) if norm else math.inf if difference else 0.0
    magnitudes = [x.magnitudes for x in jax.device_get(tape.statistics)]
    diverged = sum(bool(x == math.inf and y < math.inf) for x, y, *_ in magnitudes)
    return Badness(bad / max(size, 1.0), diverged if bad else 0, error)


def _look_at(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether a function calls `autocast`, and whether it returns a loss."""
    losses = []

    def look(_: Any, *args: Any) -> tuple[PyTree, None]:
        results = fun(*args)
        losses.append(_loss_of(results) is not None)
        return results, None

    with watch_for_calls() as calls, trace_anew():
        _trace_call(look, args)
    return bool(calls), losses[-1]


def _again(
    fun: Callable[..., Any],
) -> Callable[[Sequence[str]], Callable[..., Any]]:
    """Makes a function under `autocast` again, with more names in its `high`.

    If it only calls such a function, it stays as it is.
    """
    again = getattr(fun, "autocast", None)
    if isinstance(again, Again) and again.function_id == id(fun):
        return again.with_high
    return lambda high: fun


def _run(
    program: _Program, loss_scale: float, context: Context
) -> tuple[Tape, list[Value]]:
    scale = jnp.float32(loss_scale)
    inputs = [Value(scale, scale, is_scaled=True), *map(as_argument, program.arrays)]
    tape = Tape(np.int32(0))
    results = run(program.closed, inputs, tape, context, program.is_forward)
    return tape, results


def _forward(fun: Callable[..., Any]) -> Callable[..., tuple[PyTree, None]]:
    """The function that returns the results of `fun`, and no gradients."""
    return lambda scale, *args: (fun(*args), None)


def _with_gradients(
    fun: Callable[..., Any], argnums: int | Sequence[int]
) -> Callable[..., tuple[PyTree, PyTree]]:
    """The function that returns the results of `fun`, and its scaled gradients."""

    def loss_and_results(*args: Any) -> tuple[Any, PyTree]:
        results = fun(*args)
        return _loss_of(results), results

    def value_and_grad(scale: jax.Array, *args: Any) -> tuple[PyTree, PyTree]:
        state = static_loss_scale(1.0).init()._replace(loss_scale=scale)
        transformed = scaled_value_and_grad(
            loss_and_results, state, argnums, has_aux=True
        )
        (_, results), grads = transformed(*args)
        return results, grads

    return value_and_grad


def _loss_of(results: PyTree) -> Any:
    """The scalar that can be differentiated in the results of a function, or None."""
    is_several = isinstance(results, tuple | list) and len(results) > 0
    loss = results[0] if is_several else results
    is_number = isinstance(loss, float | jax.Array | np.ndarray | np.generic)
    is_scalar = is_number and is_floating(loss) and jnp.ndim(loss) == 0
    return loss if is_scalar else None


def _trace_call(
    fun: Callable[..., tuple[PyTree, PyTree]], args: tuple[Any, ...]
) -> _Program:
    """Traces a function of the scale and the arguments, and changes no module."""
    programs = []

    def call(fun: Callable[..., Any], args: PyTree, kwargs: PyTree) -> Any:
        arrays, rest = partition((args, kwargs))
        is_forward: list[bool] = []

        def flat(*arrays: jax.Array) -> list[Any]:
            args, kwargs = rest.merge(arrays)
            results = fun(*args, **kwargs)
            (values, grads), *changes = results if has_modules else (results,)
            forward, backward = partition((values, changes))[0], partition(grads)[0]
            is_forward[:] = [True] * len(forward) + [False] * len(backward)
            return [*forward, *backward]

        closed = jax.make_jaxpr(flat)(*arrays)
        programs.append(_Program(closed, arrays[1:], is_forward))
        return None, {}, None

    has_modules = bool(modules_of(args))
    given = (jnp.float32(1.0), *args)
    if has_modules:
        call_with_states(call, fun, given, {}, is_update=False)
    else:
        call(fun, given, {})
    (program,) = programs
    return program


def _where_defined(fun: Any) -> str:
    """File, first line and name of a function."""
    while isinstance(fun, functools.partial) or hasattr(fun, "__wrapped__"):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__wrapped__
    for function in (fun, getattr(type(fun), "__call__", None)):  # noqa: B004
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            file, line = file_name(code.co_filename), code.co_firstlineno
            return f"{file}:{line} ({code.co_qualname})"
    return type(fun).__name__
