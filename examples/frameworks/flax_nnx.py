"""A ConvNet in Flax NNX, with checkpoints. Install flax and orbax-checkpoint."""

import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

import optax_lossscale as ols

images = jax.random.normal(jax.random.key(0), (64, 8, 8, 1))
labels = (jnp.arange(64) < 32).astype(jnp.int32)
images += labels[:, None, None, None]  # Class 1 is brighter.
bad_images = images.at[0].set(jnp.nan)


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.out = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images)))
        return self.out(x.mean(axis=(1, 2)))


@ols.autocast  # Convolutions and matrix products run in float16.
def loss_fn(model, images, labels):
    logits = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


@nnx.jit
def step(model, optimizer, images, labels):
    old = nnx.clone(model)
    grad_fn = ols.scaled_value_and_grad(loss_fn, optimizer)
    loss, grads = grad_fn(model, images, labels)
    optimizer.update(model, grads)
    # In place: after a skipped step, the old statistics.
    ols.where_applied(optimizer, model, old)
    return loss


def evaluate(model):
    model.eval()
    accuracy = jnp.mean(model(images).argmax(-1) == labels)
    model.train()
    return accuracy


def start():
    model = ConvNet(nnx.Rngs(1))
    tx = ols.loss_scaled(optax.adamw(1e-2))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def run(folder, epochs):
    model, optimizer = start()
    losses = []
    with ocp.CheckpointManager(folder) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:  # The run was interrupted.
            state = nnx.state((model, optimizer))
            target = ocp.args.StandardRestore(state)
            state = checkpoints.restore(done, args=target)
            nnx.update((model, optimizer), state)
        for epoch in range(done + 1, epochs + 1):
            for i in range(50):
                batch = bad_images if i == 25 else images
                losses.append(step(model, optimizer, batch, labels))
            ols.raise_if_stalled(optimizer)
            metrics = ols.loss_scale_metrics(optimizer)
            print(
                f"epoch {epoch}: loss {losses[-1]:.2f},",
                f"loss scale {metrics['loss_scale']:.0f},",
                f"skipped steps {metrics['total_notfinite']},",
                f"accuracy {evaluate(model):.2f}",
            )
            state = nnx.state((model, optimizer))
            checkpoints.save(epoch, args=ocp.args.StandardSave(state))
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
