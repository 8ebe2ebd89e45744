"""A normalizing flow that FlowJAX's `fit_to_data` fits. Install flowjax."""

import jax
import jax.numpy as jnp
import optax
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train import fit_to_data
from flowjax.train.losses import MaximumLikelihoodLoss

import optax_lossscale as ols

tx = ols.loss_scaled(optax.adam(3e-3), ols.static_loss_scale(1.0))
loss_fn = ols.scaled_backward(ols.autocast(MaximumLikelihoodLoss()), 2.0**10)

key, data_key = jax.random.split(jax.random.key(0))
x = jax.random.normal(data_key, (2000, 2))
x = x.at[:, 1].add(x[:, 0] ** 2)
flow = masked_autoregressive_flow(key, base_dist=Normal(jnp.zeros(2)))
flow, losses = fit_to_data(
    key, flow, x, loss_fn=loss_fn, optimizer=tx, max_epochs=10, show_progress=False
)
print(f"loss {losses['train'][-1]:.1f}")
# loss 2.9
