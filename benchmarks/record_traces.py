"""Records the magnitudes of gradients in three short training runs, for `rules.py`.

    python benchmarks/record_traces.py

The script trains the demo's network and a convolutional network on scikit-learn's
digits, and a small language model on Python's own help texts. It trains in float32, so
that nothing overflows. `traces.npz` holds three figures a step: log2 of the largest
magnitude, and the mean and standard deviation of log2 of the nonzero magnitudes.
"""

import pathlib
import pydoc_data.topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from _lib.files import check_output_file
from optax_lossscale.demo import MLP, load_data

STEPS = 2000
FILE = pathlib.Path(__file__).with_name("traces.npz")
CONTEXT = 64


class ConvNet(nn.Module):
    """A network of two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, images):
        x = images.reshape(-1, 8, 8, 1)
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class LanguageModel(nn.Module):
    """A transformer of two layers of width 64, which predicts the next byte."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(128, 64)(tokens)
        x += self.param("position", nn.initializers.normal(0.02), (CONTEXT, 64))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x += nn.SelfAttention(4)(nn.LayerNorm()(x), mask)
            x += nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
        return nn.Dense(128)(nn.LayerNorm()(x))


def squared_error(outputs, labels):
    """Returns the mean squared error of one-hot labels, as the demo does."""
    return jnp.mean((outputs - jax.nn.one_hot(labels, 10)) ** 2)


def cross_entropy(logits, labels):
    """Returns the cross-entropy of the labels, averaged over all positions."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def magnitudes(grads: Any) -> jax.Array:
    """Returns the three figures of one step, `f32[3]`, from its gradients."""
    flat = jnp.abs(jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads)]))
    nonzero = flat > 0
    log2 = jnp.log2(jnp.where(nonzero, flat, 1))
    mean, std = jnp.mean(log2, where=nonzero), jnp.std(log2, where=nonzero)
    return jnp.stack([jnp.log2(jnp.max(flat)), mean, std])


def record(model, loss_fn, inputs, labels, batch_size, learning_rate) -> np.ndarray:
    """Trains with Adam, and returns the figures of every step, `f32[STEPS, 3]`."""
    tx = optax.adam(learning_rate)
    params = model.init(jax.random.key(0), inputs[:1])

    def step(carry, key):
        params, state = carry
        batch = jax.random.choice(key, len(inputs), (batch_size,))
        grads = jax.grad(
            lambda params: loss_fn(model.apply(params, inputs[batch]), labels[batch])
        )(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), magnitudes(grads)

    keys = jax.random.split(jax.random.key(1), STEPS)
    first = (params, tx.init(params))
    return np.asarray(jax.jit(lambda c, k: jax.lax.scan(step, c, k))(first, keys)[1])


def main() -> None:
    """Trains the three models, and writes `traces.npz`."""
    check_output_file(str(FILE))
    digits, _ = load_data()
    text = "".join(pydoc_data.topics.topics.values())
    tokens = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    windows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)]
    windows = jnp.asarray(windows.reshape(-1, CONTEXT + 1))
    traces = {
        "digits, the demo's MLP": record(
            MLP(jnp.float32), squared_error, *digits, 1024, 2e-3
        ),
        "digits, convolutions": record(ConvNet(), cross_entropy, *digits, 64, 1e-3),
        "text, transformer": record(
            LanguageModel(), cross_entropy, windows[:, :-1], windows[:, 1:], 16, 1e-3
        ),
    }
    np.savez_compressed(FILE, **{k: v.astype(np.float16) for k, v in traces.items()})


if __name__ == "__main__":
    main()
