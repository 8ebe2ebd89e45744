"""The tables of docs/migration: every entry runs, and gives what its row says.

The programs of these pages run when the documentation is built.
"""

import contextlib
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.files import project_files
from helpers.inner import standard_promotion

pytestmark = pytest.mark.slow  # It first runs the programs of all pages.

# The index has the first changes of the other pages.
PAGES = {path.stem: path for path in project_files("docs/migration/*.md")}
del PAGES["index"]


def code_in(cell):
    return re.findall("`(.+?)`", cell)


def rows_of(page):
    """The rows of the tables of a page, which are lists of cells."""
    prose = re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.M | re.S)
    for table in re.findall(r"(?:^\|.*\n?)+", prose, flags=re.M):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip().strip("|").split(" | ")]


@functools.cache
def names(page):
    """The names that a page's cells above its last table define for its tables."""
    text = PAGES[page].read_text()
    above = text[: text.rindex("\n| ")]
    defined = {}
    with contextlib.redirect_stdout(io.StringIO()), standard_promotion():
        for cell in re.findall(r"^```{code-cell}\n(.*?)^```$", above, re.M | re.S):
            exec(cell, defined)
    if "tx" in defined:  # As the run of a page has trained, start again.
        defined["opt_state"] = defined["tx"].init(defined["params"])
        defined["state"] = ols.find_loss_scale_state(defined["opt_state"])
    return defined


def run(code, page):
    """The value of an entry. An import has none."""
    with standard_promotion():
        if re.match("(from|import) ", code):
            return exec(code, dict(names(page)))
        return eval(code, names(page) | {"np": np})


@pytest.mark.parametrize("page", PAGES)
def test_everything_to_type_in_a_row_runs(page):
    for _, here, difference in rows_of(page):
        codes = code_in(here)
        codes += re.findall(r"`((?:ols|optax|tx|rule)\..+?)`", difference)
        assert codes or here.startswith(("No equivalent: ", "The same."))
        for code in codes:
            for array in jax.tree.leaves(run(code, page)):
                if isinstance(array, jax.Array) and jnp.issubdtype(
                    array.dtype, np.number
                ):
                    assert np.isfinite(array).all(), code


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
        optax.tree.get(opt_state, "learning_rate") == np.float32(1e-3)""",
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


@pytest.mark.parametrize("page", TRUE)
def test_an_entry_gives_the_value_that_its_name_promises(page):
    entries = [code for row in rows_of(page) for code in code_in(row[1])]
    for fact in map(str.strip, TRUE[page].strip().splitlines()):
        assert any(entry in fact for entry in entries), fact
        assert run(fact, page), fact
