"""A mixture density network, whose loss is the log of a sum of small densities.

After `example/example.py` and `mdn/mdn.py` of sagelywizard/pytorch-mdn, with Bishop's
inverse problem as data: x = y + 0.3 sin(2 pi y) + noise, where one x has up to three y.
As there, the densities are exponentials, and are added before the logarithm is taken.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.ported import Ported

GAUSSIANS = 5


def network(params, x):
    hidden = jnp.tanh(x @ params["w_in"] + params["b_in"])
    outputs = hidden @ params["w_out"] + params["b_out"]
    return jnp.split(outputs, 3, axis=-1)


class Program(Ported):
    def __init__(self, half):
        super().__init__(half)
        self.tx = self.loss_scaled(optax.adam(optax.cosine_decay_schedule(5e-3, 400)))
        self.loss_fn = self.autocast(self.negative_log_likelihood)

    def negative_log_likelihood(self, params, batch):
        x, y = batch
        logits, means, log_deviations = network(params, x)
        z = (y - means) * jnp.exp(-log_deviations)
        densities = jnp.exp(-(z**2) / 2 - log_deviations) / jnp.sqrt(2 * jnp.pi)
        mixture = (jax.nn.softmax(logits) * densities).sum(axis=-1)
        return -jnp.log(mixture).mean()

    def score(self, state, losses):
        return np.exp(
            np.mean(losses)
        )  # A likelihood, as its logarithm can be negative.

    def init(self, seed):
        init = jax.nn.initializers.lecun_normal()
        in_key, out_key = jax.random.split(jax.random.key(seed))
        params = {
            "w_in": 4 * init(in_key, (1, 32)),
            "b_in": jax.random.normal(in_key, (32,)),
            "w_out": init(out_key, (32, 3 * GAUSSIANS)),
            "b_out": jnp.zeros(3 * GAUSSIANS),
        }
        return {"params": params, "opt_state": self.tx.init(params)}

    def batches(self, seed):
        rng = np.random.default_rng(seed)
        y = rng.uniform(size=(400, 128, 1))
        x = y + 0.3 * np.sin(2 * np.pi * y) + rng.uniform(-0.1, 0.1, size=y.shape)
        return list(zip(np.float32(x), np.float32(y), strict=True))
