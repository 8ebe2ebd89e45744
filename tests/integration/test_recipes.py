"""The recipes of the pages on skipped steps, logging, masters and troubleshooting.

Each test runs functions that a page shows.
"""

import ast
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import optax_lossscale as ols
from helpers.compare import assert_same_bits, assert_within_ulp
from helpers.inner import standard_promotion
from helpers.pages import program_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
SKIPPED = "guides/debugging_a_skipped_step.md"


@functools.cache
def functions_of(page):
    """The functions of a page, by name. None of them is called."""
    tree = ast.parse(program_of(page))
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    names = {}
    exec(compile(tree, page, "exec"), names)
    return names


def run_section(page, heading, **settings):
    """What the program of a section defines, which uses functions of the page."""
    names = functions_of(page) | settings
    exec(compile(program_of(page, heading), page, "exec"), names)
    return names


# Repeat a batch at the lower scale. The default scale is 2**15 at first.

PARAMS = {"w": jnp.zeros((2, 1))}
X = jnp.array([[1.0, -2.0], [0.5, 0.25], [2.0, 1.0], [-1.0, 0.5]])
TX = ols.loss_scaled(optax.adam(0.1))


def targets(log2):
    """Four targets, of which the largest is a power of two."""
    return jnp.array([[0.25], [2.0**log2], [-0.5], [1.0]])


@ols.autocast
def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def sqrt_loss_fn(params, x, y):
    return jnp.mean(jnp.sqrt(x @ params["w"]) - y)  # At zero the slope is infinite.


def step_of(loss_fn, tx=TX):
    def step(state, x, y):
        params, opt_state = state
        loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def repeated(step, *repeats):
    return functions_of(SKIPPED)["repeated"](step, *repeats)


@functools.cache
def jitted(loss_fn, *repeats):
    return jax.jit(repeated(step_of(loss_fn), *repeats))


def scale_and_counts(state):
    state = ols.find_loss_scale_state(state)
    return (
        state.loss_scale,
        state.step_count,
        state.total_notfinite,
        state.notfinite_count,
    )


# The gradient that enters the product is 2 (0 - y) / 4 times the scale, so the largest
# is 2**(log2 - 1 + 15) at first. It fits into float16 below 2**16, from log2 = 1 down.
@pytest.mark.parametrize(("log2", "halvings"), [(1, 0), (2, 1), (6, 5), (11, 10)])
def test_an_overflowing_batch_is_applied_after_the_halvings_that_it_needs(
    log2, halvings
):
    y = targets(log2)
    state = PARAMS, TX.init(PARAMS)
    (params, opt_state), loss = jitted(loss_fn)(state, X, y)
    counts = 2.0 ** (15 - halvings), halvings + 1, halvings, 0
    assert scale_and_counts(opt_state) == counts
    np.testing.assert_allclose(loss, np.mean(np.square(y)), rtol=1e-6)

    # Every number is exact in float16, so these are the gradients in float32.
    grads = jax.grad(loss_fn.__wrapped__)(PARAMS, X, y)
    adam = optax.adam(0.1)
    updates, inner_state = jax.jit(adam.update)(grads, adam.init(PARAMS), PARAMS)
    assert_within_ulp(params, optax.apply_updates(PARAMS, updates))
    assert_within_ulp(opt_state.inner_state, inner_state)


def train_once():
    """A state whose moments are not zero."""
    return jitted(loss_fn)((PARAMS, TX.init(PARAMS)), X, targets(0))[0]


@pytest.mark.parametrize("repeats", [10, 0])
def test_a_batch_that_overflows_at_every_scale_ends_after_the_repeats(repeats):
    params, opt_state = train_once()
    params = jax.tree.map(jnp.zeros_like, params)
    step = jitted(sqrt_loss_fn, repeats)
    (new_params, new_state), loss = step((params, opt_state), X, targets(0))
    assert np.isfinite(loss)
    assert_same_bits(new_params, params)
    assert_same_bits(new_state.inner_state, opt_state.inner_state)
    tries = repeats + 1
    assert scale_and_counts(new_state) == (2.0 ** (15 - tries), 1 + tries, tries, tries)


def test_a_batch_with_a_loss_that_is_not_finite_is_tried_once():
    params, opt_state = train_once()
    state, bad_x = (params, opt_state), X.at[0, 0].set(jnp.nan)
    (new_params, new_state), loss = jitted(loss_fn)(state, bad_x, targets(0))
    assert np.isnan(loss)
    assert_same_bits(new_params, params)
    assert_same_bits(new_state.inner_state, opt_state.inner_state)
    assert scale_and_counts(new_state) == (2.0**14, 2, 1, 1)


def test_under_the_headroom_rule_64_times_larger_gradients_need_two_repeats():
    # The first repeat is at a scale that is one bit lower, the second eight more.
    tx = ols.loss_scaled(optax.sgd(0.0), ols.headroom_loss_scale())
    step = jax.jit(repeated(step_of(loss_fn, tx)))
    state, _ = step((PARAMS, tx.init(PARAMS)), X, targets(0))
    _, *counts = scale_and_counts(step(state, X, targets(6))[0])
    assert counts == [4, 2, 0]


