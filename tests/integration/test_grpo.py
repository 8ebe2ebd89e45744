"""The example of GRPO: its sampler, its gradient, and its measures of mismatch."""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train_grpo
from helpers.inner import standard_promotion

RNG = np.random.default_rng(0)
FORWARD = train_grpo.GPT.__call__
SAMPLE = jax.jit(train_grpo.sample, static_argnums=0)
ANSWER_LOG_PROBS = jax.jit(train_grpo.answer_log_probs, static_argnums=0)
SMALL = argparse.Namespace(width=32, layers=2, digits=5)


def prompts_and_keys(batch):
    prompts = jnp.asarray(RNG.integers(0, 10, (batch, SMALL.digits)), jnp.int32)
    return prompts, jnp.asarray(RNG.integers(0, 2**32, (batch, 2)), jnp.uint32)


@pytest.mark.slow
def test_the_sampler_with_its_cache_gives_the_probabilities_of_the_whole_text():
    heat = 0.7
    model = train_grpo.GPT(SMALL, nnx.Rngs(0))
    with standard_promotion():
        text, sampled = SAMPLE(FORWARD, model, *prompts_and_keys(16), heat)
        learned = ANSWER_LOG_PROBS(FORWARD, model, text, heat)
    assert sampled.shape == (16, SMALL.digits)
    np.testing.assert_allclose(sampled, learned, atol=1e-5)


