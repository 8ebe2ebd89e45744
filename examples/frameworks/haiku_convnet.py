"""A Haiku network with batch normalization. Install dm-haiku."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ols


@hk.transform_with_state
def net(images):
    x = hk.Conv2D(16, 3, with_bias=False)(images)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    return hk.Linear(2)(x.mean(axis=(1, 2)))


@ols.autocast  # Only products run in float16.
def loss_fn(params, state, images, labels):
    logits, state = net.apply(params, state, None, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), state


@jax.jit
def step(params, state, opt_state, images, labels):
    grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
    (loss, new), grads = grad_fn(params, state, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, ols.where_applied(opt_state, new, state), opt_state, loss


images = jax.random.normal(jax.random.key(0), (64, 8, 8, 1))
labels = (jnp.arange(64) < 32).astype(jnp.int32)
images += labels[:, None, None, None]
tx = ols.loss_scaled(optax.adamw(1e-2))
params, state = net.init(jax.random.key(1), images)
carry = params, state, tx.init(params)
for _ in range(100):
    *carry, loss = step(*carry, images, labels)
ols.raise_if_stalled(carry)
print(f"loss {loss:.2f}, scale {ols.get_loss_scale(carry):.0f}")
# loss 0.01, scale 32768
