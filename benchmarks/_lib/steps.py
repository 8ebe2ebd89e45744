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


class ResNet18(nn.Module):
    """ResNet-18 for small images: its first convolution has no stride."""

    width: int = 64
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage and not block else 1
                features = self.width * 2**stage
                x = ResidualBlock(features, stride, self.dtype)(x)
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


def resnet(dtype: Any, small: bool) -> Case:
    """Makes the case of a ResNet-18 on images of 32 x 32."""
    batch = 4 if small else 128
    model = ResNet18(width=8 if small else 64, dtype=dtype)
    images = shape(batch, 32, 32, 3, dtype=jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss_fn(params, stats, images, labels):
        state = {"params": params, "batch_stats": stats}
        logits, _ = model.apply(state, images, mutable=["batch_stats"])
        return cross_entropy(logits.astype(jnp.float32), labels)

    batch_of_images = (variables["batch_stats"], images, shape(batch))
    return loss_fn, variables["params"], batch_of_images


def lstm(dtype: Any, small: bool) -> Case:
    """Makes the case of two LSTMs over sequences of 64 tokens."""
    width, vocabulary = (16, 64) if small else (512, 4096)
    model = LanguageLSTM(vocabulary, width, dtype)
    return language_case(model, 2 if small else 64, 8 if small else 64)


MODELS: dict[str, Callable[[Any, bool], Case]] = {
    "GPT": gpt,
    "ResNet-18": resnet,
    "LSTM": lstm,
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adamw, clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    ),
    "adamw, accumulated": lambda: optax.MultiSteps(optax.adamw(1e-3), 4),
}


class Way(NamedTuple):
    """A way to compute in low precision.

    Attributes:
      dtype: The dtype of Flax's layers, as one sets it by hand.
      level: The level of autocast, if it is used.
      has_masters: Whether the parameters are float16, with float32 masters.
      grad_bytes: Bytes of an entry of a weight's gradient, where it is produced.
    """

    dtype: Any = None
    level: str | None = None
    has_masters: bool = False
    grad_bytes: int = 4


WAYS = {
    "float32": Way(),
    "by hand": Way(dtype=jnp.float16, grad_bytes=2),
    "autocast, O1": Way(level="O1"),
    "autocast, O2": Way(level="O2"),
    "masters": Way(dtype=jnp.float16, has_masters=True, grad_bytes=2),
}
SCALERS = {
    "none": None,
    "loss_scaled": ols.dynamic_loss_scale,
    "loss_scaled, headroom": ols.headroom_loss_scale,
    "flax DynamicScale": DynamicScale,
    "compat.flax DynamicScale": compat.DynamicScale,
}


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
    dtype, level, has_masters, grad_bytes = WAYS[way]
    loss_fn, params, batch = MODELS[model](dtype, small)
    if level is not None:
        loss_fn = ols.autocast(loss_fn, level=level)
    inner = OPTIMIZERS[optimizer]()
    if has_masters:
        params = jax.eval_shape(ols.cast_params, params)
        inner = ols.master_weights(inner)
    make = run_flax if "DynamicScale" in scaler else run_ours
    init, run = make(loss_fn, inner, SCALERS[scaler])
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    args = (params, jax.eval_shape(init, params), *batch)
    return Step(run, args, entries * grad_bytes)


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
