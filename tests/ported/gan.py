"""A GAN of two optimizers, with one loss scale for both.

After `implementations/gan/gan.py` of eriklindernoren/PyTorch-GAN, with the digits of
scikit-learn instead of MNIST, and smaller networks. As there, both networks learn from
the same generated images, so that both gradients belong to the old parameters, and one
update takes both.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from helpers.ported import Ported, digits, random_batches

LATENTS = 16


class Generator(nn.Module):
    @nn.compact
    def __call__(self, noise, is_training):
        hidden = nn.leaky_relu(nn.Dense(64)(noise), 0.2)
        hidden = nn.Dense(128)(hidden)
        hidden = nn.BatchNorm(not is_training, momentum=0.8)(hidden)
        return nn.tanh(nn.Dense(64)(nn.leaky_relu(hidden, 0.2)))


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, images):
        for width in (128, 64):
            images = nn.leaky_relu(nn.Dense(width)(images), 0.2)
        return nn.Dense(1)(images)


def distances(a, b):
    return jnp.linalg.norm(a[:, None] - b, axis=-1).mean()


class Program(Ported):
    def __init__(self, half):
        super().__init__(half)
        optimizers = {
            "generator": optax.adam(1e-3, b1=0.5),
            "discriminator": optax.adam(1e-3, b1=0.5),
        }
        labels = {name: name for name in optimizers}
        self.tx = self.loss_scaled(optax.partition(optimizers, labels))
        self.generator_loss = self.autocast(self.generator_loss)
        self.discriminator_loss = self.autocast(self.discriminator_loss)

    def generator_loss(self, generator, discriminator, stats, noise):
        variables = {"params": generator, "batch_stats": stats}
        fake, new = Generator().apply(variables, noise, True, mutable="batch_stats")
        score = Discriminator().apply({"params": discriminator}, fake)
        return -nn.log_sigmoid(score).mean(), (fake, new["batch_stats"])

    def discriminator_loss(self, discriminator, fake, real):
        of_real, of_fake = (
            Discriminator().apply({"params": discriminator}, x) for x in (real, fake)
        )
        return -(nn.log_sigmoid(of_real) + nn.log_sigmoid(-of_fake)).mean() / 2

    def init(self, seed):
        first, second, key = jax.random.split(jax.random.key(seed), 3)
        generator = Generator().init(first, jnp.zeros((2, LATENTS)), True)
        discriminator = Discriminator().init(second, jnp.zeros((2, 64)))
        params = {
            "generator": generator["params"],
            "discriminator": discriminator["params"],
        }
        stats, opt_state = generator["batch_stats"], self.tx.init(params)
        return {"params": params, "opt_state": opt_state, "stats": stats, "key": key}

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, real):
        params, opt_state = state["params"], state["opt_state"]
        generator, discriminator = params["generator"], params["discriminator"]
        key, noise_key = jax.random.split(state["key"])
        noise = jax.random.normal(noise_key, (len(real), LATENTS))

        grad_fn = self.value_and_grad(self.generator_loss, opt_state, has_aux=True)
        result, generator_grads = grad_fn(
            generator, discriminator, state["stats"], noise
        )
        loss, (fake, stats) = result
        grad_fn = self.value_and_grad(self.discriminator_loss, opt_state)
        _, discriminator_grads = grad_fn(discriminator, fake, real)

        grads = {"generator": generator_grads, "discriminator": discriminator_grads}
        updates, opt_state = self.tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        stats = self.where_applied(opt_state, stats, state["stats"])
        state = {**state, "stats": stats, "key": key}
        return {**state, "params": params, "opt_state": opt_state}, loss

    def score(self, state, losses):
        """The energy distance between generated and real digits."""
        variables = {
            "params": state["params"]["generator"],
            "batch_stats": state["stats"],
        }
        noise = jax.random.normal(jax.random.key(0), (500, LATENTS))
        fake = Generator().apply(variables, noise, False)
        real = 2 * digits()[0][:500].reshape(-1, 64) - 1
        return 2 * distances(fake, real) - distances(fake, fake) - distances(real, real)

    def batches(self, seed):
        images = 2 * digits()[0].reshape(-1, 64) - 1
        return random_batches(seed, 400, 64, images)
