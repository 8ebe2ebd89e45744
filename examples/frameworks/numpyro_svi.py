"""Variational inference with NumPyro's `SVI`. Install numpyro."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import optax_lossscale as ols

N, BATCH = 4096, 64
x = jax.random.normal(jax.random.key(0), (N, 16))
y = x @ jnp.linspace(-1, 1, 16) + 0.1 * jax.random.normal(jax.random.key(1), (N,))
predict = ols.scaled_backward(ols.autocast(lambda x, weights: x @ weights), 2.0**-8)


def model(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([16]).to_event(1))
    with numpyro.plate("data", N, subsample_size=len(x)):
        mean = predict(x, weights)
        numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


tx = ols.loss_scaled(optax.adam(3e-2), ols.static_loss_scale(1.0))
svi = SVI(model, AutoNormal(model), tx, Trace_ELBO())
state = svi.init(jax.random.key(2), x[:BATCH], y[:BATCH])
step = jax.jit(svi.update)
for _ in range(10):
    for i in range(0, N, BATCH):
        state, loss = step(state, x[i : i + BATCH], y[i : i + BATCH])
    ols.raise_if_stalled(state)
skipped = ols.loss_scale_metrics(state)["total_notfinite"]
print(f"loss {loss / N:.2f}, skipped {skipped}")
# loss -0.21, skipped 0
