"""The tables of docs/migration: every entry runs, and gives what its row says."""

import contextlib
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.files import ROOT, project_files
from helpers.inner import standard_promotion

pytestmark = pytest.mark.slow  # It first runs the programs of all pages.

MIGRATION = ROOT / "docs" / "migration"
PAGES = sorted(path.stem for path in project_files("docs/migration/*.md"))


@functools.cache
def tables(page):
    """The tables of a page: lists of rows, which are lists of cells."""
    text = (MIGRATION / f"{page}.md").read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"(?:^\|.*\n?)+", prose, flags=re.MULTILINE)
    return [[cells_of(line) for line in table.splitlines()[2:]] for table in found]


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def code_in(cell):
    return re.findall("`(.+?)`", cell)


@functools.cache
def names(page):
    """The names that a page's cells above its last table define for its tables."""
    text = (MIGRATION / f"{page}.md").read_text()
    above = text[: text.rindex("\n| ")] if page != "index" else text
    cells = re.findall(r"^```{code-cell}\n(.*?)^```$", above, re.MULTILINE | re.DOTALL)
    defined = {}
    with contextlib.redirect_stdout(io.StringIO()), standard_promotion():
        for cell in cells:
            exec(cell, defined)
        if "tx" in defined:  # As the run of a page has trained, start again.
            defined["opt_state"] = defined["tx"].init(defined["params"])
            defined["state"] = ols.find_loss_scale_state(defined["opt_state"])
        if page == "index":  # Whose entries are the first changes of the other pages.
            of_torch = names("pytorch")
            defined |= {key: of_torch[key] for key in ("loss_fn", "optimizer")}
    return defined


def run(code, defined):
    """The value of an entry. An import has none."""
    with standard_promotion():
        if re.match("(from|import) ", code):
            return exec(code, dict(defined))
        return eval(code, dict(defined))


ROWS = [(page, row) for page in PAGES for table in tables(page) for row in table]


def test_every_page_has_a_row_in_the_index():
    linked = set(re.findall(r"\((\w+)\.md\)", (MIGRATION / "index.md").read_text()))
    assert linked == {*PAGES} - {"index"}


@pytest.mark.parametrize(
    ("page", "row"), ROWS, ids=[f"{page}: {row[0]}"[:60] for page, row in ROWS]
)
def test_everything_to_type_in_a_row_runs(page, row):
    _, here, difference = row
    codes = code_in(here)
    codes += re.findall(r"`((?:ols|optax|tx|rule)\..+?)`", difference)
    assert codes or here.startswith(("No equivalent: ", "The same."))
    for code in codes:
        for array in jax.tree.leaves(run(code, names(page))):
            if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, np.number):
                assert np.isfinite(array).all()


# What some of the entries give, worked out by hand: no step has been counted, the scale
# is the first of its system, and the learning rate is 1e-3. Each line is true.
TRUE = {
    "pytorch": """
        rule.skips
        ols.get_loss_scale(opt_state) == 2.0**16
        ols.scale(loss, opt_state) / loss == 2.0**16
        ols.set_loss_scale(opt_state, 1024.0).loss_scale_state.loss_scale == 1024.0
        state.last_finite
        ols.presets.to_torch_state_dict(opt_state)["_growth_tracker"] == 0""",
    "keras": """
        state.step_count - state.total_notfinite == 0
        optax.tree.get(opt_state, "learning_rate") == np.float32(1e-3)
        isinstance(tx, optax.GradientTransformationExtraArgs)""",
    "tf_keras": """
        "tf_keras" in repr(rule)
        getattr(state.rule_state, "growth_count", None) == 0
        optax.tree.get(optax.tree.set(opt_state, b1=0.7), "b1") == np.float32(0.7)""",
    "mindspore": """
        rule.skips
        rule.adjust(state, grads_finite=True).rule_state.growth_count == 1
        rule.adjust(state, grads_finite=False).loss_scale == 2.0**15
        rule.adjust(state, ols.all_finite(unscaled)).step_count == 1""",
    "flax_and_jmp": """
        dynamic_scale.replace(scale=1024.0).scale == 1024.0""",
    "apex": """
        not ols.static_loss_scale(128.0, skip_nonfinite=False).skips""",
    "megatron": """
        state.rule_state.hysteresis_count == 2
        1 / ols.get_loss_scale(opt_state) == 2.0**-32""",
    "deepspeed": """
        state.total_notfinite == 0
        rule.adjust(state, grads_finite=True).step_count == 1""",
    "fairseq": """
        rule.adjust(state, grads_finite=True).loss_scale == 2.0**7""",
}
FACTS = [
    (page, line.strip())
    for page, text in TRUE.items()
    for line in text.strip().splitlines()
]


@pytest.mark.parametrize(("page", "fact"), FACTS)
def test_an_entry_gives_the_value_that_its_name_promises(page, fact):
    given = [found for name, row in ROWS if name == page for found in code_in(row[1])]
    assert any(found in fact for found in given)
    assert run(fact, names(page) | {"np": np})


def test_a_disabled_scaler_is_found_to_be_disabled():
    disabled = {**names("pytorch"), "rule": ols.presets.torch(enabled=False)}
    assert run("rule.skips", disabled) is False
