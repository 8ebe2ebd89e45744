"""Models of a real size, and small ones of the same kind for tests.

Nothing here makes an array, so training steps can be compiled for an absent device.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from _lib.models import Decoder, cross_entropy, next_token_loss

Tree = Any
# A loss function, and the shapes of its parameters and of its batch.
Case = tuple[Callable[..., jax.Array], Tree, tuple[Tree, ...]]


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(
            nn.Conv, self.features, use_bias=False, dtype=self.dtype
        )
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, dtype=self.dtype
        )
        y = nn.relu(norm()(conv(kernel_size=(3, 3), strides=self.stride)(x)))
        y = norm()(conv(kernel_size=(3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv(kernel_size=(1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class BottleneckBlock(nn.Module):
    """Three convolutions, of which the first and last are 1 x 1, and a shortcut."""

    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, dtype=self.dtype
        )
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides=self.stride)(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network; `blocks` says how many blocks each stage has.

    `has_large_images` halves the size of an image twice before the first stage.
    """

    blocks: tuple[int, ...]
    block: type[nn.Module]
    width: int = 64
    has_large_images: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        size, stride = (7, 2) if self.has_large_images else (3, 1)
        conv = nn.Conv(
            self.width, (size, size), stride, use_bias=False, dtype=self.dtype
        )
        norm = nn.BatchNorm(use_running_average=False, dtype=self.dtype)
        x = nn.relu(norm(conv(x)))
        if self.has_large_images:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                features = self.width * 2**stage
                x = self.block(features, stride, self.dtype)(x)
        return nn.Dense(100, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


class LanguageLSTM(nn.Module):
    """Two LSTMs that predict the next token."""

    vocabulary: int = 4096
    width: int = 512
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """Returns an array that is only described."""
    return jax.ShapeDtypeStruct(dims, dtype)


def language_case(model: nn.Module, batch: int, length: int) -> Case:
    """Makes the case of a model that predicts the next token."""
    tokens = shape(batch, length)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return next_token_loss(model), params, (tokens,)


def gpt(dtype: Any, small: bool) -> Case:
    """Makes the case of a GPT of six layers with 21 million parameters."""
    width, vocabulary, length = (32, 64, 16) if small else (512, 4096, 256)
    model = Decoder(vocabulary, length, width, depth=6, dtype=dtype)
    return language_case(model, 2 if small else 16, length)


def large_gpt(dtype: Any, small: bool) -> Case:
    """Makes the case of a GPT of twelve layers with 125 million parameters."""
    width, vocabulary, length = (24, 64, 16) if small else (768, 50_304, 1024)
    depth, batch = (1, 2) if small else (12, 4)
    model = Decoder(vocabulary, length, width, depth, dtype=dtype, heads=12)
    return language_case(model, batch, length)


def image_case(model: nn.Module, batch: int, size: int) -> Case:
    """Makes the case of a model that classifies images."""
    images = shape(batch, size, size, 3, dtype=jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss_fn(params, stats, images, labels):
        state = {"params": params, "batch_stats": stats}
        logits, _ = model.apply(state, images, mutable=["batch_stats"])
        return cross_entropy(logits.astype(jnp.float32), labels)

    batch_of_images = (variables["batch_stats"], images, shape(batch))
    return loss_fn, variables["params"], batch_of_images


def resnet_18(dtype: Any, small: bool) -> Case:
    """Makes the case of a ResNet-18 on images of 32 x 32."""
    width = 8 if small else 64
    model = ResNet((2, 2, 2, 2), ResidualBlock, width, dtype=dtype)
    return image_case(model, 4 if small else 128, 32)


def resnet_50(dtype: Any, small: bool) -> Case:
    """Makes the case of a ResNet-50 on images of 224 x 224, with 100 classes."""
    blocks, width = ((1,), 8) if small else ((3, 4, 6, 3), 64)
    model = ResNet(blocks, BottleneckBlock, width, has_large_images=True, dtype=dtype)
    return image_case(model, 4, 32) if small else image_case(model, 32, 224)


def lstm(dtype: Any, small: bool) -> Case:
    """Makes the case of two LSTMs over sequences of 64 tokens."""
    width, vocabulary = (16, 64) if small else (512, 4096)
    model = LanguageLSTM(vocabulary, width, dtype)
    return language_case(model, 2 if small else 64, 8 if small else 64)


MODELS: dict[str, Callable[[Any, bool], Case]] = {
    "GPT": gpt,
    "ResNet-18": resnet_18,
    "LSTM": lstm,
    "GPT, 125 M": large_gpt,
    "ResNet-50": resnet_50,
}
