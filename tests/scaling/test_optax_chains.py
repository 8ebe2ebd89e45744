"""`loss_scaled` among the transformations of Optax, and a step written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam, lenient, standard_promotion
from helpers.nodes import Twins

SCALE = 2.0**10
RULE = ols.dynamic_loss_scale(SCALE)
PARAMS = {"w": jnp.asarray([1.0, -2.0]), "b": jnp.asarray([0.5])}
GRADS = jax.tree.map(lambda p: 0.5 * p, PARAMS)
SCALED = jax.tree.map(lambda g: g * SCALE, GRADS)
BAD = {**SCALED, "b": jnp.asarray([jnp.nan])}


def run(tx, history, params=PARAMS):
    """Parameters and state after steps with good or bad gradients."""
    state = tx.init(params)
    update = jax.jit(tx.update)
    for finite in history:
        scaled = ols.scale(GRADS, state)
        updates, state = update(scaled if finite else BAD, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_accumulation_inside_the_wrapper_never_notices_a_bad_step():
    steps = optax.MultiSteps(optax.adam(0.1), 2)  # Wrapped as it is.
    tx = ols.loss_scaled(steps, RULE)
    with standard_promotion():
        params, state = run(tx, [True, False, True, True, False, True])
        expected, expected_state = run(tx, [True] * 4)
    assert isinstance(state.inner_state, optax.MultiStepsState)
    assert_same_bits(params, expected)
    assert_same_bits(state.inner_state, expected_state.inner_state)
    assert ols.loss_scale_metrics(state)["total_notfinite"] == 2


def weighted():
    def update(updates, state, params=None, *, weight=1.0, **extra_args):
        del params, extra_args
        return optax.tree.scale(weight, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


WRAPPERS = {
    "loss_scaled": ols.loss_scaled,
    "no loss scale": lambda inner: ols.loss_scaled(inner, ols.no_loss_scale()),
    "master_weights": ols.master_weights,
    "Keras": ols.loss_scale_optimizer,
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_extra_arguments_reach_an_optimizer_inside_multi_steps(wrapper):
    tx = wrapper(optax.MultiSteps(weighted(), 1))
    params = jnp.ones(2)
    state = tx.init(params)
    scale = 1.0 if wrapper is ols.master_weights else ols.get_loss_scale(state)
    with standard_promotion():
        updates, _ = tx.update(scale * params, state, params, weight=jnp.float32(3.0))
    assert_same_bits(updates, jnp.full(2, 3.0))


def test_in_a_chain_it_skips_a_bad_step():
    wrapped = ols.loss_scaled(adam(), RULE)
    tx = optax.chain(optax.chain(wrapped), optax.scale(0.5))
    params, state = run(tx, [False])
    assert_same_bits(params, PARAMS)
    assert ols.get_loss_scale(state) == SCALE / 2


def test_without_an_inner_optimizer_it_unscales_and_adjusts_the_scale():
    tx = optax.chain(ols.loss_scaled(loss_scale=RULE), optax.sgd(1.0))
    updates, state = tx.update(SCALED, tx.init(PARAMS), PARAMS)
    assert_same_bits(updates, jax.tree.map(lambda g: -g, GRADS))
    updates, state = tx.update(BAD, state)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    assert ols.get_loss_scale(state) == SCALE / 2


@pytest.mark.slow
def test_without_an_inner_optimizer_it_cannot_stop_the_optimizers_after_it():
    link = optax.chain(ols.loss_scaled(loss_scale=RULE), lenient(optax.adamw(0.1)))
    params, state = run(link, [True, False])
    before, _ = run(link, [True])
    assert not np.array_equal(params["w"], before["w"])  # Moved by momentum and decay.
    assert optax.tree.get(state[1], "count") == 2
    wrapped = ols.loss_scaled(lenient(optax.adamw(0.1)), RULE)
    params, state = run(wrapped, [True, False])
    before, _ = run(wrapped, [True])
    assert_same_bits(params, before)
    assert optax.tree.get(state.inner_state, "count") == 1


MONITORS = {
    "norm": optax.tree.norm,
    "average": optax.measure_with_ema(optax.tree.norm, decay=0.5),
    # The averages of a number and of a condition are floating after one update.
    "large": optax.measure_with_ema(
        lambda u: sum(jnp.sum(x > 0.3) for x in jax.tree.leaves(u)), decay=0.5
    ),
    "share": optax.measure_with_ema(lambda u: optax.tree.norm(u) > 0.6, decay=0.5),
}


@pytest.mark.slow
def test_a_monitor_measures_the_steps_that_were_applied():
    # Its state holds no measurements before its first update.
    bare = lenient(optax.chain(optax.monitor(MONITORS), optax.sgd(0.1)))
    tx = ols.loss_scaled(bare, RULE, check_updates=True)
    update, bare_update = jax.jit(tx.update), jax.jit(bare.update)
    opt_state, expected = tx.init(PARAMS), bare.init(PARAMS)
    for step, finite in enumerate([False, True, False, True]):
        grads = jax.tree.map(lambda g, step=step: g * (step % 2), GRADS)
        scaled = ols.scale(grads, opt_state)
        _, opt_state = update(scaled if finite else BAD, opt_state, PARAMS)
        if finite:
            _, expected = bare_update(grads, expected, PARAMS)
            for name in MONITORS:
                measured = optax.tree.get(opt_state, name)
                np.testing.assert_allclose(measured, optax.tree.get(expected, name))
        elif step == 0:
            assert optax.tree.get(opt_state, "norm") == 0.0


ONE, TWO = jnp.ones(()), jnp.ones(2)
# The state before and after an update.
CHANGES = {
    "grows": (Twins(ONE, ONE), Twins(ONE, ONE, ONE), "have no paths of their own"),
    "shrinks": ({"a": ONE, "m": TWO}, {"a": ONE}, r"got one without \['m'\]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_inner_state_whose_arrays_cannot_be_matched_is_refused(name):
    first, second, message = CHANGES[name]
    inner = optax.GradientTransformation(
        lambda params: first, lambda grads, state, params: (grads, second)
    )
    tx = ols.loss_scaled(inner, RULE)
    with pytest.raises(ValueError, match=message):
        tx.update(SCALED, tx.init(PARAMS), PARAMS)


def test_an_inner_state_may_be_a_node_whose_arrays_have_no_paths():
    inner = optax.GradientTransformation(
        lambda params: Twins(ONE, ONE),
        lambda grads, state, params: (grads, Twins(TWO[0] + 1, ONE)),
    )
    tx = ols.loss_scaled(inner, RULE)
    for grads, first in ((SCALED, 2.0), (BAD, 1.0)):
        _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert jax.tree.leaves(state.inner_state)[0] == first


def test_what_a_skipped_first_step_would_add_to_the_inner_state_is_zero():
    inner = optax.GradientTransformation(
        lambda params: {"a": ONE},
        lambda grads, state, params: (grads, {"a": ONE, "added": 5 * TWO}),
    )
    tx = ols.loss_scaled(inner, RULE)
    for grads, added in ((SCALED, [5.0, 5.0]), (BAD, [0.0, 0.0])):
        _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert state.inner_state["added"].tolist() == added


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_scale_of_one_only_skips_bad_batches_however_many(dtype):
    """`optax.apply_if_finite` applies the batch that comes after its last error."""
    plain = optax.adam(0.1)
    skips = ols.loss_scaled(plain, ols.static_loss_scale(1.0))
    gives_up = optax.apply_if_finite(plain, 3)
    good, bad = jnp.asarray([0.5, -2.0], dtype), jnp.asarray([jnp.nan, 1.0], dtype)

    def train(tx, batches):
        params = jnp.ones(2)
        state = tx.init(params)
        for grads in batches:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = train(skips, [good, *[bad] * 5, good])
    expected, inner_state = train(plain, [good.astype(jnp.float32)] * 2)
    assert_same_bits(params, expected)
    assert_same_bits(state.inner_state, inner_state)
    assert ols.loss_scale_metrics(state)["total_notfinite"] == 5
    assert jnp.isnan(train(gives_up, [bad.astype(jnp.float32)] * 5)[0][0])
