"""Searches histories in which headroom_loss_scale makes updates of zeros.

    python benchmarks/hardest_histories.py [--generations N] [--seed N] [--record]

A hill climb over histories of bad batches and gradient magnitudes. Torch's rule makes
no update of zeros in any of them: magnitudes are chosen relative to its scale. One
search is for magnitudes of at most 30 bits, one for all that float16 has.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from _lib.tables import add_outputs, publish, versions

STEPS, HISTORIES, KEPT = 1500, 128, 16
TOP = np.log2(65504.0)
RULE = ols.headroom_loss_scale()
# log2 of scaled magnitudes under torch's rule; NaN for a bad batch, above 16 for an
# overflow, below -24 for what is nearly zero.
WIDE = np.array([np.nan] * 4 + [-24.9] * 4 + [TOP, 15.3, 12, 5, -10, 16.1, 18, 20, 25])
# log2 of magnitudes.
NARROW = np.array([np.nan] * 4 + [TOP - bits for bits in (0, 4, 8, 12, 16, 20, 25, 30)])


def torch_scales(symbols: np.ndarray, is_relative: bool) -> np.ndarray:
    """log2 of torch's scale before each step, `[histories, steps]`."""
    scale, count = np.full(len(symbols), 16), np.zeros(len(symbols), int)
    scales = []
    for symbol in symbols.T:
        scales.append(scale)
        finite = symbol + (0 if is_relative else scale) <= TOP
        count = np.where(finite, count + 1, 0)
        scale = np.where(finite, scale + (count == 2000), scale - 1)
        count = count % 2000
    return np.stack(scales, axis=1)


@jax.jit
@jax.vmap
def zeros_of(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The updates of zeros of one history: the longest row of them, and all."""

    def step(carry, largest):
        state, row, longest, total = carry
        magnitude = jnp.exp2(largest)
        scaled = magnitude * state.loss_scale
        finite = scaled <= 65504
        zero = finite & (scaled <= 2.0**-25)
        seen = jnp.where(finite, jnp.where(zero, 0.0, magnitude), jnp.inf)
        state = RULE.adjust(state, finite, seen)
        row = jnp.where(zero, row + 1, jnp.where(finite, 0, row))
        return (state, row, jnp.maximum(longest, row), total + zero), None

    zero = jnp.int32(0)
    (_, _, longest, total), _ = jax.lax.scan(
        step, (RULE.init(), zero, zero, zero), largest
    )
    return longest, total


def score(genomes: list, symbols: np.ndarray, is_relative: bool) -> tuple:
    """The longest rows and totals; 0 if torch's rule makes an update of zeros too."""
    chosen = np.stack([expand(genome, symbols) for genome in genomes])
    scales = torch_scales(chosen, is_relative)
    largest = chosen - scales if is_relative else chosen
    usable = ~np.any(largest + scales <= -25, axis=1) & (scales[:, -1] >= -24)
    longest, total = zeros_of(jnp.asarray(largest, jnp.float32))
    return np.asarray(longest) * usable, np.asarray(total) * usable


def expand(genome: list, symbols: np.ndarray) -> np.ndarray:
    """The symbol of each step; a genome lists patterns and how often they repeat."""
    steps = [index for pattern, times in genome for index in pattern * times]
    return symbols[np.resize(steps, STEPS)]


def new_segment(rng: np.random.Generator, count: int) -> tuple[list, int]:
    pattern = list(rng.integers(count, size=rng.integers(1, 5)))
    return pattern, int(np.exp(rng.uniform(0, 5)))


def mutate(genome: list, rng: np.random.Generator, count: int) -> list:
    """Changes, adds, drops or repeats some segments."""
    genome = list(genome)
    for _ in range(rng.integers(1, 4)):
        where, kind = rng.integers(len(genome)), rng.integers(4)
        pattern, times = genome[where]
        if kind == 0:
            genome.insert(where, new_segment(rng, count))
        elif kind == 1:
            genome[where] = pattern, max(1, int(times * rng.uniform(0.5, 2)))
        elif kind == 2 and len(genome) > 1:
            genome.pop(where)
        else:
            genome[where:where] = genome[where : where + 4]
    return genome[:200]


def climb(
    symbols: np.ndarray, is_relative: bool, goal: int, generations: int, seed: int
) -> tuple[int, int]:
    """The longest row and the total of the hardest history found."""
    rng = np.random.default_rng(seed)
    count = len(symbols)
    genomes = [
        [new_segment(rng, count) for _ in range(rng.integers(2, 20))]
        for _ in range(HISTORIES)
    ]
    for _ in range(generations):
        scores = score(genomes, symbols, is_relative)
        best = np.argsort(-scores[goal])[:KEPT]
        kept = [genomes[index] for index in best]
        mutants = rng.integers(KEPT, size=HISTORIES - KEPT)
        genomes = kept + [mutate(kept[index], rng, count) for index in mutants]
    return int(scores[0][best[0]]), int(scores[1][best[0]])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    add_outputs(parser)
    arguments = parser.parse_args()
    rows = []
    for name, symbols in (("30 bits", NARROW), ("all of float16", WIDE)):
        for goal, wanted in enumerate(["in a row", "in all"]):
            longest, total = climb(
                symbols, symbols is WIDE, goal, arguments.generations, arguments.seed
            )
            row = {"magnitudes": name, "searched for most": wanted}
            rows.append(row | {"zeros in a row": longest, "in all": total})
    title = (
        f"{versions()}; {STEPS} steps, in which torch's rule makes no update of zeros"
    )
    publish(title, {"Updates of zeros by headroom_loss_scale": rows}, arguments)


if __name__ == "__main__":
    main()