@pytest.mark.slow  # It draws 20,000 answers.
def test_whole_answers_are_drawn_as_often_as_the_model_says():
    heat = 3.0
    options = argparse.Namespace(width=32, layers=1, digits=2)
    model = train_grpo.GPT(options, nnx.Rngs(0))
    model.head.kernel[...] *= 8  # Else all answers would be about as probable.
    prompts = jnp.tile(jnp.array([[7, 3]]), (20_000, 1))
    keys = jnp.asarray(RNG.integers(0, 2**32, (20_000, 2)), jnp.uint32)
    pairs = jnp.stack(jnp.divmod(jnp.arange(train_grpo.SYMBOLS**2), train_grpo.SYMBOLS))
    given = jnp.tile(jnp.array([[7, 3, train_grpo.EQUALS]]), (pairs.shape[1], 1))
    with standard_promotion():
        text, _ = train_grpo.sample(FORWARD, model, prompts, keys, heat)
        every = jnp.concatenate([given, pairs.T], axis=1)
        expected = train_grpo.answer_log_probs(FORWARD, model, every, heat)
    expected = np.exp(np.asarray(expected.sum(axis=1)))
    np.testing.assert_allclose(expected.sum(), 1, rtol=1e-4)
    numbers = np.asarray(text[:, 3] * train_grpo.SYMBOLS + text[:, 4])
    counted = np.bincount(numbers, minlength=len(expected)) / 20_000
    error = np.sqrt(expected * (1 - expected) / 20_000)
    assert np.all(np.abs(counted - expected) < 5 * error + 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_gradient_is_that_of_the_clipped_objective(advantage):
    """Of four digits: two inside the clip range, one of them with a weight."""
    logits = jnp.asarray(RNG.normal(size=(1, 8, train_grpo.SYMBOLS)), jnp.float32)
    text = jnp.asarray([[1, 2, 0, 3, 10, 0, 1, 2, 3]], jnp.int32)
    log_p = np.asarray(jax.nn.log_softmax(logits))[0, 4:]
    answer = [0, 1, 2, 3]
    chosen = log_p[range(4), answer]
    ratio = np.array([1.1, 1.5, 0.9, 0.5])
    old = jnp.asarray(chosen - np.log(ratio), jnp.float32)[None]
    weights = np.array([1.0, 1.0, 0.5, 1.0])

    def loss(logits):
        args = jnp.asarray([advantage]), jnp.asarray(weights, jnp.float32)[None], 1.0
        return train_grpo.loss_fn(lambda *_: (logits, []), None, text, old, *args)

    # A gain that would grow beyond the range is clipped; one that shrinks is not.
    beyond = ratio > 1 + train_grpo.CLIP
    if advantage < 0:
        beyond = ratio < 1 - train_grpo.CLIP
    expected = np.zeros((8, train_grpo.SYMBOLS))
    for i, symbol in enumerate(answer):
        factor = 0.0 if beyond[i] else weights[i] * advantage * ratio[i] / 4
        expected[4 + i] = factor * (np.exp(log_p[i]) - np.eye(11)[symbol])
    np.testing.assert_allclose(jax.grad(loss)(logits)[0], expected, atol=1e-6)


def test_the_kl_divergence_is_that_of_two_known_distributions():
    sampler, learner = np.array([0.5, 0.25, 0.25]), np.array([0.4, 0.4, 0.2])
    drawn = [0, 0, 1, 2]  # Each as often as the sampler draws it.
    figures = train_grpo.mismatch(
        jnp.log(jnp.asarray(sampler, jnp.float32))[jnp.array(drawn)],
        jnp.log(jnp.asarray(learner, jnp.float32))[jnp.array(drawn)],
    )
    kl = np.sum(sampler * np.log(sampler / learner))
    np.testing.assert_allclose(figures["mismatch_kl"], kl, rtol=1e-5)
    # Ratios of 0.8, 0.8, 1.6 and 0.8, of which one is outside of 0.8 to 1.2.
    np.testing.assert_allclose(figures["difference_max"], np.log(1.6), rtol=1e-5)


def test_answers_are_rewarded_and_compared_with_their_group():
    text = jnp.array([[3, 1, 10, 1, 3], [3, 1, 10, 3, 1], [2, 2, 10, 2, 2]])
    assert train_grpo.rewards_of(text).tolist() == [1.0, 0.0, 1.0]
    advantages = train_grpo.advantages_of(jnp.array([1.0, 0.0, 1.0, 1.0]), 2)
    np.testing.assert_allclose(advantages, [1.0, -1.0, 0.0, 0.0], atol=1e-3)
    # The mean of 41 ones is not quite one in float32.
    assert not train_grpo.advantages_of(jnp.ones(41), 41).any()


@pytest.fixture
def program(monkeypatch):
    """Returns a function that runs `main` up to its loop, and returns its functions."""

    def run(*options):
        given = []
        monkeypatch.setattr(train_grpo, "train", lambda *args: given.extend(args))
        monkeypatch.setattr(train_grpo, "make_mesh", lambda options: None)
        small = ["--width", "32", "--layers", "1", "--digits", "2", "--pretrain", "1"]
        small += ["--prompts", "2", "--group", "4", "--updates", "1", "--steps", "3"]
        monkeypatch.setattr(sys, "argv", ["train_grpo.py", *small, *options])
        train_grpo.main()
        names = ["mesh", "start", "batch_of", "step", "evaluate"]
        functions = dict(zip(names, given[1:6], strict=True))
        return argparse.Namespace(rollout=given[-1], **functions)

    with standard_promotion():
        yield run


@pytest.mark.slow
def test_the_sampler_rounds_as_its_level_says_and_the_learner_as_its_precision_says(
    program,
):
    sampled, learned = {}, {}
    for level in "O1", "O2":
        run = program("--precision", "float16", "--sampler", level)
        batch = jax.jit(run.rollout)(run.start(), run.batch_of(0))
        state, _ = jax.jit(run.step)(run.start(), batch)
        sampled[level] = batch.sampled
        learned[level] = state.history["difference_max"][0]
    assert learned["O1"] < 1e-5  # Both round alike.
    assert learned["O2"] > 5e-5
    assert not np.array_equal(sampled["O1"], sampled["O2"])


@pytest.mark.slow
def test_digits_are_weighted_by_the_ratio_of_learner_to_sampler_up_to_two(program):
    run = program("--precision", "float32", "--correct", "yes")
    state = run.start()
    batch = run.rollout(state, run.batch_of(0))
    rewards = jnp.array([1.0, 0.0, 0.0, 0.0] * 2)
    good = rewards[:, None] == 1  # The sampler had said a quarter for these.
    sampled = jnp.where(good, batch.sampled - jnp.log(4.0), batch.sampled)
    _, loss = jax.jit(run.step)(state, batch._replace(sampled=sampled, rewards=rewards))
    advantages = train_grpo.advantages_of(rewards, 4)
    # Before the first update all ratios are 1.
    expected = -np.mean(np.where(rewards == 1, 2.0, 1.0) * advantages)
    np.testing.assert_allclose(loss, expected, atol=1e-5)
