"""The optimizers in docs/migration take the steps of Keras's own, and of MindSpore's.

Each row of a table names an optimizer that gives Keras's parameters after 5 steps and
after 30. If it names others too, it says how far off they are.
"""

import functools
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
from helpers.pages import cells_of

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


def by_mindspore(decay, shapes):
    """Its `AdamWeightDecay(0.01)`, which does not correct the bias."""
    params = first_weights(shapes)
    m, v = ([np.zeros_like(p) for p in params] for _ in range(2))
    for grads in gradients(shapes):
        m = [0.9 * a + 0.1 * g for a, g in zip(m, grads, strict=True)]
        v = [0.999 * a + 0.001 * g**2 for a, g in zip(v, grads, strict=True)]
        params = [
            p - 0.01 * (a / (np.sqrt(b) + 1e-6) + decay * p)
            for p, a, b in zip(params, m, v, strict=True)
        ]
        yield params


def distances(code, names, theirs, shapes=SHAPES):
    """How far an optimizer is from another system's, after each number of steps."""
    ours = list(by_optax(eval(code, names), shapes))
    theirs, start = list(theirs), first_weights(shapes)

    def largest(some, others):
        return max(np.abs(a - b).max() for a, b in zip(some, others, strict=True))

    pairs = [(ours[i - 1], theirs[i - 1]) for i in STEPS]
    return [largest(a, b) / largest(b, start) for a, b in pairs]


@functools.cache
def page(name):
    """The text of a page, and what its rows may use, among it its own optimizers."""
    text = (ROOT / "docs" / "migration" / f"{name}.md").read_text()
    names = {"jax": jax, "jnp": jnp, "optax": optax}
    for cell in cells_of(text):
        if "optax.GradientTransformation(" in cell or "def adam_weight_decay" in cell:
            exec(cell, names)
    return text, names


ROWS = re.findall(
    r"^\| `optimizer_\w+\(.*?\)`, `(.*?)` \| (.*)", page("keras")[0], re.M
)


def check_row(text, names, make_theirs):
    codes = re.findall(r"`((?:optax\.|[a-z_]+\()[^`]*\))`", text)
    with enable_x64(True):
        found = [distances(code, names, make_theirs()) for code in codes]
    inexact = [apart for apart in found if max(apart) > TOLERANCE]
    assert len(inexact) < len(found)
    said = re.findall(r"([\d.]+) % off after 5 steps and ([\d.]+) % after 30", text)
    said, inexact = (np.float64(x).reshape(-1, 2) for x in (said, inexact))
    np.testing.assert_allclose(said, 100 * inexact, rtol=0.05)


@pytest.mark.parametrize(("call", "text"), ROWS, ids=[call for call, _ in ROWS])
def test_a_row_names_an_exact_optimizer_and_says_how_far_off_others_are(call, text):
    call = call if "(" in call else f"{call}()"
    check_row(text, page("keras")[1], lambda: by_keras(call, SHAPES))


def test_the_row_of_mindspore_names_an_exact_optimizer():
    text, names = page("mindspore")
    (row,) = re.findall(r"^\| `nn.AdamWeightDecay` \| (.*)", text, re.M)
    check_row(row, names, lambda: by_mindspore(0.0, SHAPES))
    with enable_x64(True):
        code = "adam_weight_decay(0.01, weight_decay=0.1)"
        assert max(distances(code, names, by_mindspore(0.1, SHAPES))) < TOLERANCE


def test_ftrl_has_the_penalties_of_keras():
    call = "Ftrl(l1_regularization_strength=0.3, l2_regularization_strength=2.0)"
    with enable_x64(True):
        theirs, (_, names) = by_keras(call, SHAPES), page("keras")
        assert max(distances("keras_ftrl(1e-3, 0.3, 2.0)", names, theirs)) < TOLERANCE


def test_adafactor_factors_other_dimensions_of_a_window_larger_than_its_channels():
    (text,) = (text for call, text in ROWS if call == "Adafactor")
    code = re.search("`(.+?)`", text)[1]
    apart = {}
    with enable_x64(True):
        for shape in ((5, 5, 1, 6), (3, 3, 6, 16)):
            theirs = by_keras("Adafactor()", [shape])
            apart[shape] = distances(code, {"optax": optax}, theirs, [shape])
    after_5 = round(100 * apart[5, 5, 1, 6][0])
    assert f"shape (5, 5, 1, 6), Optax is off by {after_5} % after" in text
    assert max(apart[3, 3, 6, 16]) < TOLERANCE
