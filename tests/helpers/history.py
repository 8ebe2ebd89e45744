"""Runs a rule over a history of finite and nonfinite steps."""

import jax
import jax.numpy as jnp
import numpy as np


def states_after(rule, history, state=None, grads_max=None):
    """The states after each step, stacked; starts from `state`, or `rule.init()`."""
    finite = jnp.asarray(history, bool)
    largest = jnp.where(finite, 1.0, jnp.inf) if grads_max is None else grads_max

    def step(state, of_step):
        state = rule.adjust(state, *of_step)
        return state, state

    first = rule.init() if state is None else state
    return jax.lax.scan(step, first, (finite, jnp.asarray(largest, jnp.float32)))[1]


def scales_after(rule, maxima):
    """The scale after each step, where `maxima` are the largest magnitudes."""
    states = states_after(rule, np.isfinite(maxima), grads_max=maxima)
    return states.loss_scale.tolist()
