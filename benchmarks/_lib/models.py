"""Models that were written for float32, in Flax, Equinox and plain JAX.

Each entry of `MODELS` makes a `Case`. Arrays are made only inside functions, so
importing this file does not start JAX.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

# A loss function, its parameters, and the other arguments of one batch.
Case = tuple[Callable[..., jax.Array], Any, tuple[jax.Array, ...]]


def random_key(index: int) -> jax.Array:
    """Returns one of eight keys, the same ones in every run."""
    return jax.random.split(jax.random.key(0), 8)[index]


def make_images() -> jax.Array:
    """Returns a batch of 8 random images."""
    return jax.random.normal(random_key(0), (8, 16, 16, 3))


def make_features() -> jax.Array:
    """Returns a batch of 4 random sequences of 32 vectors."""
    return jax.random.normal(random_key(1), (4, 32, 64))


def make_tokens() -> jax.Array:
    """Returns a batch of 4 random sequences of 32 tokens."""
    return jax.random.randint(random_key(2), (4, 32), 0, 50)


def make_labels() -> jax.Array:
    """Returns the labels of 8 images, from 10 classes."""
    return jax.random.randint(random_key(3), (8,), 0, 10)


def make_classification() -> tuple[jax.Array, jax.Array]:
    """Returns a batch of images and their labels."""
    return make_images(), make_labels()


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_case(model: nn.Module, batch: tuple[jax.Array, ...]) -> Case:
    """Makes the case of a Flax model.

    The loss is the cross-entropy if the batch has labels, and otherwise the squared
    distance of the outputs from 1.
    """
    variables = model.init(random_key(4), batch[0])

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
    model, images = ResNetBlock(), make_images()
    variables = model.init(random_key(4), images)

    def loss_fn(params, stats, x, labels):
        state = {"params": params, "batch_stats": stats}
        logits, _ = model.apply(state, x, mutable=["batch_stats"])
        return cross_entropy(logits, labels)

    batch = (variables["batch_stats"], images, make_labels())
    return loss_fn, variables["params"], batch


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
    """Pre-norm transformer of `depth` blocks with a residual stream of `width`.

    `project` computes the products that lead back to the residual stream.
    """

    width: int = 64
    depth: int = 2
    is_causal: bool = False
    dtype: Any = None
    project: Any = None
    heads: int = 4

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.is_causal else None
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = dense(self.width)(x)
        for _ in range(self.depth):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            attention = nn.SelfAttention(
                self.heads, dtype=self.dtype, out_dot_general=self.project
            )
            x = x + attention(y, mask=mask)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(dense(4 * self.width)(y))
            x = x + dense(self.width, dot_general=self.project)(y)
        return x


class Decoder(nn.Module):
    """A small GPT: the table of embeddings also gives the logits.

    `sharding` splits the activations over a mesh. On an explicit mesh JAX must be told
    the sharding of everything that a product or a look-up sums over devices.
    """

    vocabulary: int = 50
    length: int = 32
    width: int = 64
    depth: int = 2
    dtype: Any = None
    sharding: Any = None
    heads: int = 4

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        initializer = nn.initializers.normal(0.02)
        positions = self.param("positions", initializer, (self.length, self.width))
        is_explicit = self.sharding is not None and is_explicit_mesh(self.sharding.mesh)
        if is_explicit:
            x = embed.embedding.at[tokens].get(out_sharding=self.sharding)
            project = functools.partial(lax.dot_general, out_sharding=self.sharding)
        else:
            x, project = self.split(embed(tokens)), None
        x, positions = nn.dtypes.promote_dtype(x, positions, dtype=self.dtype)
        encoder = Encoder(
            self.width,
            self.depth,
            is_causal=True,
            dtype=self.dtype,
            project=project,
            heads=self.heads,
        )
        x = nn.LayerNorm(dtype=self.dtype)(encoder(x + positions))
        return self.split(embed.attend(x))

    def split(self, x):
        """Returns an activation, split over the mesh if there is one."""
        if self.sharding is None or is_explicit_mesh(self.sharding.mesh):
            return x
        return lax.with_sharding_constraint(x, self.sharding)


def is_explicit_mesh(mesh: jax.sharding.Mesh) -> bool:
    """Whether types of arrays carry their sharding over the mesh."""
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def next_token_loss(model: nn.Module) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the loss of a decoder that predicts each token from those before it."""

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens).astype(jnp.float32)
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return loss_fn


