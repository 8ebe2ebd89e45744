"""Models that were written for float32, in Flax, Equinox and plain JAX."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

Case = tuple[Callable[..., jax.Array], Any, tuple[jax.Array, ...]]
KEYS = jax.random.split(jax.random.key(0), 8)
IMAGES = jax.random.normal(KEYS[0], (8, 16, 16, 3))
FEATURES = jax.random.normal(KEYS[1], (4, 32, 64))
TOKENS = jax.random.randint(KEYS[2], (4, 32), 0, 50)
LABELS = jax.random.randint(KEYS[3], (8,), 0, 10)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_linen(model: nn.Module, batch: tuple[jax.Array, ...]) -> Case:
    """A classifier, or whatever gives features, of linen."""
    variables = model.init(KEYS[4], batch[0])

    def loss_fn(variables: Any, x: jax.Array, labels: jax.Array | None) -> jax.Array:
        out = model.apply(variables, x)
        return (
            jnp.mean((out - 1) ** 2) if labels is None else cross_entropy(out, labels)
        )

    return loss_fn, variables, batch if batch[1:] else (*batch, None)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


class LeNet5(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (6, 16):
            x = nn.max_pool(nn.tanh(nn.Conv(features, (5, 5))(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for features in (120, 84):
            x = nn.tanh(nn.Dense(features)(x))
        return nn.Dense(10)(x)


class ResNetBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3))(x)
        y = nn.Conv(16, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
        y = nn.Conv(16, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=False)(y)
        return nn.Dense(10)(jnp.mean(nn.relu(x + y), axis=(1, 2)))


def resnet_block() -> Case:
    model = ResNetBlock()
    variables = model.init(KEYS[4], IMAGES)

    def loss_fn(params, stats, x, labels):
        state = {"params": params, "batch_stats": stats}
        logits, _ = model.apply(state, x, mutable=["batch_stats"])
        return cross_entropy(logits, labels)

    return loss_fn, variables["params"], (variables["batch_stats"], IMAGES, LABELS)


class ConvNeXtBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (2, 2), strides=(2, 2))(x)
        y = nn.Conv(32, (7, 7), feature_group_count=32)(x)
        y = nn.Dense(128)(nn.LayerNorm()(y))
        y = nn.Dense(32)(nn.gelu(y))
        scale = self.param("layer_scale", nn.initializers.constant(0.1), (32,))
        return nn.Dense(10)(jnp.mean(x + scale * y, axis=(1, 2)))


class Encoder(nn.Module):
    """Pre-norm transformer; `width` of the residual stream, `depth` blocks."""

    width: int = 64
    depth: int = 2
    is_causal: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.is_causal else None
        x = nn.Dense(self.width, dtype=self.dtype)(x)
        for _ in range(self.depth):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.SelfAttention(4, dtype=self.dtype)(y, mask=mask)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
            x = x + nn.Dense(self.width, dtype=self.dtype)(y)
        return x


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(50, 64)
        positions = self.param("positions", nn.initializers.normal(0.02), (32, 64))
        x = Encoder(is_causal=True)(embed(tokens) + positions)
        return embed.attend(nn.LayerNorm()(x))


def decoder() -> Case:
    model = Decoder()

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens)
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss_fn, model.init(KEYS[4], TOKENS), (TOKENS,)


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, 64, (4, 4), strides=(4, 4), rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, 64)))
        self.norm1 = nnx.LayerNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(len(x), 16, 64) + self.positions[...]
        x = x + self.attention(self.norm1(x))
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        return self.head(jnp.mean(x, axis=1))


def vit() -> Case:
    graph, params = nnx.split(ViT(nnx.Rngs(0)))

    def loss_fn(params, x, labels):
        return cross_entropy(nnx.merge(graph, params)(x), labels)

    return loss_fn, params, (IMAGES, LABELS)


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.OptimizedLSTMCell(32))(x)


def gru() -> Case:
    """Plain JAX, by `lax.scan`."""
    params = {
        name: 0.2 * jax.random.normal(key, shape)
        for name, key, shape in [
            ("input", KEYS[4], (64, 96)),
            ("hidden", KEYS[5], (32, 96)),
            ("bias", KEYS[6], (96,)),
        ]
    }

    def loss_fn(params, x):
        def cell(h, x):
            gates = x @ params["input"] + params["bias"]
            reset, update, new = jnp.split(gates, 3, axis=-1)
            h_reset, h_update, h_new = jnp.split(h @ params["hidden"], 3, axis=-1)
            reset = jax.nn.sigmoid(reset + h_reset)
            update = jax.nn.sigmoid(update + h_update)
            h = update * h + (1 - update) * jnp.tanh(new + reset * h_new)
            return h, h

        _, out = lax.scan(cell, jnp.zeros((len(x), 32)), x.swapaxes(0, 1))
        return jnp.mean((out - 1) ** 2)

    return loss_fn, params, (FEATURES,)


def remat_stack() -> Case:
    """A scan over layers, each rematerialized but for its products."""
    params = {
        "w": 0.1 * jax.random.normal(KEYS[4], (4, 64, 64)),
        "b": jnp.zeros((4, 64)),
    }
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss_fn(params, x):
        def layer(x, p):
            return x + jax.nn.silu(x @ p["w"] + p["b"]), None

        x, _ = lax.scan(jax.checkpoint(layer, policy=policy), x, params)
        return jnp.mean((x - 1) ** 2)

    return loss_fn, params, (FEATURES,)


def mixture_of_experts() -> Case:
    """Each token through the two experts of four that its router likes best."""
    params = {
        "router": 0.3 * jax.random.normal(KEYS[4], (64, 4)),
        "up": 0.1 * jax.random.normal(KEYS[5], (4, 64, 128)),
        "down": 0.1 * jax.random.normal(KEYS[6], (4, 128, 64)),
    }

    def loss_fn(params, x):
        # The choice itself must not depend on the last bit.
        router = jax.jit(lambda x: x @ params["router"])
        values, experts = lax.top_k(jax.nn.softmax(router(x)), 2)
        chosen = jax.nn.one_hot(experts, 4)
        gates = jnp.einsum("btk,btke->bte", values, chosen)
        hidden = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, params["up"]))
        out = jnp.einsum("bteh,ehd,bte->btd", hidden, params["down"], gates)
        return jnp.mean((x + out - 1) ** 2)

    return loss_fn, params, (FEATURES,)


@jax.custom_vjp
def fused_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """relu(x @ w) that saves only the sign of its result."""
    return jax.nn.relu(x @ w)


def fused_forward(x, w):
    y = fused_layer(x, w)
    return y, (x, w, y > 0)


def fused_backward(residuals, cotangent):
    x, w, is_positive = residuals
    cotangent = jnp.where(is_positive, cotangent, 0)
    return cotangent @ w.T, jnp.einsum("...i,...o->io", x, cotangent)


fused_layer.defvjp(fused_forward, fused_backward)


def custom_vjp() -> Case:
    params = [0.15 * jax.random.normal(key, (64, 64)) for key in KEYS[4:7]]

    def loss_fn(params, x):
        for w in params:
            x = fused_layer(x, w)
        return jnp.mean((x - 1) ** 2)

    return loss_fn, params, (FEATURES,)


class UNet(eqx.Module):
    """Down, up, and across, for one image, channels first."""

    down: eqx.nn.Conv2d
    middle: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    norm: eqx.nn.GroupNorm
    last: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.down = eqx.nn.Conv2d(3, 16, 3, stride=2, padding=1, key=keys[0])
        self.middle = eqx.nn.Conv2d(16, 16, 3, padding=1, key=keys[1])
        self.up = eqx.nn.ConvTranspose2d(16, 16, 2, stride=2, key=keys[2])
        self.norm = eqx.nn.GroupNorm(4, 16)
        self.last = eqx.nn.Conv2d(19, 3, 3, padding=1, key=keys[3])

    def __call__(self, x):
        y = jax.nn.silu(self.middle(jax.nn.silu(self.down(x))))
        y = jax.nn.silu(self.norm(self.up(y)))
        return self.last(jnp.concatenate([x, y]))


def u_net() -> Case:
    model, static = eqx.partition(UNet(KEYS[4]), eqx.is_array)

    def loss_fn(model, x):
        out = jax.vmap(eqx.combine(model, static))(x.transpose(0, 3, 1, 2))
        return jnp.mean((out - 1) ** 2)

    return loss_fn, model, (IMAGES,)


def equinox_mlp() -> Case:
    model, static = eqx.partition(
        eqx.nn.MLP(64, 10, 128, 2, jax.nn.gelu, key=KEYS[4]), eqx.is_array
    )

    def loss_fn(model, x):
        out = jax.vmap(jax.vmap(eqx.combine(model, static)))(x)
        return jnp.mean((out - 1) ** 2)

    return loss_fn, model, (FEATURES,)


MODELS: dict[str, Callable[[], Case]] = {
    "MLP (linen)": lambda: of_linen(MLP(), (IMAGES, LABELS)),
    "MLP (Equinox)": equinox_mlp,
    "LeNet-5 (linen)": lambda: of_linen(LeNet5(), (IMAGES, LABELS)),
    "ResNet block, BatchNorm (linen)": resnet_block,
    "ConvNeXt block (linen)": lambda: of_linen(ConvNeXtBlock(), (IMAGES, LABELS)),
    "transformer encoder (linen)": lambda: of_linen(Encoder(), (FEATURES,)),
    "causal decoder (linen)": decoder,
    "ViT (nnx)": vit,
    "LSTM by scan (linen)": lambda: of_linen(LSTM(), (FEATURES,)),
    "GRU by scan (plain)": gru,
    "remat'd stack by scan (plain)": remat_stack,
    "mixture of experts, top_k (plain)": mixture_of_experts,
    "custom_vjp layer (plain)": custom_vjp,
    "U-Net block (Equinox)": u_net,
}
