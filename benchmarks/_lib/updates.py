"""One optimizer update from scaled gradients, in each way that is compared."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ols
from optax_lossscale.compat import flax as compat

Tree = Any

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adamw, clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "sgd": optax.sgd(1e-3),
    "sgd with momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-4),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
}


class Way(NamedTuple):
    """A way to update: `init` makes the state, `step` updates from scaled gradients.

    Attributes:
      init: `init(params)` returns the state.
      step: `step(params, state, grads)` returns the new parameters and state.
    """

    init: Callable[[Tree], Tree]
    step: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def bare(inner: optax.GradientTransformation) -> Way:
    """Runs the optimizer alone, after casting the gradients to float32."""

    def step(params, state, grads):
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Way(inner.init, step)


def loss_scaled(inner: optax.GradientTransformation, **options: Any) -> Way:
    """Wraps the optimizer with `optax_lossscale.loss_scaled`."""
    tx = ols.loss_scaled(inner, **options)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Way(tx.init, step)


def read_alone(_: optax.GradientTransformation) -> Way:
    """Reads float32 gradients and does nothing else: the least that a check costs."""

    def step(params, state, grads):
        # A library computes products with vectors, at the speed of the memory.
        products = [grad @ jnp.zeros(grad.shape[-1:]) for grad in grads]
        return params, sum(jnp.sum(product) for product in products)

    return Way(lambda params: jnp.float32(0), step)


@jax.custom_vjp
def _loss_with_grads(params, grads):
    """A loss whose gradient is `grads`; `DynamicScale` only takes a loss function."""
    return jnp.float32(0)


_loss_with_grads.defvjp(
    lambda params, grads: (jnp.float32(0), grads),
    lambda grads, _: (grads, jax.tree.map(jnp.zeros_like, grads)),
)


def flax_dynamic_scale(
    inner: optax.GradientTransformation, make: Callable[[], Any] = DynamicScale
) -> Way:
    """Uses a `DynamicScale`, with the selects that Flax's documentation asks for."""

    def init(params):
        return make(), inner.init(params)

    def step(params, state, grads):
        scale, old = state
        halves = jax.tree.map(lambda p, g: p.astype(g.dtype), params, grads)
        grad_fn = scale.value_and_grad(_loss_with_grads)
        scale, finite, _, grads = grad_fn(halves, grads)
        updates, new = inner.update(grads, old, params)
        updated = optax.apply_updates(params, updates)
        params, new = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (updated, new), (params, old)
        )
        return params, (scale, new)

    return Way(init, step)


def apply_if_finite(inner: optax.GradientTransformation) -> Way:
    """Divides the gradients by the scale, then uses `optax.apply_if_finite`."""
    tx = optax.apply_if_finite(inner, max_consecutive_errors=2**30)

    def init(params):
        return jnp.float32(2.0**15), tx.init(params)

    def step(params, state, grads):
        scale, old = state
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32) / scale, grads)
        updates, new = tx.update(grads, old, params)
        scale = jnp.where(new.last_finite, scale, scale / 2)
        return optax.apply_updates(params, updates), (scale, new)

    return Way(init, step)


def by_hand(inner: optax.GradientTransformation) -> Way:
    """Checks every leaf, and selects parameters and state, as one writes it by hand."""

    def init(params):
        return jnp.float32(2.0**15), jnp.int32(0), inner.init(params)

    def step(params, state, grads):
        scale, count, old = state
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32) / scale, grads)
        checks = [jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)]
        finite = jnp.stack(checks).all()
        updates, new = inner.update(grads, old, params)
        updated = optax.apply_updates(params, updates)
        params, new = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (updated, new), (params, old)
        )
        count = jnp.where(finite, count + 1, 0)
        grown = jnp.where(count % 2000 == 0, scale * 2, scale)
        return params, (jnp.where(finite, grown, scale / 2), count, new)

    return Way(init, step)


WAYS = {
    "bare optimizer": bare,
    "optax_lossscale": loss_scaled,
    "flax DynamicScale": flax_dynamic_scale,
    "compat.flax DynamicScale": partial(flax_dynamic_scale, make=compat.DynamicScale),
    "optax.apply_if_finite": apply_if_finite,
    "by hand": by_hand,
}

# A GPT of six layers, each with four products, four biases and two normalizations.
LAYER = [(512, 1536), (512, 512), (512, 2048), (2048, 512), (1536,), (2048,)]
SHAPES = {
    "GPT's 76": [(4096, 512), (256, 512), *6 * (LAYER + 6 * [(512,)]), *2 * [(512,)]],
    "80 that differ": [(64 + 8 * i, 256 + 4 * i) for i in range(80)],
}


def shape_of(size: int) -> tuple[int, ...]:
    """Returns the shape of a leaf of `size` entries.

    If 10,000 divides the size it is a matrix, which Muon and Adafactor treat specially.
    """
    return (size // 100, 100) if size % 10000 == 0 else (size,)
