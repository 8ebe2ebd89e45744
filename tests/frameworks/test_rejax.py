"""rejax, which has the losses, the optimizers and the loop inside.

Promised in docs/trainers.md.
"""

import functools
import warnings

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.pages import run_program

with warnings.catch_warnings(action="ignore"):  # Of deprecated names of JAX.
    import rejax.algos.ppo as rejax_ppo


@functools.cache
def names():
    """What the program defines."""
    return run_program("rejax_ppo")


@functools.cache
def iterate():
    return jax.jit(names()["low"].train_iteration)


def test_the_program_learns():
    returns = np.asarray(names()["returns"]).mean(axis=1)
    assert returns[-1] > 2 * returns[0]


@jax.jit
def first_minibatch():
    """A state with a learning rate of 1, and the steps of all environments."""
    ppo = names()["ppo"]
    state, trajectories = ppo.collect_trajectories(ppo.init_state(jax.random.key(1)))
    advantages, targets = ppo.calculate_gae(trajectories, jnp.zeros(16))
    batch = rejax_ppo.AdvantageMinibatch(trajectories, advantages, targets)
    by_name = {
        name: TrainState.create(
            apply_fn=(), params=getattr(state, name).params, tx=optax.sgd(1.0)
        )
        for name in ("actor_ts", "critic_ts")
    }
    return state.replace(**by_name), jax.tree.map(jnp.concatenate, batch)


def steps_of_sgd(ppo):
    """By how much one minibatch changes the parameters of both networks."""
    state, batch = first_minibatch()
    after = jax.jit(ppo.update)(state, batch)
    return [
        jax.flatten_util.ravel_pytree(
            jax.tree.map(jnp.subtract, new.params, old.params)
        )[0]
        for new, old in (
            (after.actor_ts, state.actor_ts),
            (after.critic_ts, state.critic_ts),
        )
    ]


def test_gradients_of_both_networks_are_those_of_float32():
    pairs = zip(steps_of_sgd(names()["low"]), steps_of_sgd(names()["ppo"]), strict=True)
    for low, plain in pairs:
        assert not np.array_equal(low, plain)
        error = np.linalg.norm(low - plain) / np.linalg.norm(plain)
        assert error < 0.01


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
