"""PPO with a policy of Distrax, in a scan. Install flax and distrax."""

import distrax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import optax_lossscale as ols


class ActorCritic(nn.Module):
    @ols.autocast  # Rollouts and updates call it, so both round alike.
    @nn.compact
    def __call__(self, x):
        mean = nn.Dense(2)(nn.tanh(nn.Dense(64)(x)))
        deviation = jnp.exp(self.param("log_std", nn.initializers.zeros, (2,)))
        value = nn.Dense(1)(nn.tanh(nn.Dense(64)(x)))[:, 0]
        return distrax.Independent(distrax.Normal(mean, deviation), 1), value


def loss_fn(params, x, actions, old_log_probs, rewards, advantages):
    policy, value = net.apply(params, x)
    ratio = jnp.exp(policy.log_prob(actions) - old_log_probs)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = jnp.mean((value - rewards) ** 2)
    return value_loss / 2 - gain


def step(state, batch):
    grad_fn = ols.scaled_value_and_grad(loss_fn, state)
    loss, grads = grad_fn(state.params, *batch)
    return state.apply_gradients(grads=grads), loss


def iteration(state, key):  # An episode is one step: move x to zero.
    x_key, action_key = jax.random.split(key)
    x = jax.random.normal(x_key, (256, 2))
    policy, value = net.apply(state.params, x)
    actions, log_probs = policy.sample_and_log_prob(seed=action_key)
    rewards = -jnp.sum((x + actions) ** 2, axis=1)
    advantages = rewards - value
    advantages = (advantages - advantages.mean()) / advantages.std()
    batch = x, actions, log_probs, rewards, advantages
    return jax.lax.scan(lambda s, _: step(s, batch), state, length=4)


net = ActorCritic()
params = net.init(jax.random.key(0), jnp.zeros((1, 2)))
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
tx = ols.loss_scaled(optimizer)
state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)
keys = jax.random.split(jax.random.key(0), 50)
state, losses = jax.lax.scan(iteration, state, keys)
ols.raise_if_stalled(state)  # After the scan: it reads the state.
loss, scale = losses[-1].mean(), ols.get_loss_scale(state)
print(f"loss {loss:.2f}, scale {scale:.0f}")
# loss 0.11, scale 32768
