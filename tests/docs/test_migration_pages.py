"""docs/migration: what its tables and programs give is worked out by hand."""

import contextlib
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.files import ROOT, project_files
from helpers.inner import standard_promotion
from helpers.pages import cells_of

slow = pytest.mark.slow  # These tests run the programs of a page.

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
def run_page(page):
    """What a page prints, and the names that its cells above its last table define.

    The cells below are run if they print what is known here. Others need Keras.
    """
    text = PAGES[page].read_text()
    above, below = text[: text.rindex("\n| ")], text[text.rindex("\n| ") :]
    names, names_above = {}, {}
    with contextlib.redirect_stdout(io.StringIO()) as output, standard_promotion():
        for part in (above, below) if page in PRINTED else (above,):
            for cell in cells_of(part):
                exec(cell, names)
            names_above = names_above or dict(names)
    if "tx" in names_above:  # As the run of a page has trained, start again.
        opt_state = names_above["tx"].init(names_above["params"])
        state = ols.find_loss_scale_state(opt_state)
        names_above |= {"opt_state": opt_state, "state": state}
    return output.getvalue(), names_above


def run(code, page):
    """The value of an entry. An import has none."""
    names = run_page(page)[1] | {"np": np}
    with standard_promotion():
        return (exec if re.match("(from|import) ", code) else eval)(code, names)


@slow
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


@slow
def test_everything_to_type_in_the_index_runs():
    text = (ROOT / "docs/migration/index.md").read_text()
    assert {*re.findall(r"\((\w+)\.md\)", text)} == {*PAGES}
    for line in re.findall(r"^\|.*\|$", text, re.M):
        for code in re.findall(r"`(ols\.[^`]*\)|from [^`]*)`", line):
            run(code, "pytorch")  # Whose names are those of the index.


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


@slow
@pytest.mark.parametrize("page", TRUE)
def test_an_entry_gives_the_value_that_its_name_promises(page):
    entries = [code for row in rows_of(page) for code in code_in(row[1])]
    for fact in map(str.strip, TRUE[page].strip().splitlines()):
        assert any(entry in fact for entry in entries), fact
        assert run(fact, page), fact


PRINTED = {
    # The gradients 3 and 4, of norm 5, are clipped to 1. Windows of 1 and 3 have a mean
    # of 2, the rate is 0.5, and the second of three windows is infinite. The Hessian of
    # the penalty's loss is diag(9, 16), its gradient (3, 4): 1 + 5, and
    # (3 + 27 / 5, 4 + 64 / 5). The generator's gradient is infinite.
    "pytorch": """
        continues at 32768
        32768 -> 65536
        inside:  [-0.6 -0.8]
        by hand: [-0.6 -0.8]
        [0. 0.] scale 1024
        [0. 0.] scale 512
        [-1. -1.] scale 512
        loss 6.000, gradient [ 8.4 16.8]
        generator [1. 1.]
        critic [0.9 0.8]
        scale 512""",
    # TensorFlow's page prints these numbers.
    "tf_keras": """
        after the first step:  0.5
        after the second step: 0.25
        continues at 4096""",
    # Only the second loss overflows, and the one optimizer skips.
    "apex": """
        weights [1. 1.]
        scales [32768.0, 16384.0]
        continues at 4096""",
    # The old rule grows after every second step, the new one step later at first.
    "deepspeed": """
        continues at 4096
        [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 32.0]
        [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]""",
    # One overflow in five steps is tolerated, the second, in six, is not.
    "fairseq": """
        nonfinite scale 128
        nonfinite scale 64
        continues at 256""",
}


@slow
@pytest.mark.parametrize("page", PRINTED)
def test_a_page_prints_what_is_worked_out_by_hand(page):
    expected = [line.strip() for line in PRINTED[page].strip().splitlines()]
    assert run_page(page)[0].splitlines()[-len(expected) :] == expected


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0)])
def test_a_clip_between_unscale_and_step_does_not_hide_an_infinity(clip):
    # The verdict comes before the clip, as torch's `unscale_` takes it.
    tx = ols.loss_scaled(optax.sgd(1.0), ols.presets.torch(2.0**10))
    params = jnp.ones(2)
    opt_state = tx.init(params)
    grads = ols.unscale(jnp.asarray([jnp.inf, 2.0**10]), opt_state)
    clipped, _ = clip.update(grads, clip.init(params))
    settings = {"grads_finite": ols.all_finite(grads), "grads_unscaled": True}
    updates, opt_state = tx.update(clipped, opt_state, params, **settings)
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert ols.get_loss_scale(opt_state) == 2.0**9


@pytest.mark.usefixtures("standard_promotion")
def test_a_gradient_penalty_survives_float16():
    # tensorflow #48662, apex #654: there the penalty collapses.
    def loss_fn(params):
        weight = params.astype(jnp.float16) * jnp.float16(2.0**-14)
        return jnp.sum(weight.astype(jnp.float32) ** 2)

    def penalized(params, state):
        scaled = jax.grad(lambda p: ols.scale(loss_fn(p), state))(params)
        return loss_fn(params) + optax.tree.norm(ols.unscale(scaled, state))

    params = jnp.asarray([1.0, 2.0])
    exact = 2 * params * 2.0**-28
    expected = exact + 2.0**-27 * exact / jnp.linalg.norm(exact)
    state = ols.dynamic_loss_scale().init()
    grads = ols.scaled_grad(penalized, state)(params, state)
    np.testing.assert_allclose(ols.unscale(grads, state), expected, rtol=1e-3)
    none = ols.no_loss_scale().init()
    assert not np.any(ols.scaled_grad(penalized, none)(params, none) > 0.0)
