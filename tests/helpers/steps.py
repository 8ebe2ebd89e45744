"""Steps of an optimizer, and what a skipped one leaves as it was."""

import functools

import jax
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits

eager_and_jitted = pytest.mark.parametrize(
    "run", [lambda function: function, jax.jit], ids=["eager", "jit"]
)


def apply(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def steps(tx, params, grads, *, run=jax.jit, state=None):
    """Parameters and states at first, and after a step with each of the gradients."""
    step = _step_of(tx, run)
    history = [(params, tx.init(params) if state is None else state)]
    for grad in grads:
        history.append(step(*history[-1], grad))
    return history


@functools.cache
def _step_of(tx, run):
    """A step of an optimizer, compiled once for all that start from other states."""

    @run
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return apply(params, updates), state

    return step


def assert_skipped(params, before, updates, after):
    """Checks that one step changed no bit of the parameters and the inner state."""
    assert_same_bits(apply(params, updates), params)
    assert_same_bits(after.inner_state, before.inner_state)
    assert not after.loss_scale_state.last_finite
    total = before.loss_scale_state.total_notfinite + 1
    assert after.loss_scale_state.total_notfinite == total


def assert_nothing_but_the_scale_changed(new, old):
    """Checks two pairs of parameters, or of whatever was protected, and a state."""
    (new, new_state), (old, old_state) = new, old
    assert_same_bits(new, old)
    assert_same_bits(new_state.inner_state, old_state.inner_state)
    assert ols.get_loss_scale(new_state) == ols.get_loss_scale(old_state) / 2
