"""A model that solves for a root with Optimistix. Install optimistix."""

import os

os.environ["EQX_ON_ERROR"] = "nan"  # Before the first import of Equinox.
import jax
import jax.numpy as jnp
import optax
import optimistix as optx

import optax_lossscale as ols


def residual(z, args):
    weights, drive = args
    return z + weights.T @ jnp.tanh(weights @ z) - drive  # Has one zero.


@ols.full_precision  # The tolerance is finer than float16.
def solve(weights, drive):
    solver, guess = optx.Newton(rtol=1e-5, atol=1e-5), jnp.zeros_like(drive)
    return optx.root_find(residual, solver, guess, (weights, drive)).value


@ols.autocast  # The products around the solver run in float16.
def loss_fn(params, x, y):
    drive = x @ params["in"]
    z = jax.vmap(solve, (None, 0))(params["inner"], drive)
    return jnp.mean((z @ params["out"] - y) ** 2)


@jax.jit
def step(params, opt_state, x, y):
    loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


w = 0.2 * jax.random.normal(jax.random.key(0), (20, 16))
params = {"in": w[:3], "inner": w[3:19], "out": w[19:].T}
x = jax.random.normal(jax.random.key(1), (64, 3))
y = jnp.sin(x.sum(axis=1, keepdims=True))
tx = ols.loss_scaled(optax.adam(1e-2))
opt_state = tx.init(params)
for _ in range(100):
    params, opt_state, loss = step(params, opt_state, x, y)
ols.raise_if_stalled(opt_state)
print(f"loss {loss:.2f}, scale {ols.get_loss_scale(opt_state):.0f}")
# loss 0.02, scale 32768
