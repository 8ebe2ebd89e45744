"""A Flax TrainState that is sharded over a mesh. Install flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols


def dense(features, *axes):  # Logical axes, as in MaxText and T5X.
    kernel_init = nn.initializers.lecun_normal()
    kernel_init = nn.with_logical_partitioning(kernel_init, axes)
    return nn.Dense(features, kernel_init=kernel_init)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.relu(dense(64, "embed", "mlp")(x))
        return dense(1, "mlp", None)(hidden)


@ols.autocast
def loss_fn(params, x, y):
    return jnp.mean((net.apply(params, x) - y) ** 2)


def init(key):
    params = net.init(key, x)
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx)


def step(state, x, y):
    grad_fn = ols.scaled_value_and_grad(loss_fn, state)
    loss, grads = grad_fn(state.params, x, y)
    return state.apply_gradients(grads=grads), loss


net, x = Net(), jax.random.normal(jax.random.key(1), (64, 16))
y, key = x[:, :1] * x[:, 1:2], jax.random.key(0)
tx = ols.loss_scaled(optax.adamw(1e-2))
ways = 2 if jax.device_count() > 1 else 1
sizes, kinds = (jax.device_count() // ways, ways), 2 * (AxisType.Auto,)
mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=kinds)
rules = [("embed", "data"), ("mlp", "model")]
specs = nn.get_partition_spec(jax.eval_shape(init, key))
state_shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
rows, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
state = nn.unbox(jax.jit(init, out_shardings=state_shardings)(key))
step = jax.jit(
    step,
    in_shardings=(state_shardings, rows, rows),
    out_shardings=(state_shardings, replicated),
    donate_argnums=0,
)
for _ in range(50):
    state, loss = step(state, *jax.device_put((x, y), rows))
    loss.block_until_ready()  # CPU devices hang if many steps are queued.
ols.raise_if_stalled(state)
print(f"loss {loss:.2f}, scale {ols.get_loss_scale(state):.0f}")
# loss 0.00, scale 32768
