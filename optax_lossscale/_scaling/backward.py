"""Scale the backward pass alone, where somebody else differentiates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from optax_lossscale._autocast.modules import changes_of
from optax_lossscale._ground.checks import check_scale
from optax_lossscale._ground.nnx import flax_nnx, is_module, map_leaves, modules_of
from optax_lossscale._ground.tree import is_floating
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.mistakes import warn_if_constant
from optax_lossscale._scaling.scale import scale_leaves, unscale_leaves
from optax_lossscale._scaling.state import get_loss_scale

# What is done to a cotangent on its way back.
Change: TypeAlias = Literal["scale", "unscale"]


def scaled_backward(
    fun: Callable[..., Any], loss_scale: ArrayLike | PyTree
) -> Callable[..., Any]:
    """Returns the same function, with gradients that a loss scale keeps from underflow.

    Give it to a trainer that differentiates the loss itself:
    `trainer(scaled_backward(loss_fn, 2.0**15))`. The value is that of `fun` to the bit,
    and the gradients are the true ones, so what the trainer logs, clips and adds to the
    loss is right. With loss scale `s`, loss `y = fun(x)` and its cotangent `c`,

        gradient for x = unscale(backward(c * s)),    unscale(g) = g * (1 / s)

    If the trainer computes the loss too, wrap the network; then `y` is its outputs.
    Where a scaled gradient overflowed, the true one is infinite or NaN,
    and a `loss_scaled` optimizer skips the step. It must not divide by the scale again:

    * `loss_scaled(inner, static_loss_scale(1.0))` only skips. Use it if `loss_scale` is
      a number.
    * `loss_scaled(inner, rule, grads_unscaled=True)` adjusts the scale. Use it where
      the loss function can be given its state.

    All arguments and all results are treated alike, whatever is differentiated. What
    `fun` closes over is not: its gradients come out scaled.

    Guide: https://optax-lossscale.github.io/optax_lossscale/trainers.html

    Args:
      fun: A function of any pytrees that returns a loss, or any pytree of arrays from
        which a loss is computed. It may be given modules of `flax.nnx`, and what it
        changes in their variables reaches them. (Each transformation around it, such as
        `vmap`, must be given them as arguments, too.)
      loss_scale: A number from `2**-126` to `2**126`, or a `LossScaleState`, or any
        pytree that holds exactly one.

    Returns:
      A function with the arguments and results of `fun`, for reverse mode. Parameters
      must be in float32 or wider.

    Raises:
      TypeError: If `fun` is not a function. From the function that is returned, if an
        argument of less than 32 bits is differentiated (its gradient would be flushed
        when the scale is divided out), for a second derivative (which would be divided
        by the scale twice), and for forward mode.
      ValueError: If `loss_scale` is out of range, or holds no `LossScaleState`; from
        the function that is returned, if it sets an attribute or a mode of a module.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> loss_fn = ols.scaled_backward(lambda x: x**2, 2.0**10)
      >>> jax.value_and_grad(loss_fn)(jnp.float32(3.0))
      (Array(9., dtype=float32), Array(6., dtype=float32))

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018
      (https://arxiv.org/abs/1710.03740).
    """
    check_function(fun, "scaled_backward(loss_fn, 2.0**12)")
    is_number = jax.tree_util.all_leaves([loss_scale])
    if is_number and not isinstance(loss_scale, jax.core.Tracer):
        loss_scale = np.float32(check_scale("loss_scale", loss_scale))
    elif not is_number:
        get_loss_scale(loss_scale)  # Raises here rather than at the first call.

    @functools.wraps(fun)
    def same_fun(*args: Any, **kwargs: Any) -> Any:
        if not is_number:
            warn_if_constant(loss_scale)
        s = jnp.float32(loss_scale if is_number else get_loss_scale(loss_scale))
        given = args, kwargs
        copies = map_leaves(lambda leaf: _with_cotangents(leaf, s, "unscale"), given)
        modules = modules_of(copies)
        graph, state = flax_nnx().split(modules) if modules else (None, None)
        state = jax.tree.map(lambda leaf: leaf, state)  # `fun` changes its variables.
        results = fun(*copies[0], **copies[1])
        if changes := changes_of(modules, graph, state):
            changes = _with_cotangents(changes, s, "scale")
            flax_nnx().update(modules_of(given), changes)
        return map_leaves(lambda leaf: _with_cotangents(leaf, s, "scale"), results)

    return same_fun


def _with_cotangents(leaf: PyTree, loss_scale: jax.Array, change: Change) -> PyTree:
    """The same leaf, or a copy of a module, whose cotangents are changed."""

    def same(leaf: PyTree) -> PyTree:
        is_array = isinstance(leaf, jax.Array) and is_floating(leaf)
        return _same(leaf, loss_scale, change) if is_array else leaf

    if not is_module(leaf):
        return jax.tree.map(same, leaf)
    graph, state = flax_nnx().split(leaf)
    return flax_nnx().merge(graph, jax.tree.map(same, state))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _same(x: jax.Array, loss_scale: jax.Array, change: Change) -> jax.Array:
    return x


@_same.defjvp
def _(
    change: Change, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    (x, loss_scale), (tangent, _) = primals, tangents
    dtype = jnp.result_type(x)
    if change == "unscale" and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            "arguments of `scaled_backward` that are differentiated must be float32 or "
            f"wider, got {dtype}: their gradients would be flushed to zero. (Keep "
            "parameters in float32, and cast them inside the function: `autocast`.)"
        )
    return x, backward_p.bind(tangent, loss_scale, change=change)


def _refuse(*args: Any, **params: Any) -> NoReturn:
    raise TypeError(
        "`scaled_backward` has first derivatives in reverse mode alone, because the "
        "scale is divided out once, on the way back. (If the loss takes derivatives of "
        "a network, wrap the function that is differentiated last: the whole loss. For "
        "forward mode take `fun` itself, which needs no loss scale.)"
    )


# A tangent that can only be transposed. (`jax.custom_vjp` would refuse forward mode in
# JAX's own words, and would not know which arguments are differentiated.)
backward_p = core.Primitive("scaled_backward")
backward_p.def_abstract_eval(lambda tangent, loss_scale, *, change: tangent)
backward_p.def_impl(_refuse)
mlir.register_lowering(backward_p, _refuse)
ad.primitive_jvps[backward_p] = _refuse


def _transpose(
    cotangent: Any, tangent: Any, loss_scale: jax.Array, *, change: Change
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [cotangent, None]
    leaves = scale_leaves if change == "scale" else unscale_leaves
    for _ in range(loss_scale.ndim):  # In a batch, each entry has a scale.
        leaves = jax.vmap(leaves)
    dtype = tangent.aval.dtype
    (changed,) = leaves([jnp.asarray(cotangent, dtype)], loss_scale)
    return [_first_derivative(changed.astype(dtype)), None]


ad.primitive_transposes[backward_p] = _transpose


@jax.custom_jvp
def _first_derivative(x: jax.Array) -> jax.Array:
    """The same array, which must not be differentiated again."""
    return x


_first_derivative.defjvp(_refuse)


def _batch(
    args: tuple[jax.Array, jax.Array], axes: tuple[Any, Any], *, change: Change
) -> tuple[jax.Array, int]:
    """Moves the axis of the batch to the front, where the scale has its axes too."""
    (tangent, loss_scale), (axis, scale_axis) = args, axes
    place = loss_scale.ndim
    if scale_axis is not None:
        place, size = 0, loss_scale.shape[scale_axis]
        loss_scale = jnp.moveaxis(loss_scale, scale_axis, 0)
        if axis is None:
            tangent, axis = jnp.broadcast_to(tangent, (size, *tangent.shape)), 0
    tangent = jnp.moveaxis(tangent, axis, place)
    return backward_p.bind(tangent, loss_scale, change=change), place


batching.primitive_batchers[backward_p] = _batch


def check_function(fun: object, call: str) -> None:
    """Refuses a loss in place of a function."""
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {type(fun).__name__}. (Pass the function "
            f"itself: `{call}`.)"
        )
