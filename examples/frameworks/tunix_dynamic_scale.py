"""A dynamic loss scale in Tunix, and a bad batch. Install google-tunix."""

import copy

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import optax_lossscale as ols

STEPS, BATCH, LENGTH, VOCABULARY = 40, 8, 16, 64


class DynamicTrainer(PeftTrainer):
    """A trainer whose loss is scaled by the scale in the state of its optimizer."""

    def _train_step(self, model, optimizer, inputs):
        # A copy: the next trace, and evaluation, need the loss without a scale.
        scaled = copy.copy(self)
        scaled.loss_fn = ols.scaled_backward(self.loss_fn, optimizer)
        return super(DynamicTrainer, scaled)._train_step(model, optimizer, inputs)


config = llama.ModelConfig(
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
model = llama.Llama3(config, rngs=nnx.Rngs(0))


def batches():
    """Tokens in steps of three; the weights of the last batch are NaN."""
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS, BATCH, 1))
    for number, start in enumerate(starts, 1):
        tokens = (start + 3 * np.arange(LENGTH)) % VOCABULARY
        weight = np.nan if number == STEPS else 1.0
        yield TrainingInput(tokens, np.full(tokens.shape, weight, np.float32))


def model_inputs(batch):
    mask = jnp.ones(batch.input_tokens.shape, bool)
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


tx = ols.loss_scaled(optax.adam(3e-3), grads_unscaled=True)
settings = TrainingConfig(eval_every_n_steps=STEPS, max_steps=STEPS)
trainer = DynamicTrainer(model, tx, settings).with_gen_model_input_fn(model_inputs)
trainer.with_loss_fn(ols.autocast(trainer.loss_fn))
trainer.train(batches())
ols.raise_if_stalled(trainer.optimizer)
losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
print(f"loss {losses[0]:.2f} at first, {losses[-2]:.2f} before the bad batch")
metrics = ols.loss_scale_metrics(trainer.optimizer)
print(f"scale {metrics['loss_scale']:.0f}, skipped {metrics['total_notfinite']}")
# loss 4.16 at first, 1.28 before the bad batch
# scale 16384, skipped 1
