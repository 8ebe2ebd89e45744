"""Scale the backward pass alone, where somebody else differentiates."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from optax_lossscale._ground.checks import check_scale
from optax_lossscale._ground.nnx import modules_of, states_of, updated
from optax_lossscale._ground.tree import is_floating, map_floating
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.mistakes import warn_if_constant, warn_of_outer_wrappers
from optax_lossscale._scaling.scale import scale_leaves, unscale_leaves
from optax_lossscale._scaling.state import get_loss_scale


def scaled_backward(
    fun: Callable[..., Any],
    loss_scale: ArrayLike | PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """The same function, whose gradients are computed with a loss scale.

    With loss scale `s`, loss `y = fun(x)` and its cotangent `c`,

        gradient for x = unscale(backward(c * s)),    unscale(g) = g * (1 / s)

    so the value is that of `fun` to the bit, and the gradients are the true ones. Only
    what lies between is scaled. Give it to a trainer that differentiates the loss
    itself: what it logs, clips and adds to the loss is then right. To a trainer that
    also has the loss inside, give the network like this; then `y` is its outputs. Where
    a scaled gradient overflowed, the true one is infinite or NaN, and a `loss_scaled`
    optimizer skips the step. That optimizer must not divide by the scale once more:

    * `loss_scaled(inner, static_loss_scale(1.0))` only skips. Use it beside a number.
    * `loss_scaled(inner, rule, grads_unscaled=True)` adjusts the scale. Use it where
      the loss function can be given its state.

    Args:
      fun: A function that returns a scalar floating loss, or any pytree of arrays from
        which a loss is computed. With `has_aux=True` it returns a pair of these and
        auxiliary data. It may be given modules of `flax.nnx`, and what it changes in
        them reaches them.
      loss_scale: A number from `2**-126` to `2**126`, or a `LossScaleState`, or any
        pytree that holds exactly one.
      argnums: All arguments that will be differentiated, each a tree of parameters in
        float32 or wider. They may be passed by name.
      has_aux: Whether `fun` returns a pair.

    Returns:
      A function with the arguments and results of `fun`.

    Raises:
      TypeError: If `fun` is not a function or returns no pair with `has_aux`, if an
        argument of `argnums` is missing, or if a parameter of less than 32 bits is
        differentiated: its gradient would be flushed when the scale is divided out.
      ValueError: If `loss_scale` is out of range, or holds no `LossScaleState`.

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
    if is_number := jax.tree_util.all_leaves([loss_scale]):
        number = _check_number(loss_scale)
    else:
        warn_of_outer_wrappers(loss_scale)
        number = get_loss_scale(loss_scale)  # Raises here, not at the first call.
    numbers = list(argnums) if isinstance(argnums, Iterable) else [argnums]

    @functools.wraps(fun)
    def same_fun(*args: Any, **kwargs: Any) -> Any:
        if not is_number:
            warn_if_constant(loss_scale)
        own, named, restore = _with_unscaled(fun, numbers, args, kwargs, number)
        result = fun(*own, **named)
        restore()
        if not has_aux:
            return _with_cotangent(result, number, scale_leaves)
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise TypeError(
                "with `has_aux=True`, `fun` must return a pair of the loss and "
                f"auxiliary data, got {type(result).__name__}."
            )
        loss, aux = result
        return _with_cotangent(loss, number, scale_leaves), aux

    return same_fun


def _check_number(number: ArrayLike) -> jax.Array:
    """A loss scale as an array, which may be traced."""
    if not isinstance(number, jax.core.Tracer):
        number = check_scale("loss_scale", cast(float, number))
    return jnp.asarray(number, jnp.float32)


def check_function(fun: object, call: str) -> None:
    """Refuses a loss in place of a function."""
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {type(fun).__name__}. (Pass the function "
            f"itself: `{call}`.)"
        )


def _with_unscaled(
    fun: Callable[..., Any],
    argnums: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    factor: jax.Array,
) -> tuple[list[Any], dict[str, Any], Callable[[], None]]:
    """The arguments, of which some have cotangents that the scale is divided out of.

    Modules are changed in place, so the last result is a function that changes them
    back, but for what was changed since.
    """
    positional, named, undo = list(args), dict(kwargs), list[Callable[[], None]]()
    for number in argnums:
        place, holder = _place_of(fun, number, positional, named)
        holder[place], back = _in_modules(
            lambda tree: _with_cotangent(tree, factor, _unscale_leaves), holder[place]
        )
        undo.append(back)

    def restore() -> None:
        for back in undo:
            back()

    return positional, named, restore


