"""Steps that clip and log by hand, and programs that take gradients themselves.

Promised in docs/trainers.md and two guides, without_optax.md and own_gradients.md.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.pages import program_of, run_program
from helpers.steps import assert_nothing_but_the_scale_changed

run = functools.cache(run_program)
TX = ols.loss_scaled(optax.adamw(3e-3), grads_unscaled=True)
STEPS = 8


def error_of(actual, expected):
    """The norm of the difference of two trees, relative to that of the second."""
    actual, expected = (ravel_pytree(tree)[0] for tree in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def batches(bad=None):
    """Batches of the program of MaxText; one of them has a weight that is NaN."""
    for number in range(STEPS):
        batch = run("maxtext_step")["batch"](number)
        if number == bad:
            batch["weights"] = batch["weights"].at[0, 0].set(jnp.nan)
        yield batch


def assert_as_in_float32_until_a_nan(low, exact):
    """Checks what two runs logged; the last batch of the first was bad."""
    assert exact[0, 1] < 0.99 * exact[0, 2]  # The clip is at work.
    assert not np.array_equal(low[:-1], exact[:-1])
    np.testing.assert_allclose(low[:-1], exact[:-1], rtol=2e-3)
    assert np.isnan(low[-1]).all()


# MaxText.


def linen_steps(loss_fn, bad=None):
    """The last two states, and loss and norms of each step."""
    names = run("maxtext_step")
    state, logged = names["init_state"](names["model"], names["tx"]), []
    with mock.patch.dict(names, loss_fn=loss_fn):  # As `train_step` finds it.
        step = functools.partial(names["train_step"], names["model"], names["config"])
        step = jax.jit(step)
        for batch in batches(bad):
            before = state
            state, metrics = step(state, batch, jax.random.key(0))
            logged.append([metrics[n] for n in ("loss", "grad_norm", "raw_grad_norm")])
    return before, state, np.array(logged)


def test_a_step_of_maxtext_logs_and_clips_as_in_float32_until_a_nan_changes_no_bit():
    loss_fn = run("maxtext_step")["loss_fn"]
    _, _, exact = linen_steps(loss_fn.__wrapped__)
    before, after, low = linen_steps(loss_fn, bad=STEPS - 1)
    assert_as_in_float32_until_a_nan(low, exact)
    pairs = ((state.params, state.opt_state) for state in (after, before))
    assert_nothing_but_the_scale_changed(*pairs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.hidden, self.out = (nnx.Linear(32, n, rngs=rngs) for n in (32, 64))

    def __call__(self, tokens):
        return self.out(nnx.gelu(self.hidden(self.embed(tokens))))


class TrainStateNNX(nnx.Module):
    def __init__(self):
        self.model = Model(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, TX, wrt=nnx.Param)


def nnx_steps(wrap, bad=None):
    """The last two states of MaxText's NNX step, and loss and norms of each."""
    graph, arrays = nnx.split(TrainStateNNX())
    logged = []

    @jax.jit
    def step(arrays, batch):
        state = nnx.merge(graph, arrays)
        model_graph, params, rest = nnx.split(state.model, nnx.Param, ...)

        def diff_wrapper(params, rest, batch):
            logits = nnx.merge(model_graph, params, rest, copy=True)(batch["inputs"])
            loss = optax.softmax_cross_entropy_with_integer_labels
            return jnp.mean(loss(logits, batch["targets"]) * batch["weights"])

        grad_fn = jax.value_and_grad(wrap(diff_wrapper, state))
        loss, raw_grads = grad_fn(params, rest, batch)
        grads = run("maxtext_step")["apply_gradient_clipping"](raw_grads, 0.1)
        finite = ols.all_finite(raw_grads)  # The clip would not hide an overflow.
        state.optimizer.update(state.model, grads, grads_finite=finite)
        norms = [optax.tree.norm(tree) for tree in (grads, raw_grads)]
        return nnx.state(state), [loss, *norms]

    for batch in batches(bad):
        before = arrays
        arrays, metrics = step(arrays, batch)
        logged.append(metrics)
    return nnx.merge(graph, before), nnx.merge(graph, arrays), np.array(logged)


def test_maxtext_with_nnx_does_so_too():
    _, _, exact = nnx_steps(lambda fun, _: fun)
    before, after, low = nnx_steps(
        lambda fun, state: ols.scaled_backward(ols.autocast(fun), state), STEPS - 1
    )
    assert_as_in_float32_until_a_nan(low, exact)
    pairs = (
        (nnx.state(state.model), nnx.as_pure(state.optimizer.opt_state))
        for state in (after, before)
    )
    assert_nothing_but_the_scale_changed(*pairs)


@pytest.mark.parametrize(
    ("clip", "is_told", "is_skipped"),
    [
        (optax.clip_by_global_norm(1.0), False, True),
        (optax.clip_by_global_norm(1.0), True, True),
        (optax.clip(1.0), False, False),
        (optax.clip(1.0), True, True),
    ],
    ids=["norm", "norm, told", "value", "value, told"],
)
def test_only_a_clip_by_value_hides_an_infinity(clip, is_told, is_skipped):
    params, raw_grads = jnp.ones(3), jnp.array([jnp.inf, 1.0, -2.0])
    opt_state = TX.init(params)
    grads, _ = clip.update(raw_grads, clip.init(params))
    told = {"grads_finite": ols.all_finite(raw_grads)} if is_told else {}
    _, opt_state = TX.update(grads, opt_state, params, **told)
    assert ols.loss_scale_metrics(opt_state)["total_notfinite"] == is_skipped


