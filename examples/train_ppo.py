"""Trains a network to play the game 2048 by PPO, with Flax linen.

    python examples/train_ppo.py [--precision float16]

The package pgx plays 2048 in JAX, so a step is one compiled program: the network plays
`--moves` moves of `--games` games, and learns from them. `held_out_score` is the mean
score of new games: more is better. The loss grows with the values that it predicts.

`policy_kl` is the mismatch between playing and training. Moves are drawn from a copy of
the network with parameters and activations in the low precision, as in an inference
engine. Autocast, which trains the network, rounds in other places. `policy_kl` is the
mean KL divergence of the two policies at the same parameters. It grows with the square
of the rounding errors, and those of bfloat16 are 8 times those of float16.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import optax_lossscale as ols
from loop import make_mesh, train
from options import parse_options, positive
from precision import cast, cast_params, low_dtype, scale_figures, with_loss_scale

POINTS = 100.0  # A move scores up to hundreds of points. The network learns them / 100.
EPOCHS, BATCHES, HELD_OUT_GAMES = 4, 8, 64
DISCOUNT, TRACE, CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.995, 0.95, 0.2, 0.5, 0.01


class Network(nn.Module):
    """Returns logits of the four moves, and the value, of `[..., 4, 4, 31]` boards."""

    dtype: Any = None  # None computes in the dtype of the parameters.

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dense = partial(nn.Dense, dtype=self.dtype)
        for _ in range(2):  # Each layer sees 2x2 squares, as a convolution does.
            x = jnp.concatenate([x[..., :-1, :, :], x[..., 1:, :, :]], -1)
            x = jnp.concatenate([x[..., :-1, :], x[..., 1:, :]], -1)
            x = nn.relu(dense(64)(x))
        x = nn.relu(dense(256)(x.reshape(*x.shape[:-3], -1)))
        small = nn.initializers.orthogonal(0.01)  # At first all moves are as likely.
        return dense(4, kernel_init=small)(x), dense(1)(x)[..., 0]


class Moves(NamedTuple):
    """What the network learns from: arrays of `[moves, games, ...]`."""

    board: jax.Array
    legal: jax.Array  # Of all four moves, as is `log_policy`.
    log_policy: jax.Array
    move: jax.Array
    advantage: jax.Array
    target: jax.Array  # What the value should be.


def log_softmax(logits: jax.Array, legal: jax.Array) -> jax.Array:
    """Returns the logarithms of the probabilities of the moves, in float32."""
    return jax.nn.log_softmax(jnp.where(legal, logits.astype(jnp.float32), -1e9))


def mean_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """Returns the mean of KL(p || q), to full precision even if p is close to q."""
    d = log_q - log_p  # The mean of expm1(d) under p is 0, and no term is negative.
    return jnp.sum(jnp.exp(log_p) * (jnp.expm1(d) - d), -1).mean()


def estimate(values: jax.Array, rewards: jax.Array, goes_on: jax.Array) -> Any:
    """Returns normalized advantages of all moves but the last, and target values."""

    def back(advantage, row):
        error, goes_on = row
        advantage = error + DISCOUNT * TRACE * goes_on * advantage
        return advantage, advantage

    values, next_values, goes_on = values[:-1], values[1:], goes_on[:-1]
    errors = rewards[:-1] / POINTS + DISCOUNT * goes_on * next_values - values
    _, gains = jax.lax.scan(back, 0 * errors[0], (errors, goes_on), reverse=True)
    return jax.nn.standardize(gains, axis=None), gains + values


def loss_fn(params: Any, moves: Moves) -> jax.Array:
    """Returns PPO's loss: of the policy and the value, less a bonus for entropy."""
    logits, value = Network().apply(params, moves.board)
    log_policy = log_softmax(logits, moves.legal)
    change = log_policy - moves.log_policy
    ratio = jnp.exp(jnp.take_along_axis(change, moves.move[..., None], -1)[..., 0])
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * moves.advantage, clipped * moves.advantage).mean()
    value_loss = 0.5 * jnp.square(value - moves.target).mean()
    entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, -1).mean()
    return VALUE_WEIGHT * value_loss - gain - ENTROPY_WEIGHT * entropy


