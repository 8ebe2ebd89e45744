"""Adam and loss scaling by hand. Nothing but this library needs to be installed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import optax_lossscale as ols

rule = ols.dynamic_loss_scale()


class State(NamedTuple):  # All that a checkpoint must hold.
    params: Any
    means: Any
    squares: Any
    count: jax.Array
    loss_scale: ols.LossScaleState


def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return State(params, zeros, zeros, jnp.int32(0), rule.init())


@ols.autocast
def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def adam(state, grads, rate=1e-2, b1=0.9, b2=0.999):
    count = state.count + 1
    means = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.means, grads)
    squares = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.squares, grads)

    def move(param, m, v):
        m, v = m / (1 - b1**count), v / (1 - b2**count)
        return param - rate * m / (jnp.sqrt(v) + 1e-8)

    params = jax.tree.map(move, state.params, means, squares)
    return State(params, means, squares, count, state.loss_scale)


@jax.jit
def step(state, x, y):
    grad_fn = ols.scaled_value_and_grad(loss_fn, state)
    loss, scaled_grads = grad_fn(state.params, x, y)  # The true loss.
    grads = ols.unscale(scaled_grads, state)  # Log and clip these.
    finite = ols.all_finite(grads)
    new = adam(state, grads)
    loss_scale = rule.adjust(state.loss_scale, finite)
    new = ols.where_applied(loss_scale, new[:4], state[:4])  # Or skip.
    return State(*new, loss_scale), loss


x = jax.random.normal(jax.random.key(0), (256, 4))
y = jnp.sin(x.sum(axis=1, keepdims=True))
w = jax.random.normal(jax.random.key(1), (5, 32)) / 2
state = init({"in": w[:4], "out": w[4:].T})
for _ in range(300):
    state, loss = step(state, x, y)
print(f"loss {loss:.2f}, scale {ols.get_loss_scale(state):.0f}")
state, loss = step(state, x.at[0, 0].set(jnp.nan), y)
print(f"loss {loss}, scale {ols.get_loss_scale(state):.0f}, Adam's count {state.count}")
ols.raise_if_stalled(state)
# loss 0.03, scale 32768
# loss nan, scale 16384, Adam's count 300
