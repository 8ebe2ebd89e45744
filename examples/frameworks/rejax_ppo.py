"""PPO of rejax, whose networks are scaled. Install rejax and gymnax 0.0.9."""

import functools

import jax
from flax.training.train_state import TrainState
from rejax import PPO

import optax_lossscale as ols


class HalfPrecision:
    """A network of rejax whose products run in float16."""

    def __init__(self, network):
        self.network, self.init = network, network.init

    def apply(self, params, *args, **kwargs):
        apply = functools.partial(self.network.apply, **kwargs)
        return ols.scaled_backward(ols.autocast(apply), 2.0**12)(params, *args)


def skipping(train_state):
    tx = ols.loss_scaled(train_state.tx, ols.static_loss_scale(1.0))
    return TrainState.create(apply_fn=(), params=train_state.params, tx=tx)


settings = {"num_envs": 16, "num_steps": 32, "num_minibatches": 4}
settings |= {"total_timesteps": 8192, "eval_freq": 4096, "learning_rate": 2.5e-3}
ppo = PPO.create(env="CartPole-v1", **settings)
low = ppo.replace(actor=HalfPrecision(ppo.actor), critic=HalfPrecision(ppo.critic))
state = low.init_state(jax.random.key(0))
state = state.replace(
    actor_ts=skipping(state.actor_ts), critic_ts=skipping(state.critic_ts)
)
state, (lengths, returns) = jax.jit(low.train)(train_state=state)
ols.raise_if_stalled(state.actor_ts)
print("mean returns", returns.mean(axis=1))  # About 22, 95 and 188.
