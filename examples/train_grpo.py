"""Trains a GPT to sort digits by reinforcement learning (GRPO), with Flax NNX.

    python examples/train_grpo.py [--precision float16] [--correct yes]

First the GPT learns from sorted answers, in float32, until it sorts a part of them.
Then it learns from its own answers: a sampler draws a group of answers to each prompt,
a program rewards those that are right, and an answer that is better than its group
becomes more probable (https://arxiv.org/abs/2402.03300). `held_out_reward` is the share
of new prompts that are sorted right if each digit is the most probable one: more is
better.

The sampler is a program of its own, as in a library for inference: it writes one digit
after the other, keeps keys and values in a cache, and at level O2 has parameters and
activations in the low precision. The learner is under autocast at the level of
`--precision`. With the same parameters the two give different probabilities to the
same digits, and a report says by how much. `--sampler O1` makes both round alike. With
`--correct yes` each digit is weighted by the ratio of the two probabilities (truncated
importance sampling).

XLA may leave out roundings to bfloat16, in each program others. If the two must round
alike in bfloat16, forbid it: XLA_FLAGS=--xla_allow_excess_precision=false.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from tqdm import tqdm

import optax_lossscale as ols
from loop import has_checkpoint, make_mesh, train
from options import above_zero, parse_options, positive
from precision import cast, cast_params, low_dtype, with_loss_scale

HEAD_SIZE, EQUALS, SYMBOLS = 32, 10, 11  # Ten digits, and a sign that ends the prompt.
CLIP, LARGEST_WEIGHT, HELD_OUT = 0.2, 2.0, 1024

FIGURES = (
    *("difference_mean", "difference_max", "mismatch_kl", "outside_clip"),
    *("reward", "grad_norm"),
)
# Keys and values of a block, `f[batch, length, heads, HEAD_SIZE]`.
Cache = tuple[jax.Array, jax.Array]
Forward = Callable[..., Any]  # `GPT.__call__`, or the same under autocast.


class Block(nnx.Module):
    """Causal attention and a network of two layers, each added to its input."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.to_heads = nnx.Linear(width, 3 * width, rngs=rngs)
        self.from_heads = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(
        self, x: jax.Array, cache: Cache | None, start: jax.Array
    ) -> tuple[jax.Array, Cache]:
        heads = self.to_heads(self.norms[0](x))
        heads = heads.reshape(*x.shape[:2], -1, 3 * HEAD_SIZE)
        query, *new = jnp.split(heads, 3, -1)
        if cache is not None:
            new = [  # Level O2 rounds the cache to the low dtype, as all arguments.
                lax.dynamic_update_slice_in_dim(
                    old.astype(each.dtype), each, start, axis=1
                )
                for old, each in zip(cache, new, strict=True)
            ]
        places = start + jnp.arange(x.shape[1])
        is_seen = jnp.arange(new[0].shape[1]) <= places[:, None]
        mixed = jax.nn.dot_product_attention(query, *new, mask=is_seen[None, None])
        x = x + self.from_heads(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x)))), (new[0], new[1])


