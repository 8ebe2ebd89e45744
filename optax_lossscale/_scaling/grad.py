"""Differentiate a scaled loss, and report the true loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from optax_lossscale._ground.nnx import modules_of, value_and_grad_of_modules
from optax_lossscale._ground.parameters import parameters_of
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.backward import check_function
from optax_lossscale._scaling.mistakes import warn_if_constant, warn_of_order
from optax_lossscale._scaling.scale import multiply
from optax_lossscale._scaling.state import get_loss_scale


def scaled_value_and_grad(
    fun: Callable[..., Any],
    state: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **jax_kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, but the gradients are those of the scaled loss.

    Call it in each step with the optimizer's state, and pass the gradients to `update`:

        loss, grads = scaled_value_and_grad(loss_fn, opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)

    With loss scale `s`,

        loss = fun(x),    grads = d(widen(fun(x)) * s) / dx

    where `widen` casts dtypes narrower than float32 to float32. A float16 scalar loss
    limits the scale to `2**15`: its cotangent is the scale itself, and in float16
    `2**16` is infinity. So take the mean in float32:
    `per_example.astype(jnp.float32).mean()`.

    As in JAX, the arguments that `argnums` names are differentiated, but models of any
    framework can be passed as they are:

    * Of an `nnx.Module`, those variables that `nnx.value_and_grad` would select: by the
      `wrt` of an `nnx.Optimizer` passed as `state`, and for any
      other `state` `nnx.Param`. What the call changes in a module, such as batch
      statistics, reaches the module.
    * Of any other tree the floating and complex arrays, and in lists, tuples and dicts
      also Python floats. All other leaves are held fixed, and get None as gradients.
      (Beside an `nnx.Module` they are those that `nnx.value_and_grad` allows.)

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/flax_and_equinox.html

    Args:
      fun: A function that returns a scalar floating loss, or with `has_aux=True` a pair
        of the loss and auxiliary data.
      state: A `LossScaleState`, or any pytree that holds exactly one.
      argnums: As in `jax.value_and_grad`; for NNX modules also an `nnx.DiffState`, such
        as `nnx.DiffState(0, nnx.LoRAParam)`.
      has_aux: As in `jax.value_and_grad`.
      **jax_kwargs: Further keyword arguments of `jax.value_and_grad`, or, for modules,
        of `nnx.value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns `(loss, grads)`, or with
      `has_aux=True` `((loss, aux), grads)`.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several.
      TypeError: If `fun` is not a function, or raised by JAX, for example for a loss
        that is not a scalar.

    Warns:
      UserWarning: If `optax.MultiSteps` or `optax.apply_if_finite` is around
        `loss_scaled`, or a clip before it in an `optax.chain`; or if the state is a
        constant of the jitted step.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> state = ols.static_loss_scale(1024.0).init()
      >>> ols.scaled_value_and_grad(lambda x: x**2, state)(jnp.float32(3.0))
      (Array(9., dtype=float32), Array(6144., dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740).
    """
    warn_of_order(state)
    return _scaled(fun, state, argnums, has_aux, jax_kwargs, lambda *both: both)


def scaled_grad(
    fun: Callable[..., Any],
    state: PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **jax_kwargs: Any,
) -> Callable[..., Any]:
    """Like `jax.grad`, but the gradients are those of the scaled loss.

    Call it in each step with the optimizer's state, and pass the gradients to `update`:
    `grads = scaled_grad(loss_fn, opt_state)(params, x, y)`. With loss scale `s`,

        grads = d(widen(fun(x)) * s) / dx

    `scaled_value_and_grad` returns the loss too, and has the details.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/several_losses.html

    Args:
      fun: A function that returns a scalar floating loss, or with `has_aux=True` a pair
        of the loss and auxiliary data.
      state: A `LossScaleState`, or any pytree that holds exactly one.
      argnums: As in `jax.grad`.
      has_aux: As in `jax.grad`.
      **jax_kwargs: Further keyword arguments of `jax.grad`.

    Returns:
      A function with the arguments of `fun` that returns `grads`, or with
      `has_aux=True` `(grads, aux)`.

    Raises:
      ValueError: If `state` holds no `LossScaleState`, or several.
      TypeError: As `scaled_value_and_grad`, which also says when there is a warning.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> state = ols.static_loss_scale(1024.0).init()
      >>> ols.scaled_grad(lambda x: x**2, state)(jnp.float32(3.0))
      Array(6144., dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740).
    """

    def pick(value: Any, grads: PyTree) -> Any:
        return (grads, value[1]) if has_aux else grads

    warn_of_order(state)
    return _scaled(fun, state, argnums, has_aux, jax_kwargs, pick)


def _scaled(
    fun: Callable[..., Any],
    state: PyTree,
    argnums: int | Sequence[int],
    has_aux: bool,
    jax_kwargs: dict[str, Any],
    pick: Callable[[Any, PyTree], Any],
) -> Callable[..., Any]:
    """A function that returns what `pick` makes of the value and the gradients."""
    check_function(fun, "scaled_value_and_grad(loss_fn, state)(params)")
    get_loss_scale(state)  # Raises here rather than at the first call.

    @functools.wraps(fun)
    def scaled_fun(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        if not has_aux:
            _check_loss(result)
            return multiply(result, state), result
        if not (isinstance(result, tuple | list) and len(result) == 2):
            return result  # Not a pair: JAX raises the error.
        return multiply(result[0], state), tuple(result)

    @functools.wraps(fun)
    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        warn_if_constant(state)
        (_, value), grads = _differentiate(
            scaled_fun, state, argnums, jax_kwargs, args, kwargs
        )
        return pick(value, grads)

    return value_and_grad


def _differentiate(
    fun: Callable[..., Any],
    state: PyTree,
    argnums: int | Sequence[int],
    jax_kwargs: dict[str, Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Any:
    """Calls `jax.value_and_grad(fun, has_aux=True)`, for any kind of model."""
    argnums = tuple(argnums) if isinstance(argnums, Iterable) else argnums
    if modules_of((args, kwargs)):
        of_modules = value_and_grad_of_modules(
            fun, argnums, state, args, has_aux=True, **jax_kwargs
        )
        return of_modules(*args, **kwargs)
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    params = list(args)
    for index, arg in enumerate(args):
        if index in numbers or index - len(args) in numbers:
            # An argument without a parameter stays whole, and JAX says what is wrong.
            part = parameters_of(arg)
            params[index] = part if jax.tree.leaves(part) else arg

    @functools.wraps(fun)
    def of_params(*params: PyTree, **kwargs: PyTree) -> Any:
        return fun(*map(_with_fixed, params, args), **kwargs)

    value_and_grad = jax.value_and_grad(of_params, argnums, has_aux=True, **jax_kwargs)
    return value_and_grad(*params, **kwargs)


def _with_fixed(params: PyTree, arg: PyTree) -> PyTree:
    """The argument, with these parameters in place of its own."""
    return jax.tree.map(
        lambda param, leaf: leaf if param is None else param,
        params,
        arg,
        is_leaf=lambda node: node is None,
    )


def _check_loss(result: object) -> None:
    """Refuses several results of a function that has no auxiliary data."""
    if isinstance(result, tuple | list):
        raise TypeError(
            f"`fun` must return a scalar loss, got a {type(result).__name__} "
            f"of length {len(result)}. (For a loss and other outputs, such as "
            "new batch statistics, return a pair and pass `has_aux=True`.)"
        )
