"""Trains a GPT on the bytes of a text, with Flax NNX.

    python examples/train_gpt.py [--precision float16] [--text FILE_OR_FOLDER]

Without `--text` it reads the topics of Python's `help()`, which are 500 to 700 kB of
English, depending on the version of Python. It trains on the first nine tenths, and
holds out the rest. `held_out_bits_per_byte` is its loss there in bits: a uniform guess
has 8, and less is better.
"""

import argparse
import math
import pathlib
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_lossscale as ols
from loop import make_mesh, train
from options import existing, parse_options, positive
from precision import cast, cast_params, scale_figures, with_loss_scale

HEAD_SIZE = 32


class Block(nnx.Module):
    """Causal attention and a network of two layers, each added to its input."""

    def __init__(self, width: int, dropout: float, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.to_heads = nnx.Linear(width, 3 * width, rngs=rngs)
        self.from_heads = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.to_heads(self.norms[0](x))
        heads = heads.reshape(*x.shape[:2], -1, 3 * HEAD_SIZE)
        mixed = jax.nn.dot_product_attention(*jnp.split(heads, 3, -1), is_causal=True)
        x = x + self.dropout(self.from_heads(mixed.reshape(x.shape)))
        hidden = nnx.gelu(self.up(self.norms[1](x)))
        return x + self.dropout(self.down(hidden))


class GPT(nnx.Module):
    """Predicts the next byte at every position of `i32[batch, length]`."""

    def __init__(self, options: argparse.Namespace, rngs: nnx.Rngs) -> None:
        width = options.width
        make = nnx.initializers.normal(0.02)
        self.bytes = nnx.Embed(256, width, embedding_init=make, rngs=rngs)
        self.positions = nnx.Embed(
            options.length, width, embedding_init=make, rngs=rngs
        )
        blocks = [Block(width, options.dropout, rngs) for _ in range(options.layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        # The embedding of the bytes is the output layer too.
        return self.bytes.attend(self.norm(x))


def loss_fn(model: GPT, text: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of `i32[batch, length + 1]`, in nats per byte."""
    logits, targets = model(text[:, :-1]), text[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """Returns AdamW with a schedule, clipping, accumulation and a loss scale."""
    steps = max(options.steps // options.accumulate, 2)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, warmup_steps=max(steps // 20, 1), decay_steps=steps
    )

    def matrices(params):  # Weights decay; biases and normalization scales do not.
        return jax.tree.map(lambda x: x.ndim > 1, params)

    inner = optax.adamw(rate, b2=0.99, weight_decay=0.1, mask=matrices)
    inner = optax.chain(optax.clip_by_global_norm(1.0), inner)
    if options.accumulate > 1:
        inner = optax.MultiSteps(inner, options.accumulate)
    return with_loss_scale(inner, options)


def load_text(path: pathlib.Path | None) -> np.ndarray:
    """Returns the bytes of a file, of the texts in a folder, or of Python's help."""
    if path is None:
        topics = pydoc_data.topics.topics
        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        files = [path] if path.is_file() else sorted(path.rglob("[!.]*"))
        parts = [file.read_bytes() for file in files if file.is_file()]
        data = b"".join(part for part in parts if b"\0" not in part)  # Texts only.
        print(f"{len(data)} bytes of text in {path}")
    return np.frombuffer(data, np.uint8).astype(np.int32)


def generate(model: GPT, prompt: str, length: int, count: int) -> str:
    """Returns text that the model continues, drawn byte by byte."""
    model.eval()

    @nnx.jit
    def draw(model, window, last, key):
        return jax.random.categorical(key, model(window[None])[0, last])

    text = list(prompt.encode())
    for key in jax.random.split(jax.random.key(0), count):
        recent = text[-length:]
        window = jnp.array(recent + [0] * (length - len(recent)))
        text.append(int(draw(model, window, len(recent) - 1, key)))
    return bytes(text).decode(errors="replace")


def main() -> None:
    """Reads the options, trains, and prints a sample of text."""
    options = parse_options(
        __doc__.splitlines()[0],
        steps=500,
        report=50,
        text=(existing, None, "a file or folder to learn from"),
        layers=(positive, 3, "number of blocks"),
        width=(positive, 128, f"width of a block, a multiple of {HEAD_SIZE}"),
        length=(positive, 128, "bytes of a sequence"),
        batch=(positive, 8, "sequences of a step"),
        accumulate=(positive, 1, "steps from one update to the next"),
        dropout=(float, 0.1, "share of values that dropout drops"),
        learning_rate=(float, 3e-3, "highest learning rate"),
    )
    if options.width % HEAD_SIZE:
        raise SystemExit(f"--width must be a multiple of {HEAD_SIZE}")
    mesh = make_mesh(options)
    data = load_text(options.text)
    if len(data) < (least := 10 * (options.length + 1)):
        raise SystemExit(f"the text has {len(data)} bytes, but needs {least} or more")
    training, held_out = np.split(data, [len(data) * 9 // 10])

    def make() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(options, nnx.Rngs(options.seed))
        nnx.update(model, cast_params(nnx.state(model, nnx.Param), options))
        return model, nnx.Optimizer(model, make_optimizer(options), wrt=nnx.Param)

    structure = nnx.graphdef(nnx.eval_shape(make))
    run_loss = cast(loss_fn, options)

    last_start = len(training) - options.length - 1

    def windows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return text[starts[:, None] + np.arange(options.length + 1)]

    def batch_of(index: int) -> np.ndarray:
        rng = np.random.default_rng((options.seed, index))
        return windows(training, rng.integers(0, last_start, options.batch))

    def step(state: nnx.State, text: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(structure, state)
        loss, grads = ols.scaled_value_and_grad(run_loss, optimizer)(model, text)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    starts = np.linspace(0, len(held_out) - options.length - 1, 64).astype(int)
    test_text = windows(held_out, starts)

    def evaluate(state: nnx.State) -> dict[str, jax.Array]:
        model, optimizer = nnx.merge(structure, state)
        model.eval()
        loss, text = run_loss(model, test_text), test_text[: options.batch]
        grads = ols.scaled_grad(run_loss, optimizer)(model, text)
        params = nnx.state(model, nnx.Param)
        # This model is a copy, so the state of the run keeps its parameters.
        nnx.update(model, optax.tree.cast(params, jnp.float32))
        exact = nnx.grad(loss_fn)(model, text)
        return {
            "held_out_bits_per_byte": loss / math.log(2),
            **scale_figures(optimizer, grads, exact),
        }

    def start() -> nnx.State:
        return nnx.state(make())

    def optimizer_of(state: nnx.State) -> nnx.Optimizer:
        return nnx.merge(structure, state)[1]

    state = train(options, mesh, start, batch_of, step, evaluate, optimizer_of)
    if jax.process_count() == 1:
        print(generate(nnx.merge(structure, state)[0], "The ", options.length, 200))


if __name__ == "__main__":
    main()
