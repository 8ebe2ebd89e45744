"""A language model with rotary embeddings, whose layers are a scan.

The public program is MaxText's decoder: `src/MaxText/layers/decoders_nnx.py` in
AI-Hypercomputer/maxtext. As there, the parameters of all layers are stacked, and
`jax.lax.scan` runs over them with `jax.checkpoint` around a layer, which has RMS norms,
rotary embeddings and a gated network; the loss is weighted token by token. Here the
model is small and has 128 characters, and it reads the source of Python's `argparse`.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

TEXT = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8) % 128
LAYERS, HEADS, WIDTH, LENGTH, BATCH, STEPS = 3, 2, 32, 64, 8, 100
FALLS_TO, LOW_SHARE = 0.6, 0.5
RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, STEPS // 10, STEPS)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE))


def rotate(x):
    """Turns each pair of features of `f32[batch, length, heads, size]` by its angle."""
    frequencies = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.to_heads, self.from_heads = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.network_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate, self.up = linear(WIDTH, 3 * WIDTH), linear(WIDTH, 3 * WIDTH)
        self.down = linear(3 * WIDTH, WIDTH)

    def __call__(self, x):
        heads = self.to_heads(self.attention_norm(x))
        heads = heads.reshape(*x.shape[:2], 3 * HEADS, -1)
        query, key, value = jnp.split(heads, 3, axis=2)
        mixed = jax.nn.dot_product_attention(
            rotate(query), rotate(key), value, is_causal=True
        )
        x = x + self.from_heads(mixed.reshape(x.shape))
        y = self.network_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(128, WIDTH, rngs=rngs)
        stack = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Layer(rngs)))
        self.layers = stack(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, 128, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        graph, stacked = nnx.split(self.layers)

        @jax.checkpoint
        def apply(x, layer):
            return nnx.merge(graph, layer)(x), None

        x, _ = jax.lax.scan(apply, self.embed(tokens), stacked)
        return self.logits(self.norm(x))


def init(key):
    return nnx.state(Decoder(nnx.Rngs(key)))


def loss_fn(params, key, batch):
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))
    logits = nnx.merge(graph, params)(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


def batches(seed):
    """Spaces are common and easy, so they weigh less than other characters."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(TEXT) - LENGTH, size=(STEPS, BATCH, 1))
    texts = np.int32(TEXT[starts + np.arange(LENGTH + 1)])
    weights = np.where(texts[..., 1:] == ord(" "), 0.5, 1.0).astype(np.float32)
    return [
        {"inputs": text[:, :-1], "targets": text[:, 1:], "weights": weight}
        for text, weight in zip(texts, weights, strict=True)
    ]