class GPT(nnx.Module):
    """Predicts the next symbol at every position of `i32[batch, length]`."""

    def __init__(self, options: argparse.Namespace, rngs: nnx.Rngs) -> None:
        width, make = options.width, nnx.initializers.normal(0.02)
        self.symbols = nnx.Embed(SYMBOLS, width, embedding_init=make, rngs=rngs)
        self.positions = nnx.Embed(
            2 * options.digits, width, embedding_init=make, rngs=rngs
        )
        self.blocks = nnx.List([Block(width, rngs) for _ in range(options.layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, SYMBOLS, rngs=rngs)

    def __call__(
        self,
        symbols: jax.Array,
        caches: list[Cache] | None = None,
        start: jax.Array | int = 0,
    ) -> tuple[jax.Array, list[Cache]]:
        """Returns logits, and the caches with the keys and values of these symbols."""
        places = start + jnp.arange(symbols.shape[1])
        x, new = self.symbols(symbols) + self.positions(places), []
        caches = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, cache, start)
            new.append(cache)
        return self.head(self.norm(x)), new


def log_probs(logits: jax.Array, symbols: jax.Array, heat: float) -> jax.Array:
    """Returns the log-probabilities of symbols at a temperature, in float32."""
    of_all = jax.nn.log_softmax(logits.astype(jnp.float32) / heat)
    return jnp.take_along_axis(of_all, symbols[..., None], axis=-1)[..., 0]


def answer_log_probs(
    forward: Forward, model: GPT, text: jax.Array, heat: float
) -> jax.Array:
    """Returns the log-probabilities of the answers, `f32[batch, digits]`."""
    digits = text.shape[1] // 2
    logits, _ = forward(model, text[:, :-1])
    return log_probs(logits[:, digits:], text[:, digits + 1 :], heat)


def sample(
    forward: Forward,
    model: GPT,
    prompts: jax.Array,
    keys: jax.Array | None,
    heat: float,
) -> tuple[jax.Array, jax.Array]:
    """Draws an answer to each prompt, `i32[batch, digits]`, one digit after the other.

    Returns the whole texts, and the log-probabilities of the answers. Each prompt has a
    key, `u32[batch, 2]`. Without keys each digit is the most probable one.
    """
    batch, digits = prompts.shape
    end = jnp.full((batch, 1), EQUALS)
    logits, caches = forward(model, jnp.concatenate([prompts, end], axis=1))
    room = [(0, 0), (0, digits - 1), (0, 0), (0, 0)]
    caches = jax.tree.map(lambda x: jnp.pad(x, room), caches)

    def draw(carry: Any, place: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        logits, caches = carry
        digit = logits.argmax(-1)
        if keys is not None:
            new_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, place)
            wide = logits.astype(jnp.float32) / heat
            digit = jax.vmap(jax.random.categorical)(new_keys, wide)
        next_logits, caches = forward(model, digit[:, None], caches, place)
        return (next_logits[:, 0], caches), (digit, log_probs(logits, digit, heat))

    places = digits + 1 + jnp.arange(digits)
    _, (answers, drawn) = lax.scan(draw, (logits[:, -1], caches), places)
    return jnp.concatenate([prompts, end, answers.T], axis=1), drawn.T


def rewards_of(text: jax.Array) -> jax.Array:
    """Returns 1 for each text whose answer is the sorted prompt, and else 0."""
    digits = text.shape[1] // 2
    prompts, answers = text[:, :digits], text[:, digits + 1 :]
    return jnp.all(answers == jnp.sort(prompts, axis=1), axis=1).astype(jnp.float32)


def advantages_of(rewards: jax.Array, group: int) -> jax.Array:
    """Returns how much better each answer is than its group, in standard deviations."""
    groups = rewards.reshape(-1, group)
    groups -= groups[:, :1]  # So that a group of equal rewards gives exactly 0.
    centered = groups - groups.mean(axis=1, keepdims=True)
    return (centered / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def weights_of(sampled: jax.Array, learned: jax.Array) -> jax.Array:
    """Returns the learner's probability of each digit over the sampler's, cut off."""
    return jnp.minimum(jnp.exp(learned - sampled), LARGEST_WEIGHT)


class Batch(NamedTuple):
    """Answers to learn from, with what the sampler says of them."""

    text: jax.Array  # i32[batch, 2 * digits + 1]
    sampled: jax.Array  # f32[batch, digits], log-probabilities.
    rewards: jax.Array  # f32[batch]


class State(NamedTuple):
    """What a step changes."""

    model: nnx.State  # With the optimizer.
    history: dict[str, jax.Array]  # Figures of each step, `f32[steps]`.
    count: jax.Array  # Of steps.


def mismatch(sampled: jax.Array, learned: jax.Array) -> dict[str, jax.Array]:
    """Returns how far the log-probabilities of the same symbols differ.

    The KL divergence of the sampler from the learner is the mean of `r - 1 - log(r)`,
    where `r` is the ratio of their probabilities.
    """
    difference = learned - sampled
    ratio = jnp.exp(difference)
    return {
        "difference_mean": jnp.abs(difference).mean(),
        "difference_max": jnp.abs(difference).max(),
        "mismatch_kl": (jnp.expm1(difference) - difference).mean(),
        "outside_clip": (jnp.abs(ratio - 1) > CLIP).mean(),
    }


def loss_fn(
    forward: Forward,
    model: GPT,
    text: jax.Array,
    old: jax.Array,
    advantages: jax.Array,
    weights: jax.Array,
    heat: float,
) -> jax.Array:
    """Returns the loss of GRPO, a clipped policy gradient: a mean over all digits."""
    ratio = jnp.exp(answer_log_probs(forward, model, text, heat) - old)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -jnp.mean(weights * gain)


def pretrain(model: GPT, options: argparse.Namespace) -> None:
    """Teaches the model from sorted answers, in float32."""
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def learn(model: GPT, optimizer: nnx.Optimizer, text: jax.Array) -> None:
        def loss(model: GPT) -> jax.Array:
            return -answer_log_probs(GPT.__call__, model, text, 1.0).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for index in tqdm(range(options.pretrain), desc="pretraining", leave=False):
        rng = np.random.default_rng((options.seed, 1, index))
        prompts = rng.integers(0, 10, (64, options.digits), np.int32)
        ends = np.full((64, 1), EQUALS, np.int32)
        text = np.concatenate([prompts, ends, np.sort(prompts, axis=1)], axis=1)
        learn(model, optimizer, text)


def main() -> None:
    """Reads the options, pretrains, and learns from rewards."""
    options = parse_options(
        __doc__.splitlines()[0],
        steps=600,
        report=20,
        digits=(positive, 8, "digits of a prompt"),
        layers=(positive, 2, "number of blocks"),
        width=(positive, 64, f"width of a block, a multiple of {HEAD_SIZE}"),
        prompts=(positive, 16, "prompts of a step"),
        group=(positive, 8, "answers to each prompt"),
        updates=(positive, 2, "updates from the same answers"),
        temperature=(above_zero, 1.0, "temperature of the sampler"),
        pretrain=(positive, 120, "steps of pretraining"),
        learning_rate=(float, 3e-4, "learning rate of the first step"),
        sampler=(
            ["O1", "O2"],
            "O2",
            "level of the sampler's autocast, except in float32",
        ),
        correct=(
            ["yes", "no"],
            "no",
            "weight each digit by the learner's probability over the sampler's, "
            f"at most {LARGEST_WEIGHT:g}",
        ),
    )
    if options.width % HEAD_SIZE:
        raise SystemExit(f"--width must be a multiple of {HEAD_SIZE}")
    if options.group == 1:
        raise SystemExit("--group must be at least 2, for answers to compare")
    mesh = make_mesh(options)
    heat = options.temperature
    model = GPT(options, nnx.Rngs(options.seed))
    # A run that continues has its parameters in a checkpoint.
    if not has_checkpoint(options.folder):
        pretrain(model, options)
    weights = nnx.state(model, nnx.Param)
    # Of the model alone: at O2 the loss would round the old log-probabilities, too.
    forward = sampler_forward = cast(GPT.__call__, options)
    if options.precision != "float32":
        sampler_forward = ols.autocast(
            GPT.__call__, low_dtype(options), level=options.sampler
        )
    run_sample = functools.partial(sample, sampler_forward)
    run_log_probs = functools.partial(answer_log_probs, forward)
    run_loss = functools.partial(loss_fn, forward)

    def make() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(options, nnx.Rngs(options.seed))
        nnx.update(model, cast_params(weights, options))
        count = options.steps * options.updates
        rate = optax.linear_schedule(options.learning_rate, 0.0, count)
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        return model, nnx.Optimizer(
            model, with_loss_scale(inner, options), wrt=nnx.Param
        )

    structure = nnx.graphdef(nnx.eval_shape(make))

    def start() -> State:
        history = {name: jnp.zeros(options.steps) for name in FIGURES}
        return State(nnx.state(make()), history, jnp.int32(0))

    def batch_of(index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((options.seed, 2, index))
        prompts = rng.integers(0, 10, (options.prompts, options.digits), np.int32)
        prompts = np.repeat(prompts, options.group, axis=0)
        return {
            "prompts": prompts,
            "keys": rng.integers(0, 2**32, (len(prompts), 2), np.uint32),
        }

    def rollout(state: State, batch: dict[str, jax.Array]) -> Batch:
        """The sampler's program."""
        model, _ = nnx.merge(structure, state.model)
        text, sampled = run_sample(model, batch["prompts"], batch["keys"], heat)
        return Batch(text, sampled, rewards_of(text))

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        """The learner's program."""
        model, optimizer = nnx.merge(structure, state.model)
        old = run_log_probs(model, batch.text, heat)
        is_corrected = options.correct == "yes"
        weights = weights_of(batch.sampled if is_corrected else old, old)
        advantages = advantages_of(batch.rewards, options.group)
        args = batch.text, old, advantages, weights, heat
        for _ in range(options.updates):
            loss, grads = ols.scaled_value_and_grad(run_loss, optimizer)(model, *args)
            metrics = ols.loss_scale_metrics(optimizer, grads=grads)
            optimizer.update(model, grads)
        figures = mismatch(batch.sampled, old)
        figures |= {"reward": batch.rewards.mean(), "grad_norm": metrics["grad_norm"]}
        history = {
            name: column.at[state.count].set(figures[name])
            for name, column in state.history.items()
        }
        new = State(nnx.state((model, optimizer)), history, state.count + 1)
        return new, loss

    prompts = np.random.default_rng((options.seed, 3, 0)).integers(
        0, 10, (HELD_OUT, options.digits), np.int32
    )

    def evaluate(state: State) -> dict[str, jax.Array]:
        """Rewards of new prompts, and figures of the steps since the last report."""
        model, optimizer = nnx.merge(structure, state.model)
        text, _ = run_sample(model, prompts, None, heat)
        metrics = ols.loss_scale_metrics(optimizer)
        before = (state.count - 1) // options.report * options.report
        places = jnp.arange(options.steps)
        is_new = (places >= before) & (places < state.count)
        figures = {}
        for name, column in state.history.items():
            # A skipped step has no norm.
            known = is_new & jnp.isfinite(column) if name == "grad_norm" else is_new
            figures[name] = column.sum(where=known) / jnp.maximum(known.sum(), 1)
        largest = state.history["difference_max"].max(where=is_new, initial=0)
        return {
            "held_out_reward": rewards_of(text).mean(),
            **figures,
            "difference_max": largest,
            "loss_scale": metrics["loss_scale"],
            "skipped": metrics["total_notfinite"],
        }

    def optimizer_of(state: State) -> nnx.Optimizer:
        return nnx.merge(structure, state.model)[1]

    train(options, mesh, start, batch_of, step, evaluate, optimizer_of, rollout)


if __name__ == "__main__":
    main()
