"""Trains an LSTM to predict the next chord of a chorale, with Equinox.

    python examples/train_lstm.py [--precision float16]

It reads 405 pieces by Bach, nearly all of them chorales, that the package music21 ships
as MusicXML. A chord says which of a piano's 88 keys sound. A beat has two chords.
`held_out_bits_per_chord` is the loss on a tenth of the music, in bits and summed over
the keys. Less is better.

The loss to train is a mean over batch, time and keys, about 180,000 numbers. Most of
its gradients are therefore below float16's range, and need a loss scale.
"""

import argparse
import fractions
import importlib.metadata
import math
import xml.etree.ElementTree
import zipfile
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols
from loop import make_mesh, train
from options import parse_options, positive
from precision import cast, cast_params, scale_figures, with_loss_scale

KEYS = 88
LOWEST_KEY = 21  # A0 as a MIDI number, in which C4 is 60.
CHORDS_PER_BEAT = 2
NAMES = ["C", "C#", "D", "Eb", "E", "F", "F#", "G", "Ab", "A", "Bb", "B"]


class LSTM(eqx.Module):
    """Predicts the next chord at every position of `f32[length, 88]`, as logits."""

    cells: list[eqx.nn.LSTMCell]
    out: eqx.nn.Linear

    def __init__(self, options: argparse.Namespace) -> None:
        keys = jax.random.split(jax.random.key(options.seed), options.layers + 1)
        widths = [KEYS] + options.layers * [options.width]
        sizes = zip(widths[:-1], widths[1:], keys[1:], strict=True)
        self.cells = [eqx.nn.LSTMCell(i, o, key=key) for i, o, key in sizes]
        self.out = eqx.nn.Linear(options.width, KEYS, key=keys[0])

    def __call__(self, x: jax.Array) -> jax.Array:
        for cell in self.cells:

            def step(state, x, cell=cell):
                hidden, memory = cell(x, state)
                return (hidden, memory), hidden

            zeros = jnp.zeros(cell.hidden_size)
            _, x = jax.lax.scan(step, (zeros, zeros), x)
        return jax.vmap(self.out)(x)


def loss_fn(model: LSTM, chords: jax.Array) -> jax.Array:
    """Returns the mean binary cross-entropy of `f32[batch, length + 1, 88]`."""
    logits = jax.vmap(model)(chords[:, :-1])
    return optax.sigmoid_binary_cross_entropy(logits, chords[:, 1:]).mean()


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """Returns Adam with a schedule and a loss scale."""
    steps = max(options.steps, 2)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, warmup_steps=max(steps // 20, 1), decay_steps=steps
    )
    return with_loss_scale(optax.adam(rate), options)


def notes_of(part: xml.etree.ElementTree.Element) -> Iterator[tuple[Any, Any, int]]:
    """Yields each note of a voice in MusicXML: start and end in beats, MIDI number."""
    start, divisions = fractions.Fraction(0), 1
    for element in part.iterfind("measure/*"):
        divisions = int(element.findtext("divisions") or divisions)
        if element.tag == "note" and element.find("duration") is not None:
            end = start + fractions.Fraction(element.findtext("duration")) / divisions
            if (pitch := element.find("pitch")) is not None:
                octave, alter = pitch.findtext("octave"), pitch.findtext("alter") or 0
                step = NAMES.index(pitch.findtext("step")) + int(alter)
                yield start, end, 12 * (int(octave) + 1) + step
            start = end


def load_chorales() -> np.ndarray:
    """Returns the chords of all pieces, one after the other, as `f32[chords, 88]`."""
    package = importlib.metadata.distribution("music21")
    chorales = []
    for path in sorted(package.locate_file("music21/corpus/bach").glob("*.mxl")):
        with zipfile.ZipFile(path) as file:
            score = max(file.infolist(), key=lambda info: info.file_size)
            score = xml.etree.ElementTree.fromstring(file.read(score))
        # `notes_of` cannot read the three pieces with parts of several notes at once.
        if score.find(".//backup") is not None or score.find(".//chord") is not None:
            continue
        notes = [note for part in score.iterfind("part") for note in notes_of(part)]
        length = math.ceil(max(end for _, end, _ in notes) * CHORDS_PER_BEAT)
        chords = np.zeros((length, KEYS), np.float32)
        for start, end, number in notes:
            first, last = (math.ceil(x * CHORDS_PER_BEAT) for x in (start, end))
            chords[first:last, number - LOWEST_KEY] = 1
        chorales.append(chords)
    return np.concatenate(chorales)


def names_of(keys: np.ndarray) -> str:
    """Returns the names of keys, such as `C3 G3 E4 C5`."""
    numbers = keys + LOWEST_KEY
    return " ".join(f"{NAMES[number % 12]}{number // 12 - 1}" for number in numbers)


def main() -> None:
    """Reads the options, trains, and prints a chorale with what the model expects."""
    options = parse_options(
        __doc__.splitlines()[0],
        steps=1000,
        report=50,
        layers=(positive, 1, "number of LSTM layers"),
        width=(positive, 128, "width of a layer"),
        length=(positive, 64, "chords of a sequence"),
        batch=(positive, 32, "sequences of a step"),
        learning_rate=(float, 1e-2, "highest learning rate"),
    )
    mesh = make_mesh(options)
    chords = load_chorales()
    training, held_out = np.split(chords, [len(chords) * 9 // 10])
    if len(held_out) <= options.length:
        raise SystemExit(f"--length must be less than {len(held_out)}")
    optimizer = make_optimizer(options)
    run_loss = cast(loss_fn, options)

    def windows(chords: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return chords[starts[:, None] + np.arange(options.length + 1)]

    def batch_of(index: int) -> np.ndarray:
        rng = np.random.default_rng((options.seed, index))
        last = len(training) - options.length - 1
        return windows(training, rng.integers(0, last, options.batch))

    starts = np.arange(0, len(held_out) - options.length, options.length)
    test_chords = windows(held_out, starts)

    def start() -> tuple[LSTM, Any]:
        model = cast_params(LSTM(options), options)
        return model, optimizer.init(model)

    def step(state: tuple[LSTM, Any], chords: jax.Array) -> Any:
        model, opt_state = state
        loss, grads = ols.scaled_value_and_grad(run_loss, opt_state)(model, chords)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return (optax.apply_updates(model, updates), opt_state), loss

    def evaluate(state: tuple[LSTM, Any]) -> dict[str, jax.Array]:
        model, opt_state = state
        loss, chords = run_loss(model, test_chords), test_chords[: options.batch]
        grads = ols.scaled_grad(run_loss, opt_state)(model, chords)
        exact = jax.grad(loss_fn)(optax.tree.cast(model, jnp.float32), chords)
        return {
            "held_out_bits_per_chord": KEYS * loss / math.log(2),
            **scale_figures(opt_state, grads, exact),
        }

    model, _ = train(options, mesh, start, batch_of, step, evaluate)
    if jax.process_count() > 1:
        return
    likely = np.argsort(model(test_chords[0, :-1]))[:, -4:]
    print("a held-out chorale | the four keys that the model expects most")
    for chord, keys in list(zip(test_chords[0, 1:], likely, strict=True))[-8:]:
        print(f"{names_of(np.flatnonzero(chord))} | {names_of(np.sort(keys))}")


if __name__ == "__main__":
    main()
