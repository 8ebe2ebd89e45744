"""Runs a rule over a history of finite and nonfinite steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def states_after(rule, history, state=None, grads_max=None):
    """The states after each step, stacked; starts from `state`, or `rule.init()`."""
    finite = jnp.asarray(history, bool)
    largest = jnp.where(finite, 1.0, jnp.inf) if grads_max is None else grads_max
    first = rule.init() if state is None else state
    return _run_of(rule.adjust)(first, (finite, jnp.asarray(largest, jnp.float32)))


@functools.cache
def _run_of(adjust):
    """Runs a rule, compiled once for all histories of one length."""

    def step(state, of_step):
        state = adjust(state, *of_step)
        return state, state

    return jax.jit(lambda first, steps: jax.lax.scan(step, first, steps)[1])


def scales_after(rule, maxima):
    """The scale after each step, where `maxima` are the largest magnitudes."""
    states = states_after(rule, np.isfinite(maxima), grads_max=maxima)
    return states.loss_scale.tolist()
