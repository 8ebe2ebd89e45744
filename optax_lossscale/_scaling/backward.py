"""Scale the backward pass alone, where somebody else differentiates."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._ground.checks import check_scale
from optax_lossscale._ground.cotangents import with_cotangent
from optax_lossscale._ground.nnx import (
    explain_changes,
    is_module,
    map_leaves,
    modules_of,
    states_of,
    updated,
)
from optax_lossscale._ground.tree import is_wrapped, wrapped_in
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.mistakes import warn_if_constant, warn_of_outer_wrappers
from optax_lossscale._scaling.scale import one_loss_scale, scale_leaves, unscale_leaves
from optax_lossscale._scaling.state import get_loss_scale


def scaled_backward(
    fun: Callable[..., Any],
    loss_scale: ArrayLike | PyTree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns the same function, with gradients that a loss scale keeps from underflow.

    Give it to a trainer that differentiates the loss itself:
    `trainer(scaled_backward(loss_fn, 2.0**15))`. The value is that of `fun` to the bit,
    and the gradients are the true ones, so what the trainer logs, clips and adds to the
    loss is right. With loss scale `s`, loss `y = fun(x)` and its cotangent `c`,

        gradient for x = unscale(backward(c * s)),    unscale(g) = g * (1 / s)

    To a trainer that also has the loss inside, give the network like this; then `y` is
    its outputs. Where a scaled gradient overflowed, the true one is infinite or NaN,
    and a `loss_scaled` optimizer skips the step. It must not divide by the scale again:

    * `loss_scaled(inner, static_loss_scale(1.0))` only skips. Use it beside a number.
    * `loss_scaled(inner, rule, grads_unscaled=True)` adjusts the scale. Use it where
      the loss function can be given its state.

    Args:
      fun: A function that returns a scalar floating loss, or any pytree of arrays from
        which a loss is computed. With `has_aux=True` it returns a pair of these and
        auxiliary data. It may be given modules of `flax.nnx`, and what it changes in
        them reaches them. (Each transformation around it, such as `vmap`, must be given
        them as arguments, too.)
      loss_scale: A number from `2**-126` to `2**126`, or a `LossScaleState`, or any
        pytree that holds exactly one.
      argnums: The arguments with parameters, each a tree in float32 or wider. They may
        be passed by name, but a negative number counts those passed by place. The
        gradients of other arguments are the true ones, too, but not those of modules
        among them, of what `fun` writes into these, and of what it closes over.
      has_aux: Whether `fun` returns a pair. A gradient through the auxiliary data is
        the true one, too.

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
        get_loss_scale(loss_scale)  # Raises here rather than at the first call.
    numbers = list(argnums) if isinstance(argnums, Iterable) else [argnums]

    @functools.wraps(fun)
    def same_fun(*args: Any, **kwargs: Any) -> Any:
        if not is_number:
            warn_if_constant(loss_scale)
        # An array is made here and not before, because that starts JAX.
        factor = jnp.asarray(number) if is_number else one_loss_scale(loss_scale)
        positional, named, restore = _with_unscaled(fun, numbers, args, kwargs, factor)
        try:
            result = fun(*positional, **named)
            is_pair = isinstance(result, tuple | list) and len(result) == 2
            if has_aux and not is_pair:
                raise TypeError(
                    "with `has_aux=True`, `fun` must return a pair of the loss and "
                    f"auxiliary data, got {type(result).__name__}."
                )
            # Auxiliary data too: a trainer may add one of them to the loss.
            return _scaled(result, factor, (args, kwargs))
        finally:
            restore()

    return same_fun


def _check_number(number: ArrayLike) -> jax.Array | np.float32:
    """A loss scale in float32, which may be traced."""
    if isinstance(number, jax.core.Tracer):
        return jnp.asarray(number, jnp.float32)
    return np.float32(check_scale("loss_scale", cast(float, number)))


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
    """The arguments, with cotangents that the scale is divided out of.

    Modules of `argnums` are changed in place, so the last result is a function that
    changes them back, but for what was changed since, which leaves `fun` as its results
    do. Other modules stay.
    """
    given = dict[int | str, Any](enumerate(args))
    given.update(kwargs)
    places = [_place_of(fun, number, args, kwargs) for number in argnums]
    others = {
        place: _outside_modules(arg, factor)
        for place, arg in given.items()
        if place not in places
    }
    # All together, and after the others, because they may share variables.
    own, restore = _in_modules([given[place] for place in places], factor)
    changed = others | dict(zip(places, own, strict=True))
    positional = [changed[place] for place in range(len(args))]
    return positional, {name: changed[name] for name in kwargs}, restore


def _place_of(
    fun: Callable[..., Any], number: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> int | str:
    """Where an argument is: its index, or its name."""
    if -len(args) <= number < len(args):
        return number % len(args)
    names = list(inspect.signature(fun).parameters)
    name = names[number] if number < len(names) else None
    if name not in kwargs:
        raise TypeError(
            f"`fun` must be given its argument {number}, which is differentiated, got "
            f"{len(args)} arguments and {sorted(kwargs) or 'no names'}."
        )
    return name


def _outside_modules(tree: PyTree, factor: jax.Array) -> PyTree:
    """An argument with unscaled cotangents, but for modules, which stay as they are."""
    if not modules_of(tree):
        return with_cotangent(tree, factor, unscale_leaves)
    return map_leaves(
        lambda x: x if is_module(x) else with_cotangent(x, factor, unscale_leaves), tree
    )


def _scaled(result: PyTree, factor: jax.Array, arguments: PyTree) -> PyTree:
    """Results with cotangents that are scaled, but for modules of the arguments.

    Those stay the same objects, and are changed back.
    """
    if not modules_of(result):
        return with_cotangent(result, factor, scale_leaves)
    known = wrapped_in(states_of(arguments))

    def scaled(leaf: PyTree) -> PyTree:
        states = states_of(leaf)
        variables = wrapped_in(states)
        if variables and variables <= known:
            return leaf
        new = with_cotangent(states, factor, scale_leaves)
        keep = lambda old, new: old if id(old) in known else new  # noqa: E731
        return updated(leaf, jax.tree.map(keep, states, new, is_leaf=is_wrapped))

    return map_leaves(scaled, result)


def _in_modules(tree: PyTree, factor: jax.Array) -> tuple[PyTree, Callable[[], None]]:
    """Parameters to differentiate, and a function that changes their modules back."""
    states = states_of(tree)
    own = with_cotangent(states, factor, _unscale_leaves)
    if not modules_of(tree):
        return own, lambda: None
    pairs = zip(jax.tree.leaves(own), jax.tree.leaves(states), strict=True)
    # The new array is kept too, so that no other one gets its identity.
    before = {id(new): (new, old) for new, old in pairs}

    def restored(leaf: PyTree) -> PyTree:
        if id(leaf) in before:
            return before[id(leaf)][1]
        return with_cotangent(leaf, factor, scale_leaves)

    def restore() -> None:
        updated(tree, jax.tree.map(restored, states_of(tree)))

    with explain_changes():
        return updated(tree, own), restore


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