def _place_of(
    fun: Callable[..., Any], number: int, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Where an argument is: its index in a list, or its name in a dict."""
    if -len(args) <= number < len(args):
        return number, args
    names = list(inspect.signature(fun).parameters)
    name = names[number] if number < len(names) else None
    if name not in kwargs:
        raise TypeError(
            f"`fun` must be given its argument {number}, which is differentiated, got "
            f"{len(args)} arguments and {sorted(kwargs) or 'no names'}."
        )
    return name, kwargs


def _in_modules(
    change: Callable[[PyTree], PyTree], tree: PyTree
) -> tuple[PyTree, Callable[[], None]]:
    """A changed tree of parameters, and a function that changes modules in it back."""
    if not modules_of(tree):
        return change(tree), lambda: None
    old, structure = jax.tree.flatten(states_of(tree))
    changed = jax.tree.leaves(change(states_of(tree)))
    updated(tree, jax.tree.unflatten(structure, changed))

    def restore() -> None:
        now, structure = jax.tree.flatten(states_of(tree))
        before = {id(new): x for new, x in zip(changed, old, strict=True)}
        back = [before.get(id(leaf), leaf) for leaf in now]
        updated(tree, jax.tree.unflatten(structure, back))

    return tree, restore


def _unscale_leaves(leaves: list[jax.Array], loss_scale: jax.Array) -> list[jax.Array]:
    for leaf in leaves:
        if jnp.finfo(leaf.dtype).bits < 32:
            raise TypeError(
                "parameters that are differentiated must be float32 or wider, got "
                f"{leaf.dtype}: with the scale divided out, small gradients would be "
                "zero. (Cast them: `cast_params(params, jnp.float32)`, and let "
                "`autocast` round them for the products.)"
            )
    unscaled: list[jax.Array] = unscale_leaves(leaves, loss_scale)
    return unscaled


# --- A cotangent that is multiplied -----------------------------------------------

_Change = Callable[[list[jax.Array], jax.Array], list[jax.Array]]


def _with_cotangent(tree: PyTree, factor: jax.Array, change: _Change) -> PyTree:
    """The same tree. In the backward pass the cotangents of its leaves are changed."""

    def bind(leaves: list[ArrayLike], factor: jax.Array) -> list[jax.Array]:
        settings = {"change": change, "is_tangent": False}
        return [_same_p.bind(jnp.asarray(x), factor, **settings) for x in leaves]

    return map_floating(bind, tree, factor, is_mapped=_is_floating_array)


def _is_floating_array(leaf: object) -> bool:
    """Whether it can be differentiated: JAX traces even a number, if it is to be."""
    return isinstance(leaf, jax.Array) and is_floating(leaf)


# `jax.custom_derivatives.linear_call` is much the same, but has no rule for `vmap`, and
# changes the cotangents of a second backward pass too.
_same_p = core.Primitive("same_value")
_same_p.def_impl(lambda x, factor, **_: x)
_same_p.def_abstract_eval(lambda x, factor, **_: x)
_lowering = mlir.lower_fun(lambda x, factor, **_: x, multiple_results=False)
mlir.register_lowering(_same_p, _lowering)


def _jvp(
    primals: Any, tangents: Any, *, change: _Change, is_tangent: bool
) -> tuple[jax.Array, Any]:
    """Of the value and its first derivative, only the latter is changed on its way."""
    (x, factor), (dx, _) = primals, tangents
    bind = functools.partial(_same_p.bind, change=change, is_tangent=True)
    if is_tangent:
        return bind(x, factor), dx
    return x, dx if type(dx) is ad.Zero else bind(dx, factor)


def _transpose(
    cotangent: Any, _: Any, factor: jax.Array, *, change: _Change, is_tangent: bool
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [cotangent, None]
    for _ in range(factor.ndim):  # In a batch, each entry has a factor.
        change = jax.vmap(change)
    (changed,) = change([cotangent], factor)
    return [lax.convert_element_type(changed, cotangent.dtype), None]


def _batch(args: Any, axes: Any, **settings: Any) -> tuple[jax.Array, int]:
    """The axes of the factor, which are those of batches, come first in the array."""
    (x, factor), (x_axis, factor_axis) = args, axes
    place = factor.ndim
    if factor_axis is not None:
        place, size = 0, factor.shape[factor_axis]
        factor = jnp.moveaxis(factor, factor_axis, 0)
        if x_axis is None:
            x, x_axis = jnp.broadcast_to(x, (size, *x.shape)), 0
    return _same_p.bind(jnp.moveaxis(x, x_axis, place), factor, **settings), place


ad.primitive_jvps[_same_p] = _jvp
ad.primitive_transposes[_same_p] = _transpose
batching.primitive_batchers[_same_p] = _batch
