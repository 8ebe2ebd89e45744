"""A ConvNet in Equinox, with checkpoints. Install equinox and orbax-checkpoint."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import optax_lossscale as ols

images = jax.random.normal(jax.random.key(0), (64, 1, 8, 8))
labels = (jnp.arange(64) < 32).astype(jnp.int32)
images += labels[:, None, None, None]  # Class 1 is brighter.
bad_images = images.at[0].set(jnp.nan)


class ConvNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 16, 3, padding="SAME", use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(16, "batch", momentum=0.9, mode="batch")
        self.out = eqx.nn.Linear(16, 2, key=second)

    def __call__(self, image, statistics):
        x, statistics = self.norm(self.conv(image), statistics)
        return self.out(jax.nn.relu(x).mean(axis=(1, 2))), statistics


def apply(model, statistics, images):
    over_images = jax.vmap(model, (0, None), (0, None), axis_name="batch")
    return over_images(images, statistics)


@ols.autocast  # Convolutions and matrix products run in float16.
def loss_fn(model, statistics, images, labels):
    logits, statistics = apply(model, statistics, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), statistics


@eqx.filter_jit
def step(model, old, opt_state, images, labels):
    grad_fn = ols.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
    (loss, new), grads = grad_fn(model, old, images, labels)
    updates, opt_state = tx.update(grads, opt_state, model)
    model = eqx.apply_updates(model, updates)
    # After a skipped step, the old statistics.
    statistics = ols.where_applied(opt_state, new, old)
    return (model, statistics, opt_state), loss


def evaluate(model, statistics):
    model = eqx.nn.inference_mode(model)
    logits, _ = apply(model, statistics, images)
    return jnp.mean(logits.argmax(-1) == labels)


tx = ols.loss_scaled(optax.adamw(1e-2))


def start():
    model, statistics = eqx.nn.make_with_state(ConvNet)(jax.random.key(1))
    return model, statistics, tx.init(model)


def run(folder, epochs):
    state = start()
    losses = []
    with ocp.CheckpointManager(folder) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:  # The run was interrupted.
            arrays = eqx.filter(state, eqx.is_array)
            target = ocp.args.StandardRestore(arrays)
            arrays = checkpoints.restore(done, args=target)
            state = eqx.combine(arrays, state)
        for epoch in range(done + 1, epochs + 1):
            for i in range(50):
                batch = bad_images if i == 25 else images
                state, loss = step(*state, batch, labels)
                losses.append(loss)
            model, statistics, opt_state = state
            ols.raise_if_stalled(opt_state)
            metrics = ols.loss_scale_metrics(opt_state)
            print(
                f"epoch {epoch}: loss {loss:.2f},",
                f"loss scale {metrics['loss_scale']:.0f},",
                f"skipped steps {metrics['total_notfinite']},",
                f"accuracy {evaluate(model, statistics):.2f}",
            )
            arrays = eqx.filter(state, eqx.is_array)
            checkpoints.save(epoch, args=ocp.args.StandardSave(arrays))
    return jnp.stack(losses)


with tempfile.TemporaryDirectory() as folder:
    run(folder, epochs=1)
    resumed = run(folder, epochs=2)
with tempfile.TemporaryDirectory() as folder:
    whole = run(folder, epochs=2)
same = jnp.array_equal(resumed, whole[50:], equal_nan=True)
print("resumed with the same losses:", same)
# epoch 1: loss 0.02, loss scale 16384, skipped steps 1, accuracy 1.00
# epoch 2: loss 0.01, loss scale 8192, skipped steps 2, accuracy 1.00
# epoch 1: loss 0.02, loss scale 16384, skipped steps 1, accuracy 1.00
# epoch 2: loss 0.01, loss scale 8192, skipped steps 2, accuracy 1.00
# resumed with the same losses: True