def decoder() -> Case:
    model, tokens = Decoder(), make_tokens()
    return next_token_loss(model), model.init(random_key(4), tokens), (tokens,)


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

    return loss_fn, params, make_classification()


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.OptimizedLSTMCell(32))(x)


def gru() -> Case:
    """Makes the case of a gated recurrent unit in plain JAX, run by `lax.scan`."""
    params = {
        name: 0.2 * jax.random.normal(random_key(index), shape)
        for name, index, shape in [
            ("input", 4, (64, 96)),
            ("hidden", 5, (32, 96)),
            ("bias", 6, (96,)),
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

    return loss_fn, params, (make_features(),)


def remat_stack() -> Case:
    """Makes the case of a scan over checkpointed layers that save only products."""
    params = {
        "w": 0.1 * jax.random.normal(random_key(4), (4, 64, 64)),
        "b": jnp.zeros((4, 64)),
    }
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss_fn(params, x):
        def layer(x, p):
            return x + jax.nn.silu(x @ p["w"] + p["b"]), None

        x, _ = lax.scan(jax.checkpoint(layer, policy=policy), x, params)
        return jnp.mean((x - 1) ** 2)

    return loss_fn, params, (make_features(),)


def mixture_of_experts() -> Case:
    """Makes the case of a layer that routes each token to two of four experts."""
    params = {
        "router": 0.3 * jax.random.normal(random_key(4), (64, 4)),
        "up": 0.1 * jax.random.normal(random_key(5), (4, 64, 128)),
        "down": 0.1 * jax.random.normal(random_key(6), (4, 128, 64)),
    }

    def loss_fn(params, x):
        values, experts = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        chosen = jax.nn.one_hot(experts, 4)
        gates = jnp.einsum("btk,btke->bte", values, chosen)
        hidden = jax.nn.gelu(jnp.einsum("btd,edh->bteh", x, params["up"]))
        out = jnp.einsum("bteh,ehd,bte->btd", hidden, params["down"], gates)
        return jnp.mean((x + out - 1) ** 2)

    return loss_fn, params, (make_features(),)


@jax.custom_vjp
def fused_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes relu(x @ w), and saves only the result's sign for the derivative."""
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
    params = [
        0.15 * jax.random.normal(random_key(index), (64, 64)) for index in (4, 5, 6)
    ]

    def loss_fn(params, x):
        for w in params:
            x = fused_layer(x, w)
        return jnp.mean((x - 1) ** 2)

    return loss_fn, params, (make_features(),)


class UNet(eqx.Module):
    """A U-Net of one level, for one image with channels first."""

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
    model, static = eqx.partition(UNet(random_key(4)), eqx.is_array)

    def loss_fn(model, x):
        out = jax.vmap(eqx.combine(model, static))(x.transpose(0, 3, 1, 2))
        return jnp.mean((out - 1) ** 2)

    return loss_fn, model, (make_images(),)


def equinox_mlp() -> Case:
    model, static = eqx.partition(
        eqx.nn.MLP(64, 10, 128, 2, jax.nn.gelu, key=random_key(4)), eqx.is_array
    )

    def loss_fn(model, x):
        out = jax.vmap(jax.vmap(eqx.combine(model, static)))(x)
        return jnp.mean((out - 1) ** 2)

    return loss_fn, model, (make_features(),)


MODELS: dict[str, Callable[[], Case]] = {
    "MLP (linen)": lambda: linen_case(MLP(), make_classification()),
    "MLP (Equinox)": equinox_mlp,
    "LeNet-5 (linen)": lambda: linen_case(LeNet5(), make_classification()),
    "ResNet block, BatchNorm (linen)": resnet_block,
    "ConvNeXt block (linen)": lambda: linen_case(
        ConvNeXtBlock(), make_classification()
    ),
    "transformer encoder (linen)": lambda: linen_case(Encoder(), (make_features(),)),
    "causal decoder (linen)": decoder,
    "ViT (nnx)": vit,
    "LSTM by scan (linen)": lambda: linen_case(LSTM(), (make_features(),)),
    "GRU by scan (plain)": gru,
    "remat'd stack by scan (plain)": remat_stack,
    "mixture of experts, top_k (plain)": mixture_of_experts,
    "custom_vjp layer (plain)": custom_vjp,
    "U-Net block (Equinox)": u_net,
}
