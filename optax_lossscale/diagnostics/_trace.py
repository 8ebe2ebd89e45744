"""Run a function and its gradient, and keep the numbers of every operation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval as pe

from optax_lossscale._autocast.context import recorded_calls
from optax_lossscale._autocast.modules import (
    Traced,
    as_partial,
    linen_scopes_of,
    trace_call,
    variables_kept,
)
from optax_lossscale._autocast.programs import Program, place_in
from optax_lossscale._autocast.transform import autocast
from optax_lossscale._ground.checks import check_concrete, check_scale
from optax_lossscale._ground.nnx import map_leaves, modules_of
from optax_lossscale._ground.tree import (
    floating_leaves,
    is_floating,
    is_floating_array,
)
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.grad import scaled_value_and_grad
from optax_lossscale._scaling.rules import static_loss_scale
from optax_lossscale.diagnostics._instrument import (
    Instrumenter,
    runs_on_several_devices,
)
from optax_lossscale.diagnostics._operation import (
    Context,
    Operation,
    operations_of,
)


def trace_operations(
    fun: Callable[..., Any],
    *args: Any,
    dtype: jax.typing.DTypeLike = jnp.float16,
    level: str = "O1",
    loss_scale: float = 1.0,
    argnums: int | Sequence[int] = 0,
) -> list[Operation]:
    """Runs a function and its gradient, and returns the numbers of every operation.

    It answers "my loss is NaN: where?". Pass the function that computes the loss, not
    the training step, and outside `jit`:

        operations = ols.diagnostics.trace_operations(loss_fn, params, x, y)
        ols.diagnostics.print_operation_report(operations)

    The loss and its gradient are compiled as `autocast` makes them, and run once. It
    takes three to four times as long as compiling the gradient, and more on several
    devices. Modules of Flax and Equinox may be arguments, and stay as they are.

    All operations that ran and whose results are floating are listed, in the forward
    and in the backward pass, also inside jitted functions, loops, branches,
    `jax.checkpoint`, `shard_map` and derivative rules. One in a loop is listed once,
    with its worst numbers, and a kernel counts as one. Each operation in fewer than 32
    bits is also computed in float32, from the operands before `autocast` rounded them.
    So `error` and `underflow` are what this one operation loses.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      fun: A function that returns a loss, or a tuple or list that begins with one. If
        it is under `autocast`, or calls a function that is, it runs as it is. Otherwise
        it runs as `autocast(fun, dtype, level=level)`.
      *args: Its arguments, with values. Bind keyword arguments by `functools.partial`.
      dtype: float16 or bfloat16.
      level: `"O0"` to `"O3"`, as in `autocast`. `"O0"` traces a model that casts by
        itself, such as one with `dtype=jnp.float16`, exactly as it is.
      loss_scale: The loss scale, dimensionless, from `2**-126` to `2**126`.
      argnums: What to differentiate by, as in `scaled_value_and_grad`.

    Returns:
      A list of `Operation`, in order of execution.

    Raises:
      TypeError: If `fun` is not a function or returns no scalar loss, if an argument
        has no values, as inside `jit`, if no argument holds an array, or raised by JAX,
        for example for a first argument of integers.
      ValueError: If `loss_scale` is outside its range, or raised by `autocast`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     return jnp.mean(x @ w)
      >>> w, x = 300 * jnp.ones((3, 2)), 200 * jnp.ones((1, 3))
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
    check_call(fun, args)
    loss_scale = check_scale("loss_scale", loss_scale)
    cast = functools.partial(autocast, dtype=dtype, level=level)
    with undisturbed():
        traced, _ = trace_gradients(fun, args, loss_scale, argnums, cast)
        program = _without_dead_code(traced.program)  # Statistics would keep it alive.
        on_device = runs_on_several_devices(program, traced.arrays)
        instrumenter = Instrumenter(on_device=on_device)
        context = Context(_where_defined(fun))
        run(instrumenter.instrument(program, context), traced.arrays)
        jax.effects_barrier()
        return operations_of(instrumenter.entries, loss_scale)


