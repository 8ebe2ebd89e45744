"""Tunix's own trainers, which differentiate the loss, log it and its gradient norm.

Promised in docs/trainers.md.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import qwix
from flax import nnx
from jax.sharding import Mesh
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner as grpo
from tunix.rl.rollout import base_rollout as rollout
from tunix.sft import peft_trainer, utils

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.pages import run_program

run = functools.cache(run_program)
BATCH, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 8
POSITIONS = jnp.tile(jnp.arange(LENGTH), (BATCH, 1))
CAUSAL = utils.make_causal_attn_mask(jnp.ones((BATCH, LENGTH), bool))
CONFIG = llama.ModelConfig(
    num_layers=1,
    vocab_size=VOCABULARY,
    embed_dim=32,
    hidden_dim=64,
    num_heads=2,
    head_dim=16,
    num_kv_heads=1,
    rope_theta=10_000,
    norm_eps=1e-5,
)


def make_model(has_lora):
    model = llama.Llama3(CONFIG, rngs=nnx.Rngs(0))
    if not has_lora:
        return model
    provider = qwix.LoraProvider(module_path=".*_proj", rank=4, alpha=8.0)
    tokens = jnp.ones((BATCH, LENGTH), jnp.int32)
    call = {"positions": POSITIONS, "cache": None, "attention_mask": CAUSAL}
    return qwix.apply_lora_to_model(
        model, provider, input_tokens=tokens, **call, rngs=nnx.Rngs(1)
    )


def make_batches(bad):
    """Tokens in steps of three, which a model can learn; the bad batch is NaN."""
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS, BATCH, 1))
    for number, start in enumerate(starts):
        yield peft_trainer.TrainingInput(
            input_tokens=(start + 3 * np.arange(LENGTH)) % VOCABULARY,
            input_mask=np.full((BATCH, LENGTH), np.nan if number == bad else 1.0, "f4"),
        )


def loss_fn(model, tokens, mask):
    logits, _ = model(tokens, POSITIONS, None, CAUSAL)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], tokens[:, 1:]
    )
    return jnp.mean(losses * mask[:, 1:])


def train(
    loss_fn,
    tx,
    has_lora=False,
    bad=None,
    steps=STEPS,
    trainer_class=peft_trainer.PeftTrainer,
    **config,
):
    """The trainer after its steps, with the losses and norms that it logged."""
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=STEPS, max_steps=steps, **config
    )
    trainer = trainer_class(make_model(has_lora), tx, config)
    remember(trainer)
    trainer.with_gen_model_input_fn(
        lambda batch: {"tokens": batch.input_tokens, "mask": batch.input_mask}
    )
    trainer.with_loss_fn(loss_fn).train(make_batches(bad))
    logged = trainer.metrics_logger.get_metric_history
    return trainer, *(np.asarray(logged("", x, "train")) for x in ("loss", "grad_norm"))


def remember(trainer):
    """Keeps the model's arrays from before each step as `trainer.before`."""

    def start(trainer):
        trainer.before = jax.tree.map(jnp.copy, nnx.state(trainer.model))

    trainer.with_training_hooks(mock.Mock(on_train_step_start=start))


# The two lines that change.
low_loss_fn = ols.scaled_backward(ols.autocast(loss_fn), 2.0**12)


def skipping(tx):
    return ols.loss_scaled(tx, ols.static_loss_scale(1.0))


def assert_skipped(trainer):
    """Checks that one step was skipped, the last, and changed no bit of the model."""
    assert ols.loss_scale_metrics(trainer.optimizer)["total_notfinite"] == 1
    assert_same_bits(nnx.state(trainer.model), trainer.before)


ADAM = optax.adam(3e-3)


@pytest.mark.parametrize(
    ("tx", "has_lora"),
    [(ADAM, False), (optax.MultiSteps(ADAM, 2), True)],
    ids=["all", "LoRA, accumulated inside"],
)
def test_losses_and_norms_are_those_of_float32_until_a_nan_changes_no_bit(tx, has_lora):
    _, losses, norms = train(loss_fn, tx, has_lora)
    trainer, low_losses, low_norms = train(
        low_loss_fn, skipping(tx), has_lora, bad=STEPS - 1
    )
    assert len(losses) == STEPS
    assert not np.array_equal(losses[:-1], low_losses[:-1])  # In float16.
    np.testing.assert_allclose(low_losses[:-1], losses[:-1], rtol=2e-3)
    np.testing.assert_allclose(low_norms[:-1], norms[:-1], rtol=2e-2)
    assert np.isnan([low_losses[-1], low_norms[-1]]).all()
    assert_skipped(trainer)


def test_the_program_of_supervised_training_learns():
    losses = run("tunix_sft")["losses"]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "LoRA"])
