"""A network of Penzai in its `StatefulTrainer`. Install penzai."""

import jax
import jax.numpy as jnp
import optax
from penzai import pz
from penzai.models.simple_mlp import MLP
from penzai.toolshed.basic_training import StatefulTrainer

import optax_lossscale as ols


def loss_fn(model, state, rng, x, y):
    outputs = model(pz.nx.wrap(x).tag("batch", "features"))
    loss = jnp.mean((outputs.unwrap("batch", "features") - y) ** 2)
    return loss, state, {"loss": loss}


x = jax.random.normal(jax.random.key(1), (64, 3))
y = jnp.sin(x.sum(axis=1, keepdims=True))
trainer = StatefulTrainer.build(
    root_rng=jax.random.key(2),
    model=MLP.from_config(jax.random.key(0), [3, 32, 1]),
    optimizer_def=ols.loss_scaled(optax.adam(1e-2), ols.static_loss_scale(1.0)),
    loss_fn=ols.scaled_backward(ols.autocast(loss_fn), 2.0**12),
)
for _ in range(100):
    metrics = trainer.step(x=x, y=y)
ols.raise_if_stalled(trainer.state.value)
print(f"loss {metrics['loss']:.2f}")
# loss 0.01
