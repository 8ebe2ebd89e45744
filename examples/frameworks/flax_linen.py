"""A ConvNet in Flax Linen, with checkpoints. Install flax and orbax-checkpoint."""

import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import optax_lossscale as ols

images = jax.random.normal(jax.random.key(0), (64, 8, 8, 1))
labels = (jnp.arange(64) < 32).astype(jnp.int32)
images += labels[:, None, None, None]  # Class 1 is brighter.
bad_images = images.at[0].set(jnp.nan)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, images, is_training=True):
        x = nn.Conv(16, (3, 3), use_bias=False)(images)
        x = nn.BatchNorm(not is_training, momentum=0.9)(x)
        return nn.Dense(2)(nn.relu(x).mean(axis=(1, 2)))


class State(TrainState):
    batch_stats: dict


net = ConvNet()


@ols.autocast  # Convolutions and matrix products run in float16.
def loss_fn(params, batch_stats, images, labels):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, changed = net.apply(variables, images, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), changed["batch_stats"]


@jax.jit
def step(state, images, labels):
    old = state.batch_stats
    grad_fn = ols.scaled_value_and_grad(loss_fn, state, has_aux=True)
    (loss, new), grads = grad_fn(state.params, old, images, labels)
    state = state.apply_gradients(grads=grads)
    # After a skipped step, the old statistics.
    state = state.replace(batch_stats=ols.where_applied(state, new, old))
    return state, loss


def evaluate(state):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = net.apply(variables, images, is_training=False)
    return jnp.mean(logits.argmax(-1) == labels)


def start():
    variables = net.init(jax.random.key(1), images)
    tx = ols.loss_scaled(optax.adamw(1e-2))
    return State.create(apply_fn=net.apply, tx=tx, **variables)


def run(folder, epochs):
    state = start()
    losses = []
    with ocp.CheckpointManager(folder) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:  # The run was interrupted.
            target = ocp.args.StandardRestore(state)
            state = checkpoints.restore(done, args=target)
        for epoch in range(done + 1, epochs + 1):
            for i in range(50):
                batch = bad_images if i == 25 else images
                state, loss = step(state, batch, labels)
                losses.append(loss)
            ols.raise_if_stalled(state)
            metrics = ols.loss_scale_metrics(state)
            print(
                f"epoch {epoch}: loss {loss:.2f},",
                f"loss scale {metrics['loss_scale']:.0f},",
                f"skipped steps {metrics['total_notfinite']},",
                f"accuracy {evaluate(state):.2f}",
            )
            checkpoints.save(epoch, args=ocp.args.StandardSave(state))
    return jnp.stack(losses)


with tempfile.TemporaryDirectory() as folder:
    run(folder, epochs=1)
    resumed = run(folder, epochs=2)
with tempfile.TemporaryDirectory() as folder:
    whole = run(folder, epochs=2)
same = jnp.array_equal(resumed, whole[50:], equal_nan=True)
print("resumed with the same losses:", same)
# epoch 1: loss 0.03, loss scale 16384, skipped steps 1, accuracy 1.00
# epoch 2: loss 0.01, loss scale 8192, skipped steps 2, accuracy 1.00
# epoch 1: loss 0.03, loss scale 16384, skipped steps 1, accuracy 1.00
# epoch 2: loss 0.01, loss scale 8192, skipped steps 2, accuracy 1.00
# resumed with the same losses: True
