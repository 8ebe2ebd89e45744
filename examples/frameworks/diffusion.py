"""A diffusion model with an average of its parameters. Install flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


class Denoiser(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        x = jnp.concatenate([x, jnp.sin(t), jnp.cos(t)], axis=1)
        for _ in range(2):
            x = nn.silu(nn.Dense(64)(x))
        return nn.Dense(2)(x)


predict_noise = ols.autocast(Denoiser().apply)  # To train and to sample.


def loss_fn(params, x, key):
    t_key, noise_key = jax.random.split(key)
    t = jax.random.uniform(t_key, (len(x), 1), maxval=jnp.pi / 2)
    noise = jax.random.normal(noise_key, x.shape)
    predicted = predict_noise(params, jnp.cos(t) * x + jnp.sin(t) * noise, t)
    return jnp.mean((predicted - noise) ** 2)


@jax.jit
def step(params, opt_state, average, x, key):
    grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state)
    loss, grads = grad_fn(params, x, key)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    new = optax.incremental_update(params, average, 0.01)
    average = ols.where_applied(opt_state, new, average)
    return params, opt_state, average, loss


@jax.jit
def sample(params, key):
    def denoise(x, times):
        t, next_t = times
        noise = predict_noise(params, x, jnp.full((len(x), 1), t))
        clean = (x - jnp.sin(t) * noise) / jnp.cos(t)
        return jnp.cos(next_t) * clean + jnp.sin(next_t) * noise, None

    x, times = jax.random.normal(key, (512, 2)), jnp.linspace(1.5, 0, 31)
    return jax.lax.scan(denoise, x, (times[:-1], times[1:]))[0]


x, t = jnp.zeros((1, 2)), jnp.zeros((1, 1))
params = average = Denoiser().init(jax.random.key(0), x, t)
tx = ols.loss_scaled(optax.adam(3e-3))
opt_state = tx.init(params)
for key in jax.random.split(jax.random.key(1), 600):  # Points on a circle.
    angle = jax.random.uniform(key, (256, 1), maxval=2 * jnp.pi)
    x = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)
    states = params, opt_state, average
    params, opt_state, average, loss = step(*states, x, key)
ols.raise_if_stalled(opt_state)
radius = jnp.linalg.norm(sample(average, jax.random.key(2)), axis=1).mean()
print(f"loss {loss:.2f}, scale {ols.get_loss_scale(opt_state):.0f}")
print(f"mean radius of the samples {radius:.1f}")
# loss 0.35, scale 32768
# mean radius of the samples 1.0
