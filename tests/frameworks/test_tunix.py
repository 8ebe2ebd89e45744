"""Tunix's own trainer, which differentiates the loss, logs it and its gradient norm."""

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits

llama = pytest.importorskip("tunix.models.llama3.model", reason="needs Tunix")
peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")
utils = pytest.importorskip("tunix.sft.utils")
qwix = pytest.importorskip("qwix")

BATCH, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 16
POSITIONS = jnp.tile(jnp.arange(LENGTH), (BATCH, 1))
CAUSAL = utils.make_causal_attn_mask(jnp.ones((BATCH, LENGTH), bool))
CONFIG = llama.ModelConfig(
    num_layers=2,
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


def train(loss_fn, tx, has_lora=False, bad=None, steps=STEPS, **config):
    """The trainer after its steps, with the losses and norms that it logged."""
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=STEPS, max_steps=steps, **config
    )
    trainer = peft_trainer.PeftTrainer(make_model(has_lora), tx, config)
    trainer.with_gen_model_input_fn(
        lambda batch: {"tokens": batch.input_tokens, "mask": batch.input_mask}
    )
    trainer.with_loss_fn(loss_fn).train(make_batches(bad))
    logged = trainer.metrics_logger.get_metric_history
    return trainer, *(np.asarray(logged("", x, "train")) for x in ("loss", "grad_norm"))


# The two lines that change.
low_loss_fn = ols.scaled_backward(ols.autocast(loss_fn), 2.0**12)


def skipping(tx):
    return ols.loss_scaled(tx, ols.static_loss_scale(1.0))


def assert_same(one, other):
    assert_same_bits(nnx.state(one), nnx.state(other))


@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "LoRA"])
def test_losses_and_logged_norms_are_those_of_float32(has_lora):
    _, losses, norms = train(loss_fn, optax.adam(3e-3), has_lora)
    _, low_losses, low_norms = train(low_loss_fn, skipping(optax.adam(3e-3)), has_lora)
    assert len(losses) == STEPS
    assert not np.array_equal(losses, low_losses)  # Products are in float16.
    np.testing.assert_allclose(low_losses, losses, rtol=2e-3)
    np.testing.assert_allclose(low_norms, norms, rtol=2e-2)


@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "LoRA"])
def test_a_nan_batch_changes_no_bit(has_lora):
    bad = STEPS - 1
    before, _, _ = train(low_loss_fn, skipping(optax.adam(3e-3)), has_lora, steps=bad)
    after, losses, norms = train(low_loss_fn, skipping(optax.adam(3e-3)), has_lora, bad)
    assert np.isnan([losses[bad], norms[bad]]).all()
    assert ols.loss_scale_metrics(after.optimizer)["total_notfinite"] == 1
    assert_same(before.model, after.model)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    def run(steps, **config):
        tx = skipping(optax.adam(3e-3))
        return train(low_loss_fn, tx, bad=3, steps=steps, **config)

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
    assert_same(whole.model, resumed.model)
    assert_same(whole.optimizer, resumed.optimizer)


def test_gradients_are_accumulated_inside():
    adam = optax.adam(3e-3)
    _, losses, _ = train(loss_fn, optax.MultiSteps(adam, 2))
    tx = skipping(optax.MultiSteps(adam, 2))
    trainer, low_losses, _ = train(low_loss_fn, tx)
    np.testing.assert_allclose(low_losses, losses, rtol=2e-3)
    ols.raise_if_stalled(trainer.optimizer)


def test_gradients_that_tunix_accumulates_itself_are_warned_of():
    trainer, _, _ = train(
        low_loss_fn, skipping(optax.adam(3e-3)), steps=2, gradient_accumulation_steps=2
    )
    with pytest.warns(UserWarning, match=r"`optax.MultiSteps` must not be outside"):
        ols.raise_if_stalled(trainer.optimizer)
