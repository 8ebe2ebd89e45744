"""Watch the numbers of every layer from inside a compiled training step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import PartitionSpec as P

from optax_lossscale._autocast.modules import call_with_states, trace
from optax_lossscale._finite import vary_over
from optax_lossscale._jax_internals import manual_axes_of, scan_sizes
from optax_lossscale._jaxprs import (
    Program,
    bind,
    consts_of,
    context_of,
    jaxpr_of,
    programs_of,
    read,
)
from optax_lossscale._named_calls import named_calls
from optax_lossscale._operations.operation import Context, is_narrow_atom
from optax_lossscale._types import Arrays, PyTree

# For each scope and kind of number, the largest number until now.
_Numbers = dict[tuple[str, str], jax.Array]
# What has one program, with the operands of the equation as its inputs.
_CALLS = ("jit", "pjit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call")
_WITH_PROGRAMS = (*_CALLS, "scan", "while", "cond", "shard_map")


def watch(fun: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Wraps a function so that it also returns a few numbers for each of its layers.

    Wrap what computes the gradients, inside the jitted step, and log the numbers every
    so many steps:

        value_and_grad = ols.scaled_value_and_grad(loss_fn, opt_state)
        (loss, grads), layers = ols.diagnostics.watch(value_and_grad)(params, x, y)

    The results of `fun` are the same, up to the last bit where XLA now fuses other
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
      each a module or a `jax.named_scope`; `""` stands for what is in none. (`jax.jit`
      sorts them; `first_nonfinite` says which layer was infinite first.) Its values
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
        layers: dict[str, dict[str, jax.Array]] = {}

        def call(fun: Callable[..., Any], *args: PyTree) -> PyTree:
            traced, context = trace(fun, *args), Context(where="")
            keys = _keys_of(traced.program.jaxpr, context)
            numbers = {key: jnp.zeros((), jnp.float32) for key in keys}
            program, arrays = traced.program, traced.arrays
            outputs, numbers = _run(program, arrays, numbers, context)
            for (scope, name), number in numbers.items():
                layers.setdefault(scope, {})[name] = number
            return traced.finish(outputs)

        with named_calls():
            results = call_with_states(call, fun, args, kwargs)
        return results, layers

    return watched


def _keys_of(jaxpr: core.Jaxpr, context: Context) -> Iterator[tuple[str, str]]:
    """The keys of all numbers of a program."""
    for equation in jaxpr.eqns:
        inner = context.at(equation)
        if equation.primitive.name in _WITH_PROGRAMS:
            for program in programs_of(equation):
                yield from _keys_of(program, inner)
        elif _is_measured(equation):
            yield from _keys_at(inner)


def _is_measured(equation: core.JaxprEqn) -> bool:
    return any(map(is_narrow_atom, equation.outvars[:1]))


def _keys_at(context: Context) -> list[tuple[str, str]]:
    prefix, scope = "grad_" if context.is_backward else "", "/".join(context.scope)
    return [(scope, f"{prefix}{name}") for name in ("largest", "flushed")]


def _run(
    program: Program, arrays: Arrays, numbers: _Numbers, context: Context
) -> tuple[list[jax.Array], _Numbers]:
    """Evaluates a program, and updates the numbers."""
    jaxpr, consts = jaxpr_of(program), consts_of(program)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*consts, *arrays], strict=True))

    for equation in jaxpr.eqns:
        inputs = [read(atom, values) for atom in equation.invars]
        inner = context.at(equation)
        with context_of(equation):
            if equation.primitive.name in _WITH_PROGRAMS:
                outputs, numbers = _run_nested(equation, inputs, numbers, inner)
            else:
                outputs = bind(equation.primitive, inputs, equation.params)
                if _is_measured(equation):
                    is_cast = equation.primitive is primitives.convert_element_type_p
                    before = inputs[0] if is_cast else outputs[0]
                    new = zip(_keys_at(inner), _glance(outputs[0], before), strict=True)
                    larger = {key: jnp.maximum(numbers[key], x) for key, x in new}
                    numbers = numbers | larger
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom, values) for atom in jaxpr.outvars], numbers


@jax.jit
def _glance(array: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest magnitude of a result, and the share of `before` that is now zero."""
    largest = jnp.max(jnp.abs(array), initial=0).astype(jnp.float32)
    is_nonzero = before != 0
    flushed = jnp.sum(is_nonzero & (array == 0), dtype=jnp.float32)
    nonzero = jnp.sum(is_nonzero, dtype=jnp.float32)
    return (
        jnp.where(jnp.isfinite(largest), largest, jnp.inf),
        flushed / jnp.maximum(nonzero, 1),
    )


def _run_nested(
    equation: core.JaxprEqn, inputs: Arrays, numbers: _Numbers, context: Context
) -> tuple[Arrays, _Numbers]:
    """Evaluates an equation that holds programs, and updates the numbers."""
    name, params = equation.primitive.name, equation.params

    def measured(program: Program) -> Callable[..., tuple[Arrays, _Numbers]]:
        return lambda numbers, *arrays: _run(program, arrays, numbers, context)

    if name == "shard_map":
        return _run_on_devices(measured(params["jaxpr"]), params, inputs, numbers)
    if name == "cond":
        branches = [measured(branch) for branch in params["branches"]]
        outputs, numbers = lax.switch(inputs[0], branches, numbers, *inputs[1:])
        return outputs, numbers
    if name == "while":  # Its condition is not looked into.
        first, size = params["cond_nconsts"], params["body_nconsts"]
        before, consts = inputs[:first], inputs[first:][:size]
        condition = core.jaxpr_as_fun(params["cond_jaxpr"])
        body = measured(params["body_jaxpr"])
        return lax.while_loop(
            lambda carry: condition(*before, *carry[0])[0],
            lambda carry: body(carry[1], *consts, *carry[0]),
            (inputs[first + size :], numbers),
        )
    if name == "scan":
        first, size = scan_sizes(params)
        consts, inputs = inputs[:first], inputs[first:]
        step = measured(params["jaxpr"])

        def advance(carry: Any, xs: Any) -> tuple[Any, Any]:
            outputs, numbers = step(carry[1], *consts, *carry[0], *xs)
            return (outputs[:size], numbers), outputs[size:]

        settings = {name: params[name] for name in ("length", "reverse", "unroll")}
        (last, numbers), ys = lax.scan(
            advance, (inputs[:size], numbers), inputs[size:], **settings
        )
        return [*last, *ys], numbers
    if params.get("differentiated") and params["prevent_cse"]:
        inputs = lax.optimization_barrier(inputs)  # As JAX does under a checkpoint.
    leaves = jax.tree.leaves(list(params.values()))
    program = next(x for x in leaves if isinstance(x, core.Jaxpr | core.ClosedJaxpr))
    return measured(program)(numbers, *inputs)


def _run_on_devices(
    run: Callable[..., tuple[Arrays, _Numbers]],
    params: dict[str, Any],
    inputs: Arrays,
    numbers: _Numbers,
) -> tuple[Arrays, _Numbers]:
    """Evaluates a `jax.shard_map`. Of the numbers of all devices the largest count."""
    axes = manual_axes_of(params)

    def body(arrays: Arrays, numbers: _Numbers) -> tuple[Arrays, _Numbers]:
        numbers = {key: vary_over(number, axes) for key, number in numbers.items()}
        outputs, numbers = run(numbers, *arrays)
        return outputs, {key: lax.pmax(x, axes) for key, x in numbers.items()}

    outputs, numbers = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), P()),
        out_specs=(list(params["out_specs"]), P()),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(inputs, numbers)
    return outputs, numbers