def check_call(fun: Any, args: PyTree) -> None:
    """Refuses what cannot be run and differentiated."""
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.")
    check_concrete("args", args, "Call it outside `jit`.")
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
        raise TypeError("`args` must hold arrays with values, got `ShapeDtypeStruct`s.")
    if not any(map(is_floating_array, jax.tree.leaves(args))):
        raise TypeError("`args` must hold a floating array, got none.")


def trace_gradients(
    fun: Callable[..., Any],
    args: tuple[PyTree, ...],
    loss_scale: float,
    argnums: int | Sequence[int],
    cast: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> tuple[Traced, list[str]]:
    """The program of the scaled gradients of `fun`, and of its results.

    With it the names of its first results, which are the gradients.

    Args:
      fun: The function.
      args: Its arguments.
      loss_scale: The loss scale.
      argnums: What to differentiate by.
      cast: An `autocast`, which is left out if `fun` calls one itself.
    """
    # JAX would compute casts of NumPy's arrays while it traces, where nobody sees them.
    args = map_leaves(_on_device, args)
    function = as_partial(fun)
    if modules_of(function):  # As an argument, they may change.
        fun, args = operator.call, (function, *args)
        argnums = jax.tree.map(lambda number: number + (number >= 0), argnums)

    names: list[str] = []

    def trace(fun: Callable[..., Any]) -> tuple[Traced, int]:
        """The program, traced anew, and how often it calls `autocast`."""
        grad_fun = _with_gradients(fun, argnums, names)
        with recorded_calls() as calls, variables_kept(linen_scopes_of(args)):
            inputs = jnp.float32(loss_scale), *args
            traced = trace_call((as_partial(grad_fun), inputs, {}))
            return traced, len(calls)

    traced, count = trace(cast(fun))
    if count > 1:  # One call is that of `cast` itself. The others are made by `fun`.
        traced, _ = trace(fun)
    return traced, names


def run(program: Program, arrays: list[jax.Array]) -> list[jax.Array]:
    """Compiles and runs a program, with every result rounded as it is written."""
    lowered = jax.jit(core.jaxpr_as_fun(program)).lower(*arrays)
    # Or XLA leaves out that a result is rounded, and computes on in float32.
    compiled = lowered.compile({"xla_allow_excess_precision": False})
    results: list[jax.Array] = jax.block_until_ready(compiled(*arrays))
    return results


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context without the settings that stop at NaN, or compile nothing."""
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        yield


def _without_dead_code(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    is_used = [True] * len(program.jaxpr.outvars)
    jaxpr, _ = pe.dce_jaxpr(program.jaxpr, is_used, instantiate=True)
    return core.ClosedJaxpr(jaxpr, program.consts)


def _on_device(leaf: PyTree) -> PyTree:
    is_numpy = isinstance(leaf, np.ndarray) and is_floating(leaf)
    return jnp.asarray(leaf) if is_numpy else leaf


def _with_gradients(
    fun: Callable[..., Any], argnums: int | Sequence[int], names: list[str]
) -> Callable[..., tuple[PyTree, PyTree]]:
    """The function that returns scaled gradients of `fun`, and its results.

    It writes the names of the gradients into a list.
    """

    def loss_and_results(*args: Any) -> tuple[Any, PyTree]:
        results = fun(*args)
        is_several = isinstance(results, tuple | list) and len(results) > 0
        loss = results[0] if is_several else results
        if not is_floating(loss) or jnp.ndim(loss):
            shapes = jax.tree.map(lambda x: getattr(x, "aval", x), results)
            raise TypeError(
                "`fun` must return a floating scalar, alone or first in a tuple, got "
                f"{shapes}. (Return the mean of what you want to look at.)"
            )
        return loss, results

    def value_and_grad(scale: jax.Array, *args: Any) -> tuple[PyTree, PyTree]:
        state = static_loss_scale(1.0).init()._replace(loss_scale=scale)
        transformed = scaled_value_and_grad(
            loss_and_results, state, argnums, has_aux=True
        )
        (_, results), grads = transformed(*args)
        found = floating_leaves(grads)
        names[:] = found
        return list(found.values()), results

    return value_and_grad


def _where_defined(fun: Any) -> str:
    """File, first line and name of a function."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return place_in(code, code.co_firstlineno) if code else type(fun).__name__
