"""Models in plain JAX, as one writes them for float32 and, by hand, for float16.

By hand, parameters are cast to float16 where they are used, and norms, softmax and the
loss compute in float32. What goes from layer to layer, which is the residual stream or
the state of an LSTM, is float16 like all other activations, or it is float32. Nothing
here makes an array, so training steps can be compiled for an absent device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from _lib.models import cross_entropy

Tree = Any
# A loss function, and the shapes of its parameters and of its batch.
Case = tuple[Callable[..., jax.Array], Tree, tuple[Tree, ...]]


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Returns an array that is only described."""
    return jax.ShapeDtypeStruct(dims, dtype)


def low(tree: Tree, dtype: Any) -> Tree:
    """Casts all arrays of a tree to a dtype, or leaves them if it is `None`."""
    return tree if dtype is None else jax.tree.map(lambda x: x.astype(dtype), tree)


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of an array compute in float32 and return the array's dtype."""

    @functools.wraps(function)
    def call(x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return function(x.astype(jnp.float32), *args, **kwargs).astype(x.dtype)

    return call


@in_float32
def normalize(x: jax.Array, axes: Any, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalizes over some axes, then scales and shifts."""
    x = x - jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(x**2, axes, keepdims=True)
    return x * lax.rsqrt(variance + 1e-5) * scale + bias


@in_float32
def causal_softmax(scores: jax.Array) -> jax.Array:
    """The weights of attention to earlier positions."""
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9))


def transformer_layer(p: Tree, x: jax.Array, heads: int, dtype: Any) -> jax.Array:
    """A layer with norms in front; `p` is in float32, and `x` the residual stream."""
    scale1, scale2 = (p.pop(name) for name in ("norm1", "norm2"))
    p = low(p, dtype)
    y = normalize(x, -1, *scale1)
    q, k, v = (
        part.reshape(*x.shape[:2], heads, -1)
        for part in jnp.split(low(y, dtype) @ p["qkv"], 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    y = jnp.einsum("bhqk,bkhd->bqhd", causal_softmax(scores), v)
    x = x + y.reshape(x.shape) @ p["out"]
    y = low(normalize(x, -1, *scale2), dtype)
    y = jax.nn.gelu(y @ p["up"] + p["up_bias"])
    return x + y @ p["down"] + p["down_bias"]


def gpt(dtype: Any, stream: Any, small: bool, *, is_scan: bool) -> Case:
    """Makes the case of a GPT of four layers, unrolled or in a scan over layers."""
    width, vocabulary, length, batch = (
        (32, 64, 16, 2) if small else (512, 4096, 256, 16)
    )
    depth, heads = 4, width // (16 if small else 64)
    layers = {
        "norm1": (depth, 2, width),
        "qkv": (depth, width, 3 * width),
        "out": (depth, width, width),
        "norm2": (depth, 2, width),
        "up": (depth, width, 4 * width),
        "up_bias": (depth, 4 * width),
        "down": (depth, 4 * width, width),
        "down_bias": (depth, width),
    }
    params = {
        "embedding": shape(vocabulary, width),
        "positions": shape(length, width),
        "norm": shape(2, width),
        "layers": {name: shape(*dims) for name, dims in layers.items()},
    }
    if not is_scan:
        layer = {name: shape(*dims[1:]) for name, dims in layers.items()}
        params["layers"] = [layer] * depth

    def loss_fn(params: Tree, tokens: jax.Array) -> jax.Array:
        x = low(params["embedding"], stream)[tokens] + low(params["positions"], stream)
        if is_scan:

            def body(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
                return transformer_layer(dict(p), x, heads, dtype), None

            x, _ = lax.scan(body, x, params["layers"])
        else:
            for p in params["layers"]:
                x = transformer_layer(dict(p), x, heads, dtype)
        x = low(normalize(x, -1, *params["norm"]), dtype)
        logits = x @ low(params["embedding"], dtype).T
        return cross_entropy(logits.astype(jnp.float32)[:, :-1], tokens[:, 1:])

    return loss_fn, params, (shape(batch, length, dtype=jnp.int32),)


def lstm(dtype: Any, stream: Any, small: bool) -> Case:
    """Makes the case of two LSTMs over sequences of 128 tokens, each in a scan."""
    width, vocabulary = (16, 64) if small else (512, 4096)
    length, batch = (8, 2) if small else (128, 64)
    cell = {
        "input": shape(width, 4 * width),
        "hidden": shape(width, 4 * width),
        "bias": shape(4 * width),
    }
    params = {
        "embedding": shape(vocabulary, width),
        "cells": [cell, cell],
        "head": shape(width, vocabulary),
    }

    def loss_fn(params: Tree, tokens: jax.Array) -> jax.Array:
        params = low(params, dtype)
        xs = params["embedding"][tokens.T]
        for p in params["cells"]:

            def step(state: Any, x: jax.Array, p: Tree = p) -> Any:
                h, c = state
                gates = x @ p["input"] + h @ p["hidden"] + p["bias"]
                i, f, g, o = jnp.split(gates, 4, axis=-1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = low(jax.nn.sigmoid(o) * jnp.tanh(c), dtype)
                return (h, c), h

            start = jnp.zeros((batch, width), xs.dtype)
            _, xs = lax.scan(step, (low(start, dtype), low(start, stream)), xs)
        logits = (xs @ params["head"]).astype(jnp.float32)
        return cross_entropy(logits[:-1], tokens.T[1:])

    return loss_fn, params, (shape(batch, length, dtype=jnp.int32),)


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves images, whose channels are last, with a kernel."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


def resnet_18(dtype: Any, stream: Any, small: bool) -> Case:
    """Makes the case of a ResNet-18 on images of 64 x 64, with norms of the batch."""
    width, size, batch = (8, 16, 2) if small else (64, 64, 128)
    params: Tree = {"stem": shape(3, 3, 3, width), "stem_norm": shape(2, width)}
    strides, last = [], width
    for stage in range(4):
        for index in range(2):
            features, stride = width * 2**stage, 2 if stage and not index else 1
            block = {
                "conv1": shape(3, 3, last, features),
                "norm1": shape(2, features),
                "conv2": shape(3, 3, features, features),
                "norm2": shape(2, features),
            }
            if stride == 2:
                block["shortcut"] = shape(1, 1, last, features)
                block["norm"] = shape(2, features)
            params[f"block{len(strides)}"], last = block, features
            strides.append(stride)
    params["head"] = shape(last, 100)

    def loss_fn(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        def conv(x: jax.Array, p: Tree, name: str, stride: int = 1) -> jax.Array:
            return convolve(low(x, dtype), low(p[name], dtype), stride)

        def norm(x: jax.Array, p: Tree, name: str) -> jax.Array:
            return normalize(x, (0, 1, 2), *p[name])

        x = low(norm(conv(images, params, "stem"), params, "stem_norm"), stream)
        x = jax.nn.relu(x)
        for index, stride in enumerate(strides):
            p = params[f"block{index}"]
            y = jax.nn.relu(norm(conv(x, p, "conv1", stride), p, "norm1"))
            y = norm(conv(y, p, "conv2"), p, "norm2")
            if "shortcut" in p:
                x = norm(conv(x, p, "shortcut", stride), p, "norm")
            x = jax.nn.relu(x + y)
        logits = low(jnp.mean(x, (1, 2)), dtype) @ low(params["head"], dtype)
        return cross_entropy(logits.astype(jnp.float32), labels)

    images = shape(batch, size, size, 3)
    return loss_fn, params, (images, shape(batch, dtype=jnp.int32))


MODELS: dict[str, Callable[[Any, Any, bool], Case]] = {
    "GPT, unrolled": functools.partial(gpt, is_scan=False),
    "GPT, scan over layers": functools.partial(gpt, is_scan=True),
    "two LSTMs, scan over time": lstm,
    "ResNet-18, norms written out": resnet_18,
}
