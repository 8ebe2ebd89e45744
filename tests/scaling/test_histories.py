"""The rules, and the steps under them, after every history of at most twelve events.

The events are what can happen in a step. After each, every number of the state is
compared with `stepwise`, which was written from the definitions; `model_checking` says
how all histories can be tried.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers import stepwise
from helpers.inner import lenient
from helpers.model_checking import explore, in_batches

F32 = np.float32
PARAMS = np.asarray([1.0, -0.0], F32)


class Event(NamedTuple):
    """A step; `largest` is the largest magnitude of its true gradients."""

    largest: float
    accept: bool = True
    grads_finite: bool = True


GOOD, ZERO = Event(1.0), Event(0.0)
BAD = [Event(math.inf), Event(math.nan), Event(1.0, grads_finite=False)]
REJECTED = [Event(1.0, accept=False), Event(math.inf, accept=False)]


class Model(NamedTuple):
    """A rule, its settings, and its first state and next one as `stepwise` has them.

    It may read how many steps were applied, up to `steps_read`.
    """

    make: Callable
    settings: dict
    first: Callable
    follow: Callable
    steps_read: int = 0


class Stepped:
    """Steps of SGD under a rule.

    The learning rate is one more than the number of steps that were taken, and the
    momentum is halved in each. So updates tell of every step that was skipped wrongly,
    or not skipped.
    """

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        inner = lenient(optax.sgd(lambda count: count + 1.0, momentum=decay))
        self.optimizer = ols.loss_scaled(inner, model.make(**model.settings))
        self.update = in_batches(
            lambda grads, state, accept, grads_finite: self.optimizer.update(
                grads, state, PARAMS, accept=accept, grads_finite=grads_finite
            )
        )
        self.next = functools.cache(lambda *state: model.follow(*state, model.settings))

    def first(self):
        state = self.optimizer.init(PARAMS)
        states = jax.tree.map(lambda leaf: np.asarray(leaf)[None], state)
        return states, (self.model.first(self.model.settings), 0.0)

    def apply(self, states, event):
        scales = states.loss_scale_state.loss_scale
        # Of the gradients of a bad step one is good.
        other = event.largest if math.isfinite(event.largest) else 1.0
        with np.errstate(invalid="ignore", over="ignore"):
            grads = np.asarray([event.largest, other], F32) * scales[:, None]
        verdicts = np.tile([event.accept, event.grads_finite], (len(scales), 1)).T
        updates, states = self.update(grads, states, *verdicts)
        return states, PARAMS + updates

    def follow(self, model, row, event):
        (rule_state, momentum), params, s = model, PARAMS, model[0].s
        _, _, in_a_row, total, steps = map(int, row[:5])
        taken = row[-1]
        is_overflow = not (math.isfinite(event.largest) and event.grads_finite)
        is_applied = event.accept and not is_overflow
        if is_overflow:
            rule_state = self.next(rule_state, math.inf, steps - total)
        elif is_applied:
            rule_state = self.next(rule_state, event.largest, steps - total)
        if is_applied:
            grads = (F32(event.largest) * F32(s)) * (F32(1.0) / F32(s))
            momentum = float(grads + F32(self.decay * momentum))
            params = params - F32(taken + 1.0) * F32(momentum)
            counts, taken = (1, 0, total, steps + 1), taken + 1
        else:
            counts = 0, in_a_row + 1, total + 1, steps + 1
        s, *carried = rule_state.numbers()
        expected = (s, *counts, *carried, momentum, momentum, taken, *params)
        return (rule_state, momentum), expected

    def merged(self, states):
        """With as many applied steps as the rule may read, and one that was skipped."""
        rule, leaves = states.loss_scale_state, jax.tree.leaves(states)
        applied = np.minimum(
            rule.step_count - rule.total_notfinite, self.model.steps_read
        )
        one = np.ones_like(applied)
        leaves[1:5] = one == 0, one, one, applied + one
        leaves[-1] = np.minimum(leaves[-1], 1)  # Of the schedule.
        return jax.tree.unflatten(jax.tree.structure(states), leaves)


def follow_dynamic(state, largest, applied, settings):
    del applied
    return stepwise.dynamic(state, math.isfinite(largest), settings)


def dynamic(interval, refill, *, growth=2.0, backoff=0.5, decay=0.5):
    settings = {
        "init_scale": 4.0, "growth_factor": growth, "backoff_factor": backoff,
        "growth_interval": interval, "min_scale": 0.5, "max_scale": 16.0,
        "hysteresis": 2, "hysteresis_refill": refill,
    }  # fmt: skip
    model = Model(
        ols.dynamic_loss_scale, settings, stepwise.first_dynamic, follow_dynamic
    )
    return Stepped(model, decay), [GOOD, *BAD, *REJECTED]


def headroom(history, margin):
    settings = {
        "init_scale": 4.0, "history": history, "recent": 2, "margin_bits": margin,
        "min_scale": 2.0**-4, "max_scale": 2.0**16,
    }  # fmt: skip
    first, follow = stepwise.first_headroom, stepwise.headroom
    model = Model(ols.headroom_loss_scale, settings, first, follow, steps_read=2)
    return Stepped(model, 0.0), [Event(3.0), *BAD[:2], REJECTED[0], ZERO]


CASES = {
    "dynamic": lambda: dynamic(3, "growth"),
    "headroom": lambda: headroom(2, 0.0),
    "other factors": lambda: dynamic(2, "finite", growth=1.5, backoff=0.7, decay=0.0),
    "headroom that fades by a third": lambda: headroom(3, 1.5),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_follow_their_definition_after_every_history(name):
    assert explore(*CASES[name](), length=12) > 100
