"""The optimizers on the pages of Keras, MindSpore and PyTorch, by their parameters.

`FORMULAS` has the update rules of these systems in NumPy, by page and row. Each row of
a page must name an optimizer that gives the parameters of its formula after 5 steps and
after 30. If it names others too, it must say how far off they are.

The script `tests/tools/optimizer_oracles.py` compares the formulas with the systems
themselves, on the same gradients.
"""

import functools
import pathlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers.compat import enable_x64
from helpers.optimizer_formulas import (
    FORMULAS,
    STEPS,
    adafactor,
    distance,
    first_weights,
    ftrl,
    gradients,
    run_formula,
    uncorrected_adam,
)

MIGRATION = pathlib.Path(__file__).parents[2] / "docs" / "migration"
# Of the largest change of a parameter. Both sides compute in float64, except that
# Optax's Adafactor has a float32 decay, and its Adamax adds epsilon elsewhere.
TOLERANCE = 1e-6


pytestmark = pytest.mark.usefixtures("standard_promotion")


CASES = [(page, name) for page in FORMULAS for name in FORMULAS[page]]


def distances(make_optimizer, formula, weights=None):
    """How far an optimizer is from a formula, after each number of `STEPS`."""
    weights = first_weights() if weights is None else weights
    start = jax.tree.map(np.float64, weights)
    all_grads = jax.tree.map(lambda *leaves: np.float64(leaves), *gradients(weights))
    with enable_x64(True):
        tx = make_optimizer()

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        train = jax.jit(
            lambda params: jax.lax.scan(step, (params, tx.init(params)), all_grads)
        )
        _, ours = jax.tree.map(np.asarray, train(start))
    theirs = list(run_formula(formula, weights))
    return [
        distance(jax.tree.map(lambda x, i=i: x[i - 1], ours), theirs[i - 1], weights)
        for i in STEPS
    ]


def read(page):
    return (MIGRATION / f"{page}.md").read_text()


@functools.cache
def written_out(page):
    """The names that the optimizers of a page may use, among them its own lines."""
    defined = {"jax": jax, "jnp": jnp, "optax": optax}
    for cell in re.findall(r"^```{code-cell}\n(.*?)^```$", read(page), re.M | re.S):
        if "optax.GradientTransformation(" in cell:
            exec(cell, defined)
    return defined


def row(page, name):
    """The optimizers that a row names, and its text."""
    arguments = "" if page == "keras" else r"(?:\([^`]*)?"
    start = rf"^\|[^|]*`{re.escape(name)}{arguments}` \|"
    (text,) = re.findall(start + r"(.*)\|$", read(page), re.M)
    codes = [code for code in re.findall("`(.+?)`", text) if "(" in code]
    assert not any(code.startswith("ols.") for code in codes)
    return [code for code in codes if re.match(r"optax\.|[a-z_]+\(", code)], text


@pytest.mark.parametrize(("page", "name"), CASES)
def test_a_row_names_an_exact_optimizer_and_says_how_far_off_others_are(page, name):
    codes, text = row(page, name)
    found = [
        distances(lambda code=code: eval(code, written_out(page)), FORMULAS[page][name])
        for code in codes
    ]
    inexact = [apart for apart in found if max(apart) > TOLERANCE]
    assert len(inexact) < len(found)
    said = re.findall(r"([\d.]+) % off after 5 steps and ([\d.]+) % after 30", text)
    np.testing.assert_allclose(
        np.float64(said).reshape(-1, 2),
        100 * np.reshape(inexact, (-1, 2)),
        rtol=0.05,
    )


def test_every_optimizer_of_the_table_has_a_formula():
    table = read("keras").split("## Optimizers")[1].split("\n## ")[0]
    names = re.findall(r"^\| `optimizer_\w+\(.*?\)`, `(.*?)`", table, re.M)
    assert sorted(names) == sorted(FORMULAS["keras"])


def test_ftrl_has_the_penalties_of_keras():
    keras_ftrl = written_out("keras")["keras_ftrl"]
    penalized = partial(ftrl, l1=0.3, l2=2.0)
    apart = distances(lambda: keras_ftrl(1e-3, 0.3, 2.0), penalized)
    assert max(apart) < TOLERANCE


@pytest.mark.slow
def test_adafactor_factors_other_dimensions_of_a_window_larger_than_its_channels():
    (code, _), text = row("keras", "Adafactor")
    window = first_weights({"kernel": (5, 5, 1, 6)})
    make = lambda: eval(code, {"optax": optax})  # noqa: E731
    after_5, _ = distances(make, adafactor, window)
    assert (
        f"shape (5, 5, 1, 6), Optax is off by {after_5:.0%}".replace("%", " %") in text
    )
    channels = first_weights({"kernel": (3, 3, 6, 16)})
    assert max(distances(make, adafactor, channels)) < TOLERANCE


def test_adam_weight_decay_decays_as_in_mindspore():
    make = written_out("mindspore")["adam_weight_decay"]
    apart = distances(
        lambda: make(0.01, weight_decay=0.1),
        partial(uncorrected_adam, rate=0.01, decay=0.1),
    )
    assert max(apart) < TOLERANCE
