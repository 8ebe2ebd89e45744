"""A step of the shape of MaxText's, which clips and logs the gradients itself."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import optax_lossscale as ols

config = types.SimpleNamespace(vocab_size=64, width=32, clipping_threshold=1.0)


class Decoder(nn.Module):
    vocab_size: int
    width: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab_size, self.width)(tokens)
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(self.vocab_size)(nn.LayerNorm()(x))


@ols.autocast
def loss_fn(model, config, data, dropout_rng, params, is_train=True):
    logits = model.apply(params, data["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, data["targets"])
    total = jnp.sum(losses * data["weights"])
    return total / data["weights"].sum(), {"xent_sum": total}


def apply_gradient_clipping(grads, threshold):
    clip = optax.clip_by_global_norm(threshold)
    return clip.update(grads, clip.init(grads))[0]


def train_step(model, config, state, data, dropout_rng):
    true_loss = ols.scaled_backward(loss_fn, state)
    grad_fn = jax.value_and_grad(true_loss, argnums=4, has_aux=True)
    (loss, _), raw_grads = grad_fn(model, config, data, dropout_rng, state.params)
    grads = apply_gradient_clipping(raw_grads, config.clipping_threshold)
    state = state.apply_gradients(grads=grads)
    metrics = {
        "loss": loss,
        "grad_norm": optax.tree.norm(grads),
        "raw_grad_norm": optax.tree.norm(raw_grads),
    }
    return state, metrics | ols.loss_scale_metrics(state)


def batch(number):
    """Tokens in steps of three."""
    starts = jax.random.randint(jax.random.key(number), (16, 1), 0, config.vocab_size)
    tokens = (starts + 3 * jnp.arange(17)) % config.vocab_size
    weights = jnp.ones((16, 16))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def init_state(model, tx):
    params = model.init(jax.random.key(0), batch(0)["inputs"])
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


model = Decoder(config.vocab_size, config.width)
tx = ols.loss_scaled(optax.adamw(3e-3), grads_unscaled=True)
state = init_state(model, tx)
step = jax.jit(functools.partial(train_step, model, config), donate_argnums=0)
for number in range(60):
    state, metrics = step(state, batch(number), jax.random.key(number))
ols.raise_if_stalled(state)
print(f"loss {metrics['loss']:.2f}, scale {metrics['loss_scale']:.0f}")
# loss 0.12, scale 32768
