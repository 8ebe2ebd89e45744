"""How far the optimizers in docs/migration are from Keras's own, and from MindSpore's.

A row of the table names an optimizer that gives Keras's parameters after 5 steps and
after 30, or says how far off it is.
"""

import os
import re

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

from helpers.compat import enable_x64
from helpers.files import ROOT

STEPS = (5, 30)  # After these many steps the parameters are compared.
# Of the largest change of a parameter. All is computed in float64, but Keras's learning
# rate is float32.
TOLERANCE = 2e-5
SHAPES = ((4, 6), (5, 3), (6,))


def first_weights(shapes):
    rng = np.random.default_rng(44)
    return [np.float64(np.float32(rng.uniform(-0.1, 0.1, shape))) for shape in shapes]


def gradients(shapes):
    """Random ones, which change their signs, and their sizes from about 1e-5 to 3."""
    rng = np.random.default_rng(4)
    for _ in range(max(STEPS)):
        sizes = [
            np.float32(rng.normal(size=shape) * 10 ** rng.uniform(-3, 0, shape))
            for shape in shapes
        ]
        yield [jnp.float64(size) for size in sizes]


def by_optax(tx, shapes):
    """The parameters after each step."""
    params = first_weights(shapes)
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in gradients(shapes):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        yield params


def by_keras(call, shapes):
    variables = [keras.Variable(w, dtype="float64") for w in first_weights(shapes)]
    optimizer = eval(f"keras.optimizers.{call}", {"keras": keras})
    for grads in gradients(shapes):
        optimizer.apply(grads, variables)
        yield [np.array(variable) for variable in variables]


def by_mindspore():
    """Its `AdamWeightDecay(0.01)`, which does not correct the bias."""
    params = first_weights(SHAPES)
    m, v = ([np.zeros_like(p) for p in params] for _ in range(2))
    for grads in gradients(SHAPES):
        m = [0.9 * a + 0.1 * g for a, g in zip(m, grads, strict=True)]
        v = [0.999 * a + 0.001 * g**2 for a, g in zip(v, grads, strict=True)]
        params = [
            p - 0.01 * a / (np.sqrt(b) + 1e-6)
            for p, a, b in zip(params, m, v, strict=True)
        ]
        yield params


def distances(code, theirs, shapes=SHAPES):
    """How far an optimizer is from another system's, after each number of steps."""
    ours = list(by_optax(eval(code, {"optax": optax}), shapes))
    theirs, start = list(theirs), first_weights(shapes)

    def largest(some, others):
        return max(np.abs(a - b).max() for a, b in zip(some, others, strict=True))

    pairs = [(ours[i - 1], theirs[i - 1]) for i in STEPS]
    return [largest(a, b) / largest(b, start) for a, b in pairs]


def check_row(text, make_theirs):
    with enable_x64(True):
        found = [distances(c, make_theirs()) for c in re.findall("`(optax.*?)`", text)]
    assert found or text == "Optax has none."
    inexact = [apart for apart in found if max(apart) > TOLERANCE]
    said = re.findall(r"`: ([\d.]+) %, ([\d.]+) %", text)
    said, inexact = (np.float64(x).reshape(-1, 2) for x in (said, inexact))
    np.testing.assert_allclose(said, 100 * inexact, rtol=0.05)


def text_of(page):
    return (ROOT / "docs" / "migration" / f"{page}.md").read_text()


ROWS = text_of("keras").split("## Optimizers")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `([A-Z].*?)`.*? \| (.*) \|$", ROWS, re.M)


@pytest.mark.parametrize(("call", "text"), ROWS, ids=[call for call, _ in ROWS])
def test_a_row_takes_the_steps_of_keras_or_says_how_far_off_it_is(call, text):
    call = call if "(" in call else f"{call}()"
    check_row(text, lambda: by_keras(call, SHAPES))


def test_the_row_of_mindspore_says_how_far_off_it_is():
    row = r"^\| `nn.AdamWeightDecay` \| (.*) \|$"
    (text,) = re.findall(row, text_of("other_systems"), re.M)
    check_row(text, by_mindspore)


def test_adafactor_factors_other_dimensions_of_a_window_larger_than_its_channels():
    (text,) = (text for call, text in ROWS if call == "Adafactor")
    code, apart = re.search("`(.+?)`", text)[1], {}
    with enable_x64(True):
        for shape in ((5, 5, 1, 6), (3, 3, 6, 16)):
            theirs = by_keras("Adafactor()", [shape])
            apart[shape] = max(distances(code, theirs, [shape]))
    assert apart[5, 5, 1, 6] > 1.0
    assert apart[3, 3, 6, 16] < TOLERANCE