def main() -> None:
    """Reads the options and trains."""
    options = parse_options(
        __doc__.splitlines()[0],
        steps=150,
        report=10,
        games=(positive, 64, "games that are played at the same time"),
        moves=(positive, 64, f"moves of a game in a step, a multiple of {BATCHES}"),
        learning_rate=(float, 1e-3, "learning rate of the first step"),
    )
    if options.moves % BATCHES:
        raise SystemExit(f"--moves must be a multiple of {BATCHES}")
    mesh = make_mesh(options)
    import pgx  # Only now, because it makes arrays when it is imported.
    from pgx.experimental import auto_reset

    game = pgx.make("2048")
    new_games, go_on = jax.vmap(game.init), jax.vmap(auto_reset(game.step, game.init))
    updates = options.steps * EPOCHS * BATCHES
    rate = optax.linear_schedule(options.learning_rate, 0.0, updates)
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))
    optimizer = with_loss_scale(inner, options)
    run_loss, run_network = cast(loss_fn, options), cast(Network().apply, options)

    def start() -> tuple[Any, Any, Any]:
        keys = jax.random.split(jax.random.key(options.seed), options.games + 1)
        games = new_games(keys[1:])
        params = cast_params(Network().init(keys[0], games.observation), options)
        return params, optimizer.init(params), games

    def batch_of(index: int) -> np.ndarray:
        rng = np.random.default_rng((options.seed, index))  # A key for each game.
        return rng.integers(0, 2**32, (options.games, 2), np.uint32)

    def act(params: Any, games: Any, keys: jax.Array) -> tuple[Any, Any]:
        """Draws a move in each game, and returns the next states and what happened."""
        board, legal = games.observation, games.legal_action_mask
        move_keys, game_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
        logits, value = Network(low_dtype(options)).apply(params, board)
        log_policy, value = log_softmax(logits, legal), value.astype(jnp.float32)
        move = jax.vmap(jax.random.categorical)(move_keys, log_policy)
        games = go_on(games, move, game_keys)
        result = value, games.rewards[:, 0], 1.0 - games.terminated
        return games, ((board, legal, log_policy, move), result)

    def experience(params: Any, games: Any, keys: jax.Array) -> tuple[Any, Moves]:
        """Plays on in all games. The last move only serves to value its board."""
        by_game = NamedSharding(mesh, PartitionSpec("data"))
        games = jax.lax.with_sharding_constraint(games, by_game)
        keys = jax.vmap(jax.random.split, (0, None), 1)(keys, options.moves + 1)
        games, (seen, results) = jax.lax.scan(partial(act, params), games, keys)
        return games, Moves(*(x[:-1] for x in seen), *estimate(*results))

    def step(state: Any, key_data: jax.Array) -> tuple[Any, jax.Array]:
        keys = jax.random.wrap_key_data(key_data)
        games, moves = experience(state[0], state[2], keys)

        def update(state: tuple[Any, Any], times: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = state
            batch = jax.tree.map(lambda x: x[times], moves)
            loss, grads = ols.scaled_value_and_grad(run_loss, opt_state)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        # A batch has moves from every game, so that no device needs another's games.
        times = jnp.tile(jnp.arange(options.moves), (EPOCHS, 1))
        key = jax.random.fold_in(keys[0], 2**31)  # Not one of those of the moves.
        times = jax.random.permutation(key, times, axis=1, independent=True)
        times = times.reshape(EPOCHS * BATCHES, -1)
        state, losses = jax.lax.scan(update, state[:2], times)
        return (*state, games), losses.mean()

    def evaluate(state: Any) -> dict[str, jax.Array]:
        params, opt_state, games = state
        keys = jax.random.split(jax.random.key(2**31), HELD_OUT_GAMES)

        def move(carry: Any) -> Any:
            games, score, is_on, count = carry
            keys_now = jax.vmap(jax.random.fold_in, (0, None))(keys, count)
            games, (_, (_, reward, goes_on)) = act(params, games, keys_now)
            return games, score + reward * is_on, is_on * goes_on, count + 1

        first = new_games(keys), jnp.zeros(len(keys)), jnp.ones(len(keys)), 0
        _, scores, _, _ = jax.lax.while_loop(lambda x: x[2].any(), move, first)
        _, moves = experience(params, games, jax.random.split(keys[0], options.games))
        logits, _ = run_network(params, moves.board)
        grads = ols.scaled_grad(run_loss, opt_state)(params, moves)
        wide = optax.tree.cast(params, jnp.float32)
        return {
            "held_out_score": scores.mean(),
            "policy_kl": mean_kl(moves.log_policy, log_softmax(logits, moves.legal)),
            **scale_figures(opt_state, grads, jax.grad(loss_fn)(wide, moves)),
        }

    train(options, mesh, start, batch_of, step, evaluate)


if __name__ == "__main__":
    main()
