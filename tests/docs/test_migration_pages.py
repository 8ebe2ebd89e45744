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
PAGES = [path.stem for path in project_files("docs/migration/*.md")]
# Code that is to be typed, and not a word of another system or of a remark.
TO_TYPE = r"`((?:from |repr\(|(?:ols|optax|compat|tx|rule|state|opt_state)\.).+?)`"


def text_of(page):
    return (ROOT / "docs" / "migration" / f"{page}.md").read_text()


def entries_of(page):
    """The cells on the right of the tables of a page."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)
    return re.findall(r"^\| (?!---).+? \| (?!here \||Optax \|)(.+) \|$", prose, re.M)


@functools.cache
def run_page(page):
    """What a page prints, and the names that its cells above its last table define."""
    above, _, below = text_of(page).rpartition("\n| ")
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as output, standard_promotion():
        for cell in cells_of(above):
            exec(cell, names)
        names_above = dict(names)
        for cell in cells_of(below):
            exec(cell, names)
    # As the run of a page has trained, start again.
    opt_state = names_above["tx"].init(names_above["params"])
    state = ols.find_loss_scale_state(opt_state)
    return output.getvalue(), names_above | {"opt_state": opt_state, "state": state}


def run(code, page):
    """The value of an entry. An import has none."""
    with standard_promotion():
        names = run_page(page)[1] | {"np": np}
        return (exec if code.startswith("from ") else eval)(code, names)


@slow
@pytest.mark.parametrize("page", PAGES)
def test_everything_to_type_in_a_row_runs(page):
    for entry in entries_of(page):
        codes = re.findall(TO_TYPE, entry)
        assert codes or "](" in entry or entry.endswith("."), entry
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
        ols.get_loss_scale(opt_state) == 2.0**16
        ols.scale([loss, loss], opt_state)[1] / loss == 2.0**16
        ols.set_loss_scale(opt_state, 1024.0).loss_scale_state.loss_scale == 1024.0
        state.last_finite
        rule.adjust(state, ols.all_finite(unscaled)).step_count == 1
        ols.presets.to_torch_state_dict(opt_state)["_growth_tracker"] == 0""",
    "flax_and_jmp": """
        rule.adjust(state, True).rule_state.growth_count == 1
        ols.static_loss_scale(128.0).skips""",
    "keras": """
        state.step_count - state.total_notfinite == 0
        optax.tree.get(opt_state, "learning_rate") == np.float32(1e-3)""",
    "other_systems": """
        ols.get_loss_scale(opt_state) == 2.0**12
        rule.adjust(state, grads_finite=True).rule_state.growth_count == 1
        state.total_notfinite == 0
        state.rule_state.hysteresis_count == 2
        ols.presets.deepspeed().init().rule_state.hysteresis_count == 1
        ols.presets.deepspeed().init().loss_scale == 2.0**32
        ols.presets.fairseq().init().loss_scale == 2.0**15
        ols.presets.mindspore_fixed(128.0, drop_overflow_update=True).skips
        not ols.presets.tf_keras(dynamic=False, initial_scale=128.0).skips
        not ols.static_loss_scale(128.0, skip_nonfinite=False).skips""",
}


@slow
@pytest.mark.parametrize("page", TRUE)
def test_an_entry_gives_the_value_that_its_name_promises(page):
    codes = re.findall(TO_TYPE, "".join(entries_of(page)))
    for fact in map(str.strip, TRUE[page].strip().splitlines()):
        assert any(code in fact for code in codes), fact
        assert run(fact, page), fact


PRINTED = {
    # The first of ten steps is skipped. The gradients 3 and 4, of norm 5, are clipped
    # to 1. Windows of 1 and 3 have a mean of 2, the rate is 0.5, and the second of
    # three windows is infinite.
    "pytorch": """
        scale 32768, skipped 1 of 10
        [-0.6 -0.8]
        [0. 0.] scale 1024
        [0. 0.] scale 512
        [-1. -1.] scale 512
        {'scale': 32768.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, \
'growth_interval': 2000, '_growth_tracker': 9}
        continues at 32768""",
    # One step after the 500 of Flax's run.
    "flax_and_jmp": "scale 4096, finite steps 501",
}


@slow
@pytest.mark.parametrize("page", PRINTED)
def test_a_page_prints_what_is_worked_out_by_hand(page):
    expected = [line.strip() for line in PRINTED[page].strip().splitlines()]
    assert run_page(page)[0].splitlines() == expected


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
