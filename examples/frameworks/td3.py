"""Two critics, an actor, and their targets: TD3 without its noise. Install flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import optax_lossscale as ols


class State(TrainState):
    target: dict


class Net(nn.Module):
    outputs: int

    @ols.autocast
    @nn.compact
    def __call__(self, *inputs):
        hidden = nn.relu(nn.Dense(64)(jnp.concatenate(inputs, axis=1)))
        return nn.Dense(self.outputs)(hidden)


def act(actor, x):
    return jnp.tanh(Net(2).apply(actor, x))


def values(critics, x, actions):  # Of both critics.
    return [Net(1).apply(c, x, actions)[:, 0] for c in critics.values()]


def critic_loss(params, critics, actor, x, actions, rewards, next_x):
    next_values = values(critics.target, next_x, act(actor.target, next_x))
    goal = rewards + 0.9 * jnp.minimum(*next_values)
    return sum(jnp.mean((v - goal) ** 2) for v in values(params, x, actions))


def actor_loss(params, critics, x):
    return -values(critics.params, x, act(params, x))[0].mean()


def move_target(state):
    new = optax.incremental_update(state.params, state.target, 0.05)
    return state.replace(target=ols.where_applied(state, new, state.target))


@jax.jit
def step(critics, actor, x, *others):
    grad_fn = ols.scaled_value_and_grad(critic_loss, critics)
    loss, grads = grad_fn(critics.params, critics, actor, x, *others)
    critics = critics.apply_gradients(grads=grads)

    def update(critics, actor):  # In every second step.
        grads = ols.scaled_grad(actor_loss, actor)(actor.params, critics, x)
        actor = actor.apply_gradients(grads=grads)
        return move_target(critics), move_target(actor)

    states, is_even = (critics, actor), critics.step % 2 == 0
    return *jax.lax.cond(is_even, update, lambda *same: same, *states), loss


def init(params):
    tx = ols.loss_scaled(optax.adam(3e-3))
    return State.create(apply_fn=None, params=params, target=params, tx=tx)


keys, x = jax.random.split(jax.random.key(0), 3), jnp.zeros((1, 2))
critics = init({i: Net(1).init(keys[i], x, x) for i in range(2)})
actor = init(Net(2).init(keys[2], x))
for key in jax.random.split(jax.random.key(1), 300):  # Move x to zero.
    x, actions = jax.random.uniform(key, (2, 256, 2), minval=-1)
    batch = x, actions, -jnp.sum((x + actions) ** 2, axis=1), x + actions
    critics, actor, loss = step(critics, actor, *batch)
print(f"loss {loss:.1f}")
for state in (critics, actor):
    ols.raise_if_stalled(state)
    print(f"scale {ols.get_loss_scale(state):.0f}")
# loss 0.3
# scale 32768
# scale 32768
