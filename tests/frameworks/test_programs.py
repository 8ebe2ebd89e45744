"""Reinforcement learning, diffusion and sharding: programs in examples/frameworks."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, bits
from helpers.files import ROOT
from helpers.pages import run_program
from helpers.steps import assert_nothing_but_the_scale_changed
from helpers.under_autocast import dtypes_of

KEY = jax.random.key(7)
run = functools.cache(run_program)


def test_a_page_shows_each_program_and_no_other():
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    shown = re.findall(r"^```{literalinclude} \S*examples/frameworks/(.*)", pages, re.M)
    names = [path.name for path in (ROOT / "examples" / "frameworks").glob("*.py")]
    assert {*shown} == {*names}


def spoiled(x):
    return x.at[3, 1].set(jnp.nan)


def assert_skipped(new, old, *names):
    """Checks what of a state must stay, by name, and its `opt_state`."""
    new, old = (
        ([getattr(state, name) for name in names], state.opt_state)
        for state in (new, old)
    )
    assert_nothing_but_the_scale_changed(new, old)


def assert_changed(new, old):
    leaves = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    assert all(bits(leaf) != bits(other) for leaf, other in leaves)


# PPO with Distrax.


def ppo():
    names = run("ppo_distrax")
    net, state = names["net"], names["state"]
    x = jax.random.normal(KEY, (64, 2))
    policy, value = net.apply(state.params, x)
    actions, log_probs = policy.sample_and_log_prob(seed=KEY)
    rewards = -jnp.sum((x + actions) ** 2, axis=1)
    return names, state, (x, actions, log_probs, rewards, rewards - value)


def test_ppo_learns():
    names, _, _ = ppo()
    fresh = TrainState.create(apply_fn=None, params=names["params"], tx=names["tx"])
    _, losses = jax.jit(names["iteration"])(fresh, KEY)
    assert names["loss"] < losses.mean() / 2


def test_ppo_protects_parameters_and_optimizer_from_a_nan_batch():
    names, state, (x, *others) = ppo()
    new, loss = jax.jit(names["step"])(state, (spoiled(x), *others))
    assert jnp.isnan(loss)
    assert_skipped(new, state, "params")
    assert new.step == state.step + 1


def test_ppo_has_low_products_and_float32_log_probabilities():
    names, state, batch = ppo()
    assert set(dtypes_of(names["step"], state, batch)) == {"float16"}
    assert [array.dtype for array in batch] == 5 * [jnp.float32]


def test_a_diagonal_normal_works_inside_a_decorated_loss():
    distrax, x = run("ppo_distrax")["distrax"], jax.random.normal(KEY, (8, 2))

    def loss_fn(w):
        normal = distrax.MultivariateNormalDiag(x @ w, jnp.ones((8, 2)))
        return -normal.log_prob(x).mean()

    low, exact = (jax.grad(f)(jnp.eye(2)) for f in (ols.autocast(loss_fn), loss_fn))
    np.testing.assert_allclose(low, exact, rtol=1e-2, atol=1e-3)


# Target networks.


@functools.cache
def td3():
    """The step, its state before a step that moves the targets, and a batch."""
    names = run("td3")
    critics, actor, batch = names["critics"], names["actor"], names["batch"]
    critics, actor, _ = names["step"](critics, actor, *batch)
    assert critics.step % 2 == 1
    return names["step"], critics, actor, batch


def test_td3_learns():
    names = run("td3")
    untrained = names["critics"].replace(params=initial_critics(names))
    args = untrained, names["actor"], *names["batch"]
    first = names["critic_loss"](untrained.params, *args)
    assert names["loss"] < first / 2
    x = names["x"]
    assert jnp.mean((x + names["act"](names["actor"].params, x)) ** 2) < 0.1


def initial_critics(names):
    x = names["x"]
    return {i: names["Net"](1).init(names["keys"][i], x, x) for i in range(2)}


def test_td3_moves_both_targets_in_every_second_step_only():
    step, critics, actor, batch = td3()
    even = step(critics, actor, *batch)
    odd = step(even[0], even[1], *batch)
    assert_changed((even[0].target, even[1].target), (critics.target, actor.target))
    assert_same_bits((odd[0].target, odd[1].target), (even[0].target, even[1].target))
    assert_same_bits(odd[1], even[1])


def test_td3_protects_all_networks_from_a_nan_batch():
    step, critics, actor, (x, *others) = td3()
    new_critics, new_actor, loss = step(critics, actor, spoiled(x), *others)
    assert jnp.isnan(loss)
    assert_skipped(new_critics, critics, "params", "target")
    assert_skipped(new_actor, actor, "params", "target")


def test_td3_skips_only_the_critics_if_the_rewards_are_nan():
    step, critics, actor, (x, actions, rewards, next_x) = td3()
    rewards = rewards.at[3].set(jnp.nan)
    new_critics, new_actor, _ = step(critics, actor, x, actions, rewards, next_x)
    assert_skipped(new_critics, critics, "params", "target")
    assert_changed(new_actor.target, actor.target)
    assert ols.get_loss_scale(new_actor) == ols.get_loss_scale(actor)


def test_a_periodic_copy_needs_no_where_applied():
    step, critics, actor, (x, *others) = td3()
    new, _, _ = step(critics, actor, spoiled(x), *others)
    copy = optax.periodic_update(new.params, new.target, new.step, int(new.step))
    assert_same_bits(copy, critics.params)
    assert_changed(ols.where_applied(new, copy, new.target), copy)


# Diffusion.


def test_diffusion_learns_and_samples_from_the_average():
    names = run("diffusion")
    x, t = jnp.zeros((1, 2)), jnp.zeros((1, 1))
    untrained = names["Denoiser"]().init(jax.random.key(0), x, t)
    assert names["loss"] < names["loss_fn"](untrained, names["x"], KEY) / 2
    assert abs(names["radius"] - 1) < 0.1
    radius = jnp.linalg.norm(names["sample"](untrained, KEY), axis=1).mean()
    assert abs(radius - 1) > 0.2
    assert set(dtypes_of(names["sample"], untrained, KEY)) == {"float16"}


def test_diffusion_protects_the_average_from_a_nan_batch():
    names = run("diffusion")
    params, opt_state, average = (names[n] for n in ("params", "opt_state", "average"))
    step = functools.partial(names["step"], params, opt_state, average)
    new_params, new_state, new_average, loss = step(spoiled(names["x"]), KEY)
    assert jnp.isnan(loss)
    new, old = (new_params, new_average), (params, average)
    assert_nothing_but_the_scale_changed((new, new_state), (old, opt_state))
    assert_changed(step(names["x"], KEY)[2], average)


# A TrainState on a mesh.


def mesh_state():
    names = run("train_state_on_mesh")
    init = jax.jit(names["init"], out_shardings=names["state_shardings"])
    return names, nn.unbox(init(names["key"]))


def test_a_train_state_on_a_mesh_learns():
    names, state = mesh_state()
    _, loss = names["step"](state, names["x"], names["y"])
    assert names["loss"] < loss / 2


def test_a_loss_scale_on_a_mesh_is_replicated_and_moments_are_sharded():
    names, _ = mesh_state()
    state = names["state"]
    assert dict(names["mesh"].shape) == {"data": 4, "model": 2}
    scale_state = state.opt_state.loss_scale_state
    assert all(leaf.sharding.spec == P() for leaf in jax.tree.leaves(scale_state))
    for moments in state.opt_state.inner_state[0][1:]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (moments, state.params))
        assert shardings[0] == shardings[1]
    kernels = (state.params["params"][f"Dense_{i}"]["kernel"] for i in range(2))
    assert [k.sharding.spec for k in kernels] == [P("data", "model"), P("model", None)]


def test_one_nan_on_a_mesh_makes_all_devices_skip_with_a_donated_state():
    names, state = mesh_state()
    old = jax.tree.map(lambda leaf: np.array(leaf), state)
    x = jax.device_put(names["x"].at[17, 3].set(jnp.nan), names["rows"])
    have_nan = [np.isnan(shard.data).any() for shard in x.addressable_shards]
    assert sum(have_nan) == 2  # Of eight, because each row is on two devices.
    new, loss = names["step"](state, x, names["y"])
    assert jnp.isnan(loss)
    # No step reads `last_finite`, so JAX leaves it where it is.
    kept = [leaf for leaf in jax.tree.leaves(state) if not leaf.is_deleted()]
    assert all(leaf is state.opt_state.loss_scale_state.last_finite for leaf in kept)
    assert_skipped(new, old, "params")
    for shard in ols.get_loss_scale(new).addressable_shards:
        assert shard.data == old.opt_state.loss_scale_state.loss_scale / 2
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (new, names["state"]))
    assert shardings[0] == shardings[1]