def test_a_dynamic_scale_is_halved_by_a_nan_which_changes_no_bit(has_lora):
    dynamic = run("tunix_dynamic_scale")["DynamicTrainer"]
    tx, low = ols.loss_scaled(ADAM, grads_unscaled=True), ols.autocast(loss_fn)
    _, losses, norms = train(loss_fn, ADAM, has_lora)
    trainer, low_losses, low_norms = train(
        low, tx, has_lora, bad=STEPS - 1, trainer_class=dynamic
    )
    np.testing.assert_allclose(low_losses[:-1], losses[:-1], rtol=2e-3)
    np.testing.assert_allclose(low_norms[:-1], norms[:-1], rtol=2e-2)
    assert_skipped(trainer)
    assert ols.get_loss_scale(trainer.optimizer) == 2.0**14


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    def run(steps, **config):
        return train(low_loss_fn, skipping(ADAM), bad=3, steps=steps, **config)

    config = {
        "checkpoint_root_directory": str(tmp_path),
        "checkpointing_options": ocp.CheckpointManagerOptions(
            save_interval_steps=1, max_to_keep=1
        ),
    }
    whole, _, _ = run(STEPS)
    run(STEPS // 2, **config)
    resumed, losses, _ = run(STEPS, **config)
    assert len(losses) < STEPS  # It did not begin anew.
    assert ols.loss_scale_metrics(resumed.optimizer)["total_notfinite"] == 1
    for name in ("model", "optimizer"):
        states = [nnx.state(getattr(trainer, name)) for trainer in (whole, resumed)]
        assert_same_bits(*states)


def test_gradients_that_tunix_accumulates_itself_are_warned_of():
    trainer, _, _ = train(
        low_loss_fn, skipping(ADAM), steps=1, gradient_accumulation_steps=2
    )
    with pytest.warns(UserWarning, match=r"`optax.MultiSteps` must not be outside"):
        ols.raise_if_stalled(trainer.optimizer)


class Letters:
    """A tokenizer of lowercase letters."""

    def encode(self, text):
        return [ord(letter) - ord("a") + 3 for letter in text]

    def decode(self, tokens):
        return "".join(chr(int(token) - 3 + ord("a")) for token in tokens)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


# Its products are float16 in the learner, in the sampler and in the reference.
class LowLlama(llama.Llama3):
    __call__ = ols.autocast(llama.Llama3.__call__)


def learn(kind, steps, bad=None):
    """The learner after its steps; the reward is the share of the letter e."""
    model_class = LowLlama if kind == "low" else llama.Llama3
    actor, reference = (model_class(CONFIG, rngs=nnx.Rngs(0)) for _ in range(2))
    optimizer = optax.adam(1e-2)
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    training_config = rl_cluster.RLTrainingConfig(
        actor_optimizer=skipping(optimizer) if kind == "low" else optimizer,
        eval_every_n_steps=1000,
        max_steps=steps,
        mini_batch_size=4,
    )
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=training_config,
            rollout_config=rollout.RolloutConfig(
                max_tokens_to_generate=8,
                max_prompt_length=4,
                kv_cache_size=16,
                temperature=1.0,
            ),
        ),
    )

    def reward(prompts, completions, **_):
        pairs = zip(prompts, completions, strict=True)
        return [text.count("e") / 8 if ask != "zzzz" else np.inf for ask, text in pairs]

    learner = grpo.GRPOLearner(cluster, grpo.GRPOConfig(num_generations=8), reward)
    trainer = cluster.actor_trainer
    remember(trainer)
    if kind == "low":
        low = ols.scaled_backward(trainer.loss_fn, 2.0**12)
        trainer.with_loss_fn(low, has_aux=True)
    letters = np.random.default_rng(0).integers(3, 29, (steps, 4, 4))
    if bad is not None:
        letters[bad] = Letters().encode("zzzz")
    learner.train(
        {"prompts": np.array([Letters().decode(row) for row in rows])}
        for rows in letters
    )
    return trainer


def logged(trainer, prefix, name):
    history = trainer.metrics_logger.get_metric_history
    return np.asarray(history(prefix, name, "train"))


@pytest.fixture
def _threads_are_not_strict():
    """The learner samples in a thread of its own, which no context manager reaches."""
    loose = {
        "jax_numpy_dtype_promotion": "standard",
        "jax_numpy_rank_promotion": "allow",
    }
    for name, value in loose.items():
        jax.config.update(name, value)
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.mark.usefixtures("_threads_are_not_strict")
def test_grpo_learns_with_float16_products_until_an_infinite_reward_changes_no_bit():
    plain, low = learn("float32", 2), learn("low", 21, bad=20)
    norms = [logged(trainer, "actor", "grad_norm") for trainer in (low, plain)]
    assert not np.array_equal(norms[0][:2], norms[1])
    np.testing.assert_allclose(norms[0][:2], norms[1], rtol=1e-2)
    rewards = logged(low, "rewards", "score/mean")
    assert rewards[0] < 0.1
    assert rewards[-2] > 0.3
    assert np.isnan(norms[0][-1])
    assert_skipped(low)
