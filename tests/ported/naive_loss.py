"""A recurrent network with the logarithm of a sigmoid in its loss.

The public program is Equinox's `examples/train_rnn.py` in patrick-kidger/equinox. As
there, the model of GRU cells in a scan ends in a sigmoid, and the loss takes the
logarithms of this probability p and of 1 - p. In float16, p is 1 for logits above 8.4,
and the loss is then infinite, so this program needs a float32 sigmoid. Here the network
reads scikit-learn's breast cancer data instead of spirals: the three groups of ten
features, one after another.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

from helpers.ported import Ported, random_batches

FEATURES, LABELS = load_breast_cancer(return_X_y=True)
FEATURES = scale(FEATURES).reshape(-1, 3, 10).astype(np.float32)
WIDTH, BATCH, STEPS = 16, 32, 300


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key):
        cell_key, linear_key = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(FEATURES.shape[-1], WIDTH, key=cell_key)
        self.linear = eqx.nn.Linear(WIDTH, "scalar", key=linear_key)

    def __call__(self, sequence):
        def read(hidden, x):
            return self.cell(x, hidden), None

        hidden, _ = jax.lax.scan(read, jnp.zeros(WIDTH), sequence)
        return jax.nn.sigmoid(self.linear(hidden))


def loss_fn(model, batch):
    x, y = batch
    p = jax.vmap(model)(x)
    return jnp.mean(-y * jnp.log(p) - (1 - y) * jnp.log(1 - p))


class Program(Ported):
    falls_to = 0.2

    def __init__(self, half):
        super().__init__(half)
        self.tx = self.loss_scaled(optax.adam(1e-2))
        self.loss_fn = self.autocast(loss_fn)

    def init(self, seed):
        params = RNN(jax.random.key(seed))
        return {"params": params, "opt_state": self.tx.init(params)}

    def batches(self, seed):
        return random_batches(seed, STEPS, BATCH, (FEATURES, np.float32(LABELS)))
