"""A variational autoencoder whose encoder predicts `log_var`.

After `examples/vae` of google/flax, with the digits of scikit-learn instead of
binarized MNIST, a smaller network and fewer steps.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from helpers.ported import Ported, digits, random_batches

LATENTS = 8


class VAE(nn.Module):
    @nn.compact
    def __call__(self, images, key):
        hidden = nn.relu(nn.Dense(128)(images))
        mean, log_var = nn.Dense(LATENTS)(hidden), nn.Dense(LATENTS)(hidden)
        noise = jax.random.normal(key, mean.shape)
        latent = mean + noise * jnp.exp(log_var / 2)
        logits = nn.Dense(images.shape[-1])(nn.relu(nn.Dense(128)(latent)))
        return logits, mean, log_var


class Program(Ported):
    unprotected = ("key", "train_state/step")  # Flax counts skipped steps, too.
    falls_to = 0.6  # A pixel costs log(2) at first, and never less than its entropy.

    def __init__(self, half):
        super().__init__(half)
        self.tx = self.loss_scaled(optax.adam(2e-3))
        self.loss_fn = self.autocast(self.negative_elbo)

    def negative_elbo(self, params, images, key):
        logits, mean, log_var = VAE().apply(params, images, key)
        error = optax.sigmoid_binary_cross_entropy(logits, images).sum(axis=-1)
        divergence = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(axis=-1)
        return (error + divergence).mean()

    def init(self, seed):
        key, init_key = jax.random.split(jax.random.key(seed))
        params = VAE().init(init_key, jnp.zeros((1, 64)), key)
        train_state = TrainState.create(apply_fn=None, params=params, tx=self.tx)
        return {"train_state": train_state, "key": key}

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, images):
        train_state, key = state["train_state"], state["key"]
        key, noise_key = jax.random.split(key)
        grad_fn = self.value_and_grad(self.loss_fn, train_state)
        loss, grads = grad_fn(train_state.params, images, noise_key)
        train_state = train_state.apply_gradients(grads=grads)
        return {"train_state": train_state, "key": key}, loss

    def batches(self, seed):
        images = digits()[0].reshape(-1, 64)
        return random_batches(seed, 300, 64, images)