# Without Optax.


def test_adam_by_hand_is_that_of_optax_and_goes_on_from_a_checkpoint():
    names = run("without_optax")
    x, y, w = names["x"], names["y"], names["w"]
    params = {"in": w[:4], "out": w[4:].T}
    tx = ols.loss_scaled(optax.adam(1e-2))
    state, opt_state = names["init"](params), tx.init(params)
    for number in range(6):
        batch = x.at[0, 0].set(jnp.nan) if number == 3 else x
        grads = ols.scaled_grad(names["loss_fn"], opt_state)(params, batch, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        saved = jax.device_get(state)
        state, _ = names["step"](saved, batch, y)
        if number == 3:
            assert_same_bits(state[:4], jax.device_put(saved[:4]))
            assert ols.get_loss_scale(state) == ols.get_loss_scale(saved) / 2
    np.testing.assert_allclose(state.params["in"], params["in"], rtol=1e-5, atol=1e-6)
    assert ols.loss_scale_metrics(state) == ols.loss_scale_metrics(opt_state)


# Gradients that a program takes itself.


@functools.cache
def guide():
    """What the cells of the guide define."""
    names = {}
    exec(program_of("guides/own_gradients.md"), names)
    return names


def test_the_gradient_of_an_attack_is_zero_without_a_scale():
    names = guide()
    images, low = names["images"], names["low"]
    exact = jax.grad(names["attacked_loss"])(images)
    assert not jax.grad(low)(images).any()
    assert error_of(jax.grad(ols.scaled_backward(low, 2.0**15))(images), exact) < 1e-2
    state = ols.dynamic_loss_scale().init()
    grads = ols.unscale(ols.scaled_grad(low, state)(images), state)
    assert error_of(grads, exact) < 1e-2


def penalized(gradient):
    """The loss of the guide, with another way to take the gradient inside."""

    def loss_fn(params, x):
        def energy(x):
            return jnp.sum(jnp.tanh(x @ params["w1"]) @ params["w2"])

        return 1e-3 * jnp.mean(gradient(energy, x) ** 2)

    return ols.autocast(loss_fn)


def test_a_penalty_needs_its_scale_around_the_whole_loss():
    names = guide()
    state = ols.static_loss_scale(2.0**15).init()
    arguments = {name: names[name] for name in ("w1", "w2")}, names["images"]
    low = names["penalized_loss"]
    exact = jax.grad(low.__wrapped__)(*arguments)

    def error_under_a_scale(loss_fn):
        grads = ols.unscale(ols.scaled_grad(loss_fn, state)(*arguments), state)
        return error_of(grads, exact)

    assert error_of(names["grads"], exact) < 1e-2
    assert error_under_a_scale(low) < 1e-2
    assert error_of(jax.grad(low)(*arguments), exact) > 0.9

    def unscaled(energy, x):
        return ols.unscale(ols.scaled_grad(energy, state)(x), state)

    assert error_under_a_scale(penalized(unscaled)) > 0.9
    refused = penalized(lambda fun, x: jax.grad(ols.scaled_backward(fun, 2.0**9))(x))
    with pytest.raises(TypeError, match="wrap the function that is differentiated"):
        jax.grad(refused)(*arguments)


def test_sam_is_that_of_float32_until_a_nan_changes_no_bit():
    names = guide()
    tx, step, images = names["tx"], names["step"], names["images"]
    exact_tx = names["sam"](optax.adam(1e-3), names["adversary"], opaque_mode=True)
    loss_fn = names["loss_fn"].__wrapped__
    first = {name: names[name] for name in ("w1", "w2")}
    exact, low = (first, exact_tx.init(first)), (first, tx.init(first))

    @jax.jit
    def exact_step(params, opt_state, x, y):
        grad_fn = jax.grad(lambda params, _: loss_fn(params, x, y))
        grads = grad_fn(params, 0)
        updates, opt_state = exact_tx.update(grads, opt_state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), opt_state

    y = images[:, 0]
    for _ in range(30):
        exact = exact_step(*exact, images, y)
        *low, _ = step(*low, images, y)
    moves = (jax.tree.map(jnp.subtract, run[0], first) for run in (low, exact))
    assert 0 < error_of(*moves) < 1e-2
    *after, _ = step(*low, images.at[0, 0].set(jnp.nan), y)
    assert_nothing_but_the_scale_changed(
        *((params, opt_state.opt_state) for params, opt_state in (after, low))
    )


def test_only_inside_sam_is_a_nan_of_its_second_gradient_seen():
    sam, adversary = guide()["sam"], guide()["adversary"]
    wrap = functools.partial(ols.loss_scaled, grads_unscaled=True)
    sgd, w = optax.sgd(0.1), jnp.float32(1.0)
    grad_fn = jax.grad(lambda w, _: w * jnp.where(w > 1, jnp.nan, w))
    for tx, is_skipped in (
        (sam(wrap(sgd), adversary, opaque_mode=True), True),
        (wrap(sam(sgd, adversary, opaque_mode=True)), False),
    ):
        update, opt_state = tx.update(grad_fn(w, 0), tx.init(w), w, grad_fn=grad_fn)
        assert (update == 0) == is_skipped
        assert ols.loss_scale_metrics(opt_state)["total_notfinite"] == is_skipped
