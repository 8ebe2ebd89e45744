"""A Keras 3 model in a training loop of your own. Install keras."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # Before Keras is imported.
import jax
import jax.numpy as jnp
import keras
import optax
from keras import layers

import optax_lossscale as ols

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(2),
    ]
)


@ols.autocast
def loss_fn(trainable, others, images, labels):
    logits, others = model.stateless_call(trainable, others, images, training=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), others


@jax.jit
def step(trainable, others, opt_state, images, labels):
    grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
    (loss, new), grads = grad_fn(trainable, others, images, labels)
    updates, opt_state = tx.update(grads, opt_state, trainable)
    trainable = optax.apply_updates(trainable, updates)
    return trainable, ols.where_applied(opt_state, new, others), opt_state, loss


images = jax.random.normal(jax.random.key(0), (64, 8, 8, 1))
labels = (jnp.arange(64) < 32).astype(jnp.int32)
images += labels[:, None, None, None]
tx = ols.loss_scale_optimizer(optax.adamw(1e-2))
variables = model.trainable_variables, model.non_trainable_variables
trainable, others = ([v.value for v in part] for part in variables)
state = [trainable, others, tx.init(trainable)]
for _ in range(50):
    *state, loss = step(*state, images, labels)
ols.raise_if_stalled(state)
for part, values in zip(variables, state[:2], strict=True):
    for variable, value in zip(part, values, strict=True):
        variable.assign(value)
print(f"loss {loss:.2f}, scale {ols.get_loss_scale(state):.0f}")
# loss 0.01, scale 32768
