"""A rule, run over a history of finite and nonfinite steps."""

import jax
import jax.numpy as jnp


def states_after(rule, history, state=None):
    """The states after each step, stacked; from the rule's first, or from another."""

    def step(state, finite):
        state = rule.adjust(state, finite)
        return state, state

    first = rule.init() if state is None else state
    return jax.lax.scan(step, first, jnp.asarray(history, bool))[1]
