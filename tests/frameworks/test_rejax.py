"""rejax, which has the losses, the optimizers and the loop inside."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.pages import run_section

rejax = pytest.importorskip("rejax", reason="needs rejax")
rejax_ppo = pytest.importorskip("rejax.algos.ppo", reason="needs rejax")


@functools.cache
def names():
    """What the block of the page defines."""
    return run_section("docs/frameworks.md", "rejax")


@functools.cache
def iterate():
    return jax.jit(names()["low"].train_iteration)


def test_the_block_learns():
    returns = np.asarray(names()["returns"]).mean(axis=1)
    assert returns[-1] > 2 * returns[0]


def steps_of_sgd(ppo):
    """By how much one minibatch changes the parameters, with a learning rate of 1."""
    state = names()["ppo"].init_state(jax.random.key(1))
    state, trajectories = names()["ppo"].collect_trajectories(state)
    advantages, targets = ppo.calculate_gae(trajectories, jnp.zeros(16))
    batch = rejax_ppo.AdvantageMinibatch(trajectories, advantages, targets)
    batch = jax.tree.map(jnp.concatenate, batch)  # Steps of all at once.
    by_name = {}
    for name in ("actor_ts", "critic_ts"):
        params = getattr(state, name).params
        by_name[name] = TrainState.create(apply_fn=(), params=params, tx=optax.sgd(1.0))
    after = ppo.update(state.replace(**by_name), batch)
    return [
        jax.flatten_util.ravel_pytree(
            jax.tree.map(jnp.subtract, getattr(after, name).params, old.params)
        )[0]
        for name, old in by_name.items()
    ]


def test_gradients_of_both_networks_are_those_of_float32():
    pairs = zip(steps_of_sgd(names()["low"]), steps_of_sgd(names()["ppo"]), strict=True)
    for low, plain in pairs:
        assert not np.array_equal(low, plain)
        error = np.linalg.norm(low - plain) / np.linalg.norm(plain)
        assert error < 0.01


def test_sac_whose_critic_is_differentiated_by_the_action_skips_no_step():
    half, skipping = names()["HalfPrecision"], names()["skipping"]
    sac = rejax.SAC.create(
        env="Pendulum-v1",
        total_timesteps=400,
        eval_freq=400,
        num_envs=4,
        fill_buffer=100,
        buffer_size=500,
        batch_size=32,
    )
    sac = sac.replace(actor=half(sac.actor), critic=half(sac.critic))
    state = sac.init_state(jax.random.key(0))
    every = ("actor_ts", "critic_ts", "alpha_ts")
    state = state.replace(**{name: skipping(getattr(state, name)) for name in every})
    state, _ = jax.jit(sac.train)(train_state=state)
    for name in every:
        metrics = ols.loss_scale_metrics(getattr(state, name))
        assert metrics["total_notfinite"] == 0, name
        assert ols.find_loss_scale_state(getattr(state, name)).step_count > 10


def test_minibatches_with_a_nan_change_no_bit():
    state = names()["state"]
    bad = state.replace(last_obs=jnp.full_like(state.last_obs, jnp.nan))
    after = iterate()(bad)
    for name in ("actor_ts", "critic_ts"):
        old, new = getattr(state, name), getattr(after, name)
        assert_same_bits(new.params, old.params)
        assert_same_bits(new.opt_state.inner_state, old.opt_state.inner_state)
        skipped = [ols.loss_scale_metrics(x)["total_notfinite"] for x in (new, old)]
        assert skipped[0] - skipped[1] == 8 * 4  # Epochs and minibatches.