def test_a_train_state_is_repeated_in_a_scan():
    def step(state, x, y):
        loss, grads = ols.scaled_value_and_grad(loss_fn, state)(state.params, x, y)
        return state.apply_gradients(grads=grads), loss

    state = TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
    batches = jnp.stack([X] * 3), jnp.stack([targets(log2) for log2 in (0, 3, 0)])
    state, _ = jax.lax.scan(lambda s, batch: repeated(step)(s, *batch), state, batches)
    assert scale_and_counts(state) == (2.0**13, 5, 2, 0)
    assert state.opt_state.inner_state[0].count == 3


# A program that measures gradients, guards against NaN, and counts steps.


@pytest.mark.slow
def test_the_logging_program_measures_and_trains_as_without_a_loss_scale():
    x = jax.random.normal(jax.random.key(0), (64, 3))
    y = x.sum(1)[:, None]
    heading = "Gradient norms, learning rates and step numbers"
    program = run_section("guides/logging.md", heading, x=x, y=y)
    batches, plain = jnp.stack([x] * 4), {"w": jnp.zeros((3, 1))}
    inner, schedule = program["inner"], program["schedule"]
    params, inner_state, opt_state = plain, inner.init(plain), program["tx"].init(plain)
    for number in range(4):
        key = jax.random.fold_in(jax.random.key(1), number)
        loss, grads = jax.value_and_grad(program["noisy_loss_fn"])(plain, key, x, y)
        expected = loss, optax.tree.norm(grads), schedule(number)
        updates, inner_state = inner.update(grads, inner_state)
        plain = optax.apply_updates(plain, updates)
        params, opt_state, metrics = program["step"](params, opt_state, batches)
        measured = [metrics[name] for name in ("loss", "norm", "rate")]
        np.testing.assert_allclose(measured, expected, rtol=1e-3)
    np.testing.assert_allclose(params["w"], plain["w"], rtol=1e-3)

    # The page's program has run four batches, of which the third was skipped.
    opt_state, metrics = program["opt_state"], program["metrics"]
    assert ols.find_loss_scale_state(opt_state).step_count == 4
    assert optax.tree.get(opt_state, "count") == 3
    assert metrics["last_finite"]
    np.testing.assert_allclose(metrics["rate"], 0.1 * (1 - 2 / 20), rtol=1e-6)


# Masters are a part of the optimizer's state.


def test_masters_are_read_and_replaced_in_a_state_that_can_be_donated():
    tx = ols.loss_scaled(ols.master_weights(optax.sgd(0.5)))
    pretrained = {"w": jnp.array([0.1, 2.0**-20]), "norm": jnp.array([1.0, 0.3])}
    params = ols.cast_params(pretrained)
    assert params["w"].dtype == jnp.float16
    rounded, exact = jax.device_get((params, pretrained))
    masters = jax.tree.map(jnp.copy, pretrained)
    opt_state = optax.tree.set(tx.init(params), master_params=masters)

    def step(params, opt_state):
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, opt_state = tx.update(zeros, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    donating = jax.jit(step, donate_argnums=(0, 1))
    new_params, opt_state = donating(params, opt_state)
    assert_same_bits(optax.tree.get(opt_state, "master_params"), exact)
    assert_same_bits(new_params, rounded)


# Two checks of a training step.


@pytest.fixture(scope="module")
def checks():
    x = jax.random.normal(jax.random.key(0), (64, 8))
    with standard_promotion():
        return run_section(
            "troubleshooting.md",
            "It learns less than in float32",
            x=x,
            y=x.sum(1)[:, None],
        )


def test_a_right_step_passes_both_checks(checks):
    np.testing.assert_allclose(checks["low"][0], checks["high"][0], rtol=1e-3)
    assert checks["bad"] == (0, 1)


def test_the_update_of_a_mistaken_step_depends_on_the_scale(checks, monkeypatch):
    loss_fn, tx = checks["loss_fn"], checks["tx"]

    def step_with_another_state(params, opt_state, x, y):
        grads = ols.scaled_grad(loss_fn, tx.init(params))(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, 0.0

    monkeypatch.setitem(checks, "step", step_with_another_state)
    low, high = (checks["change"](scale, checks["x"])[0] for scale in (2.0**4, 2.0**10))
    np.testing.assert_allclose(low / high, 64, rtol=1e-3)  # 2**10 / 2**4.


def test_a_state_that_is_not_returned_counts_nothing(checks, monkeypatch):
    right = checks["step"]

    def step(params, opt_state, x, y):
        new, _, loss = right(params, opt_state, x, y)
        return new, opt_state, loss

    monkeypatch.setitem(checks, "step", step)
    assert checks["change"](2.0**10, checks["x"] * jnp.nan)[1] == 0
