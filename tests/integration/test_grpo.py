"""The example of GRPO: its sampler, its gradient, and its measures of mismatch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lossscale as ols
import train_grpo
from helpers.inner import standard_promotion

RNG = np.random.default_rng(0)
needs_nnx_list = pytest.mark.skipif(
    not hasattr(nnx, "List"), reason="the model needs nnx.List, of Flax 0.12"
)


class Options:
    """A small model."""

    width, layers, digits = 32, 2, 5


def prompts_and_keys(batch):
    prompts = jnp.asarray(RNG.integers(0, 10, (batch, Options.digits)), jnp.int32)
    return prompts, jnp.asarray(RNG.integers(0, 2**32, (batch, 2)), jnp.uint32)


@needs_nnx_list
@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_the_sampler_with_its_cache_gives_the_probabilities_of_the_whole_text(heat):
    model = train_grpo.GPT(Options, nnx.Rngs(0))
    with standard_promotion():
        text, sampled = train_grpo.sample(model, *prompts_and_keys(16), heat)
        learned = train_grpo.answer_log_probs(model, text, heat)
    assert sampled.shape == (16, Options.digits)
    np.testing.assert_allclose(sampled, learned, atol=1e-5)


@needs_nnx_list
@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_program_rounds_to_bfloat16_wherever_it_says_so(level):
    """XLA must be told so, as in the runs of `benchmarks/rl`."""
    model = train_grpo.GPT(Options, nnx.Rngs(0))
    sampler = ols.autocast(train_grpo.sample, jnp.bfloat16, level=level)
    learner = ols.autocast(train_grpo.answer_log_probs, jnp.bfloat16, level=level)
    rounded = functools.partial(
        jax.jit, compiler_options={"xla_allow_excess_precision": False}
    )
    with standard_promotion():
        args = model, *prompts_and_keys(4), 1.0
        text, sampled = rounded(sampler)(*args)
        learned = rounded(learner)(model, text, 1.0)
        with jax.disable_jit():  # Each operation by itself.
            chex.assert_trees_all_equal(sampler(*args), (text, sampled))
            chex.assert_trees_all_equal(learner(model, text, 1.0), learned)


@needs_nnx_list
@pytest.mark.slow  # It draws 4,000 answers.
def test_answers_are_drawn_as_often_as_the_model_says():
    model = train_grpo.GPT(Options, nnx.Rngs(0))
    one, _ = prompts_and_keys(1)
    keys = jnp.asarray(RNG.integers(0, 2**32, (4000, 2)), jnp.uint32)
    with standard_promotion():
        text, _ = train_grpo.sample(model, jnp.repeat(one, 4000, axis=0), keys, 1.0)
        logits, _ = model(text[:1, : Options.digits + 1])
    expected = jax.nn.softmax(logits[0, -1])
    first = np.asarray(text[:, Options.digits + 1])
    counted = np.bincount(first, minlength=train_grpo.SYMBOLS) / 4000
    np.testing.assert_allclose(counted, expected, atol=0.03)


def test_the_gradient_is_that_of_the_clipped_objective():
    """Of three digits: one inside the clip range, one clipped, one with a weight."""
    logits = jnp.asarray(RNG.normal(size=(1, 6, train_grpo.SYMBOLS)), jnp.float32)
    text = jnp.asarray([[1, 2, 0, 10, 0, 1, 2]], jnp.int32)
    log_p = np.asarray(jax.nn.log_softmax(logits))[0, 3:]
    answer = [0, 1, 2]
    chosen = log_p[range(3), answer]
    ratio = np.array([1.1, 1.5, 0.9])
    old = jnp.asarray(chosen - np.log(ratio), jnp.float32)[None]
    weights, advantage = np.array([1.0, 1.0, 0.5]), 2.0

    def loss(logits):
        def model(_):
            return logits, []

        args = jnp.asarray([advantage]), jnp.asarray(weights, jnp.float32)[None], 1.0
        return train_grpo.loss_fn(model, text, old, *args)

    expected = np.zeros((6, train_grpo.SYMBOLS))
    for i, symbol in enumerate(answer):
        is_clipped = ratio[i] > 1 + train_grpo.CLIP
        factor = 0.0 if is_clipped else weights[i] * advantage * ratio[i] / 3
        expected[3 + i] = factor * (np.exp(log_p[i]) - np.eye(11)[symbol])
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


def test_a_planted_mismatch_is_measured():
    learned = jnp.asarray(RNG.normal(size=(8, 5)), jnp.float32)
    figures = train_grpo.mismatch(learned - jnp.log(1.5), learned)
    np.testing.assert_allclose(figures["difference_mean"], np.log(1.5), rtol=1e-5)
    assert figures["outside_clip"] == 1
    figures = train_grpo.mismatch(learned, learned)
    assert all(float(x) == 0 for x in figures.values())


def test_answers_are_rewarded_and_compared_with_their_group():
    text = jnp.array([[3, 1, 10, 1, 3], [3, 1, 10, 3, 1], [2, 2, 10, 2, 2]])
    assert train_grpo.rewards_of(text).tolist() == [1.0, 0.0, 1.0]
    advantages = train_grpo.advantages_of(jnp.array([1.0, 0.0, 1.0, 1.0]), 2)
    np.testing.assert_allclose(advantages, [1.0, -1.0, 0.0, 0.0], atol=1e-3)
