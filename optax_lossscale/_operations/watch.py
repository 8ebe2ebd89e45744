"""Watch the numbers of every layer from inside a compiled training step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from optax_lossscale._autocast.arguments import partition
from optax_lossscale._autocast.modules import as_partial, call_with_states
from optax_lossscale._autocast.named_calls import named_calls
from optax_lossscale._nnx import modules_of
from optax_lossscale._operations.shadow import run
from optax_lossscale._operations.values import Context, Tape, Value
from optax_lossscale._types import PyTree


def watch(fun: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Wraps a function so that it also returns a few numbers for each of its layers.

    Wrap what computes the gradients, inside the jitted step, and log the numbers every
    so many steps:

        value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
        (loss, grads), layers = ols.diagnostics.watch(value_and_grad)(params, x, y)

    The results of `fun` are the same, but for the last bit, where XLA now fuses other
    operations. The numbers cost a pass over each result in half precision: on a CPU the
    gradient takes about twice as long, so compile one step with them and one without.
    Results in float32 do not count, because they do not overflow. To compare with
    float32, use `trace_operations`.

    Args:
      fun: A pure function of pytrees, such as the one that `scaled_value_and_grad`
        returns. It may change modules of `flax.nnx`. Do not differentiate the wrapped
        function: derivative rules of its parts would be lost.

    Returns:
      A function with the arguments of `fun` that returns a pair: the results of `fun`,
      and a dict. Its keys are the scopes that hold such results, as `"Net/Dense_0"`,
      each a module or a `jax.named_scope`; `""` stands for what is in none. Its values
      are dicts of up to four `f32[]`; those of a pass without such results are missing:

      * `largest`: the largest magnitude, infinite if an entry is NaN or infinite;
      * `flushed`: the largest share of nonzero entries that one cast to half precision
        rounded to zero, from 0 to 1 (matrix products are not looked into);
      * `grad_largest`, `grad_flushed`: the same of the backward pass, in which all
        magnitudes are multiplied by the loss scale.

    Raises:
      TypeError: If `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> @ols.autocast
      ... def loss_fn(w, x):
      ...     with jax.named_scope("layer"):
      ...         return jnp.mean(x @ w)
      >>> step = jax.jit(ols.diagnostics.watch(jax.value_and_grad(loss_fn)))
      >>> (loss, grads), layers = step(jnp.ones((3, 2)), jnp.full((1, 3), 7.0))
      >>> print(layers["layer"]["largest"], layers["layer"]["grad_largest"])
      21.0 0.5
    """
    if not callable(fun):
        raise TypeError(f"`fun` must be a function, got {fun!r}.")

    @functools.wraps(fun)
    def watched(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        tape = Tape(np.int32(0), has_references=False)

        def call(fun: Callable[..., Any], args: PyTree, kwargs: PyTree) -> PyTree:
            arrays, rest = partition((args, kwargs))

            def flat(*arrays: jax.Array) -> Partial:
                args, kwargs = rest.merge(arrays)
                results, other_results = partition(fun(*args, **kwargs))
                return Partial(other_results.merge, results)

            closed, results = jax.make_jaxpr(flat, return_shape=True)(*arrays)
            inputs = [Value(array, array) for array in arrays]
            flags = [True] * len(closed.out_avals)
            values = run(closed, inputs, tape, Context(where=""), flags)
            return results.func([value.array for value in values])

        with named_calls(fun, (args, kwargs)):
            if modules_of((as_partial(fun), args, kwargs)):
                results = call_with_states(call, fun, args, kwargs, is_update=True)
            else:
                results = call(fun, args, kwargs)
        return results, _by_scope(tape)

    return watched


def _by_scope(tape: Tape) -> dict[str, dict[str, jax.Array]]:
    """The largest numbers of the operations in each scope."""
    layers: dict[str, dict[str, jax.Array]] = {}
    for record, statistics in zip(tape.records, tape.statistics, strict=True):
        layer = layers.setdefault("/".join(record.scope), {})
        names = _NAMES[2:] if record.is_transposed else _NAMES[:2]
        for name, number in zip(names, statistics.magnitudes, strict=True):
            layer[name] = jnp.maximum(layer.get(name, 0.0), number)
    return layers


_NAMES = ("largest", "flushed", "grad_largest", "grad_flushed")
