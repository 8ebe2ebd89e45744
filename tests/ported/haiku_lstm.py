"""A language model of characters, with two LSTMs of Haiku.

The public program is Haiku's `examples/rnn/train.py` in google-deepmind/dm-haiku. As
there, `hk.dynamic_unroll` runs two LSTMs and a network over one-hot characters, and
Adam trains it. Here the text is that of Python's `help()` instead of Shakespeare's, the
model is small, and the sums of losses and of characters are those of a weighted batch.
"""

import functools
import pydoc_data.topics

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.ported import Ported

TOPICS = pydoc_data.topics.topics
TEXT = "".join(TOPICS[name] for name in sorted(TOPICS)).encode("ascii", "ignore")
TEXT = np.frombuffer(TEXT, np.uint8)
WIDTH, LENGTH, BATCH, STEPS = 64, 32, 16, 200


@hk.without_apply_rng
@hk.transform
def apply(inputs):
    core = hk.DeepRNN(
        [
            lambda x: jax.nn.one_hot(x, 128),
            hk.LSTM(WIDTH),
            jax.nn.relu,
            hk.LSTM(WIDTH),
            hk.nets.MLP([WIDTH, 128]),
        ]
    )
    return hk.dynamic_unroll(core, inputs, core.initial_state(inputs.shape[1]))[0]


def loss_fn(params, batch):
    log_probs = jax.nn.log_softmax(apply.apply(params, batch["inputs"]))
    losses = -jnp.sum(jax.nn.one_hot(batch["targets"], 128) * log_probs, axis=-1)
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


class Program(Ported):
    falls_to = 0.7

    def __init__(self, half):
        super().__init__(half)
        self.tx = self.loss_scaled(optax.adam(5e-3))
        self.loss_fn = self.autocast(loss_fn)

    def init(self, seed):
        params = apply.init(jax.random.key(seed), np.zeros((1, 1), np.uint8))
        return {"params": params, "opt_state": self.tx.init(params)}

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, batch):
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = self.value_and_grad(self.loss_fn, opt_state)(params, batch)
        updates, opt_state = self.tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}, loss

    def batches(self, seed):
        """Batches `[length, batch]`, time first, as Haiku unrolls them."""
        limit = len(TEXT) - LENGTH
        starts = np.random.default_rng(seed).integers(limit, size=(STEPS, BATCH))
        texts = [TEXT[start + np.arange(LENGTH + 1)[:, None]] for start in starts]
        weights = np.ones((LENGTH, BATCH), np.float32)
        return [
            {"inputs": text[:-1], "targets": text[1:], "weights": weights}
            for text in texts
        ]
