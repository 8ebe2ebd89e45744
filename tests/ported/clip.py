"""A contrastive loss with a learned temperature.

After `src/open_clip/loss.py` and `src/training/train.py` of mlfoundations/open_clip.
Here, instead of an image and its text, the upper and the lower half of a digit belong
together. As there, the temperature is kept in its range after the update.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from helpers.ported import Ported, digits, random_batches


def encode(params, half):
    hidden = jax.nn.gelu(half @ params["w1"] + params["b1"])
    features = hidden @ params["w2"]
    return features / jnp.linalg.norm(features, axis=-1, keepdims=True)


class Program(Ported):
    def __init__(self, half):
        super().__init__(half)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
        self.tx = self.loss_scaled(tx)
        self.loss_fn = self.autocast(self.contrastive_loss)

    def contrastive_loss(self, params, batch):
        upper, lower = batch
        upper = encode(params["upper"], upper)
        lower = encode(params["lower"], lower)
        logits = jnp.exp(params["log_scale"]) * upper @ lower.T
        losses = [
            optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.arange(len(logits)), axis=axis
            )
            for axis in (0, 1)
        ]
        return jnp.mean(jnp.stack(losses))

    def init(self, seed):
        init = jax.nn.initializers.he_normal()
        keys = jax.random.split(jax.random.key(seed), (2, 2))
        towers = {
            name: {
                "w1": init(first, (32, 128)),
                "b1": jnp.zeros(128),
                "w2": init(second, (128, 32)),
            }
            for name, (first, second) in zip(("upper", "lower"), keys, strict=True)
        }
        params = {**towers, "log_scale": jnp.log(1 / 0.07)}
        return {"params": params, "opt_state": self.tx.init(params)}

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, batch):
        state, loss = super().step(state, batch)
        params = dict(state["params"])
        params["log_scale"] = jnp.clip(params["log_scale"], 0, jnp.log(100.0))
        return {**state, "params": params}, loss

    def batches(self, seed):
        images = digits()[0].reshape(-1, 64)
        return random_batches(seed, 300, 128, (images[:, :32], images[:, 32:]))
