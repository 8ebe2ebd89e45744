"""Whole training steps: models of a real size, in each way to train them.

Nothing here makes an array, so the steps can be compiled for an absent device.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ols
from _lib.models import Decoder, cross_entropy, next_token_loss
from optax_lossscale.compat import flax as compat

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
    """A residual network of four stages.

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
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adamw, clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    ),
    "adamw, accumulated": lambda: optax.MultiSteps(optax.adamw(1e-3), 4),
    "sgd with momentum": lambda: optax.sgd(1e-3, momentum=0.9),
}


class Way(NamedTuple):
    """A way to compute.

    Attributes:
      dtype: The dtype of Flax's layers, as one sets it by hand.
      level: The level of autocast, if it is used.
      low_dtype: The dtype to which autocast casts.
      precision: The precision of float32 products, or `None` for JAX's default, which
        is TF32 on a GPU that has it.
      has_masters: Whether the parameters are float16, with float32 masters.
      grad_bytes: Bytes of an entry of a weight's gradient, where it is produced.
    """

    dtype: Any = None
    level: str | None = None
    low_dtype: Any = jnp.float16
    precision: str | None = None
    has_masters: bool = False
    grad_bytes: int = 4


WAYS = {
    "float32": Way(),
    "by hand": Way(dtype=jnp.float16, grad_bytes=2),
    "autocast, O1": Way(level="O1"),
    "autocast, O2": Way(level="O2"),
    "masters": Way(dtype=jnp.float16, has_masters=True, grad_bytes=2),
    "float32, highest": Way(precision="highest"),
    "TF32": Way(precision="tensorfloat32"),
    "autocast, bfloat16": Way(level="O1", low_dtype=jnp.bfloat16),
    "O2, masters": Way(level="O2", has_masters=True, grad_bytes=2),
}
UNSCALED_WAYS = ["float32", "float32, highest", "TF32", "autocast, bfloat16"]
SCALERS = {
    "none": None,
    "loss_scaled": ols.dynamic_loss_scale,
    "loss_scaled, headroom": ols.headroom_loss_scale,
    "flax DynamicScale": DynamicScale,
    "compat.flax DynamicScale": compat.DynamicScale,
}
# Some scalers are measured in one way only.
WAY_OF_SCALER = {
    "flax DynamicScale": "by hand",
    "compat.flax DynamicScale": "by hand",
    "loss_scaled, headroom": "autocast, O1",
}


def fitting(scalers: list[str], way: str) -> list[str]:
    """Returns those scalers with which a step is measured in this way."""
    if way in UNSCALED_WAYS:
        return ["none"]
    return [scaler for scaler in scalers if WAY_OF_SCALER.get(scaler, way) == way]


class Step(NamedTuple):
    """A training step that is still to be compiled.

    Attributes:
      run: `run(params, state, *batch)` returns new parameters, new state and the loss.
      args: The shapes of its arguments.
      grad_bytes: Bytes of all gradients, in the dtype in which they are produced.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    grad_bytes: int


def make_step(
    model: str, way: str, optimizer: str, scaler: str, small: bool = False
) -> Step:
    """Makes the training step of a model; `small` ones are for tests."""
    chosen = WAYS[way]
    loss_fn, params, batch = MODELS[model](chosen.dtype, small)
    if chosen.level is not None:
        loss_fn = ols.autocast(loss_fn, chosen.low_dtype, level=chosen.level)
    inner = OPTIMIZERS[optimizer]()
    if chosen.has_masters:
        params = jax.eval_shape(ols.cast_params, params)
        inner = ols.master_weights(inner)
    make = run_flax if "DynamicScale" in scaler else run_ours
    init, run = make(loss_fn, inner, SCALERS[scaler])
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    args = (params, jax.eval_shape(init, params), *batch)
    run = with_precision(run, chosen.precision)
    return Step(run, args, entries * chosen.grad_bytes)


def with_precision(run: Callable[..., Any], precision: str | None) -> Any:
    """Returns a function that computes float32 products in a precision."""

    def run_with_precision(*args):
        # JAX reads this setting while it traces.
        with jax.default_matmul_precision(precision):
            return run(*args)

    return run_with_precision


def run_ours(loss_fn: Callable[..., Any], inner: Any, rule: Any) -> tuple[Any, Any]:
    """Trains with `loss_scaled`, or with the optimizer alone if there is no rule."""
    tx = inner if rule is None else ols.loss_scaled(inner, rule())

    def run(params, state, *batch):
        if rule is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        else:
            loss, grads = ols.scaled_value_and_grad(loss_fn, state)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return tx.init, run


def run_flax(loss_fn: Callable[..., Any], inner: Any, make: Any) -> tuple[Any, Any]:
    """Trains with Flax's `DynamicScale`, and selects as its documentation says."""

    def init(params):
        return make(), inner.init(params)

    def run(params, state, *batch):
        scale, old = state
        grad_fn = scale.value_and_grad(loss_fn)
        scale, finite, loss, grads = grad_fn(params, *batch)
        updates, new = inner.update(grads, old, params)
        updated = optax.apply_updates(params, updates)
        params, new = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (updated, new), (params, old)
        )
        return params, (scale, new), loss

    return init, run
