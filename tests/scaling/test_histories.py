"""The rules, and the steps under them, after every history of twelve events.

The events are what can happen in a step, and a change of the rule's settings between
two steps. After each, every number of the state is compared with `stepwise`, which was
written from the definitions; `model_checking` says how all histories can be tried.
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
from helpers.model_checking import After, explore, in_batches

LENGTH = 12
F32 = np.float32


class Gradients(NamedTuple):
    """A step; `largest` is the largest magnitude of its true gradients."""

    largest: float
    accept: bool = True
    grads_finite: bool = True
    factor: float = 1.0  # By which the updates are multiplied.


class Changed(NamedTuple):
    """The run goes on under the other rule."""


GOOD, ZERO = Gradients(1.0), Gradients(0.0)
BAD = [Gradients(math.inf), Gradients(math.nan), Gradients(1.0, grads_finite=False)]
REJECTED = [Gradients(1.0, accept=False), Gradients(math.inf, accept=False)]
UPDATES = [Gradients(1.0, factor=math.inf), Gradients(math.inf, factor=math.inf)]


def with_larger_counts(states, smallest=0):
    """Larger counts of a `LossScaleState`, and another last verdict.

    More steps were applied only where a number of them were applied already.
    """
    was_applied = states.step_count - states.total_notfinite >= smallest
    step_count = states.step_count + 900 + 900 * was_applied
    return states._replace(
        last_finite=~states.last_finite,
        notfinite_count=states.notfinite_count + 900,
        total_notfinite=states.total_notfinite + 900,
        step_count=step_count.astype(states.step_count.dtype),
    )


def counted(is_applied, counts):
    """The four fields of a `LossScaleState` that count steps, after one more."""
    _, in_a_row, total, steps = counts
    if is_applied:
        return 1, 0, total, steps + 1
    return 0, in_a_row + 1, total + 1, steps + 1


class Stepped:
    """Steps of SGD under one rule or another; a mode says under which the run is.

    The learning rate is one more than the number of steps that were taken, and the
    momentum is halved in each. So updates tell of every step that was skipped wrongly,
    or not skipped.
    """

    params = np.asarray([1.0, -0.0], F32)

    def __init__(self, model, *settings, decay=0.5, check_updates=False):
        self.model, self.settings = model, settings
        self.decay, self.check_updates = decay, check_updates
        inner = optax.sgd(lambda count: count + 1.0, momentum=decay)
        if check_updates:
            inner = optax.chain(inner, MULTIPLIED)
        self.optimizers = [
            ols.loss_scaled(
                lenient(inner), model.make(**each), check_updates=check_updates
            )
            for each in settings
        ]
        self.update = [in_batches(self.updated(tx)) for tx in self.optimizers]
        leaves = jax.tree.leaves(jax.eval_shape(self.optimizers[0].init, self.params))
        # Those of the loss scale, and of the schedule, which is the last.
        self.counters = (1, 2, 3, 4, sum(leaf.size for leaf in leaves) - 1)
        self.next = functools.cache(
            lambda number, *state: model.follow(*state, settings[number])
        )

    def updated(self, tx):
        def update(grads, state, accept, grads_finite, factor):
            extra_args = {"factor": factor} if self.check_updates else {}
            verdicts = {"accept": accept, "grads_finite": grads_finite}
            return tx.update(grads, state, self.params, **verdicts, **extra_args)

        return update

    def first(self):
        first = self.model.first(self.settings[0])
        return 0, self.optimizers[0].init(self.params), (first, 0.0)

    def apply(self, mode, states, event):
        scales = states.loss_scale_state.loss_scale
        params = np.tile(self.params, (len(scales), 1))
        if isinstance(event, Changed):
            return 1 - mode, After(states, params)
        # Of the gradients of a bad step one is good.
        other = event.largest if math.isfinite(event.largest) else 1.0
        true = np.asarray([event.largest, other], F32)
        with np.errstate(invalid="ignore", over="ignore"):
            grads = true * scales[:, None]
        arguments = event.accept, event.grads_finite, F32(event.factor)
        arguments = [np.full(len(scales), each) for each in arguments]
        updates, states = self.update[mode](grads, states, *arguments)
        return mode, After(states, params + updates)

    def follow(self, mode, model, counts, event):
        (rule_state, momentum), params = model, self.params
        *counts, taken = counts
        if isinstance(event, Gradients):
            s, applied = rule_state.s, self.class_of(counts)
            is_overflow = not (math.isfinite(event.largest) and event.grads_finite)
            is_rejected = not (event.accept and math.isfinite(event.factor))
            is_applied = not is_overflow and not is_rejected
            if is_applied:
                grads = (F32(event.largest) * F32(s)) * (F32(1.0) / F32(s))
                momentum = float(grads + F32(self.decay * momentum))
                params = params - F32(taken + 1.0) * F32(momentum)
                taken += 1
            if is_overflow:
                rule_state = self.next(mode, rule_state, math.inf, applied)
            elif not is_rejected:
                rule_state = self.next(mode, rule_state, event.largest, applied)
            counts = counted(is_applied, counts)
        s, *carried = rule_state.numbers()
        row = (s, *counts, *carried, momentum, momentum, taken, *params)
        return (rule_state, momentum), row

    def class_of(self, counts):
        _, _, total_notfinite, step_count, *_ = counts
        return min(step_count - total_notfinite, self.model.steps_read)

    def with_larger_counts(self, states):
        larger = with_larger_counts(states.loss_scale_state, self.model.steps_read)
        return states._replace(loss_scale_state=larger)


def _multiply(updates, state, params=None, *, factor):
    del params
    return jax.tree.map(lambda update: update * factor, updates), state


MULTIPLIED = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), _multiply
)


class Model(NamedTuple):
    """A rule, and its first state and next one as `stepwise` has them.

    It may read how many steps were applied, up to `steps_read`.
    """

    make: Callable
    first: Callable
    follow: Callable
    steps_read: int = 0


def follow_dynamic(state, largest, applied, settings):
    del applied
    return stepwise.dynamic(state, math.isfinite(largest), settings)


DYNAMIC = Model(ols.dynamic_loss_scale, stepwise.first_dynamic, follow_dynamic)


def dynamic_settings(interval, hysteresis, refill, **others):
    return {
        "init_scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
        "min_scale": 0.5,
        "max_scale": 16.0,
        "hysteresis": hysteresis,
        "hysteresis_refill": refill,
    } | others


def headroom_steps(**sizes):
    first = {
        "init_scale": 4.0,
        "margin_bits": 0.0,
        "min_scale": 2.0**-4,
        "max_scale": 2.0**16,
    } | sizes
    other = first | {"margin_bits": 1.5, "min_scale": 4.0, "max_scale": 2.0**8}
    model = Model(
        ols.headroom_loss_scale,
        stepwise.first_headroom,
        stepwise.headroom,
        steps_read=sizes["recent"],
    )
    return Stepped(model, first, other, decay=0.0)


EVENTS = [GOOD, *BAD, *REJECTED, Changed()]
FEWER = [Gradients(3.0), *BAD[:2], REJECTED[0], ZERO, Changed()]
CASES = {
    "doubling": (
        lambda: Stepped(
            DYNAMIC,
            dynamic_settings(3, 2, "growth"),
            dynamic_settings(1, 2, "finite", max_scale=8.0),
        ),
        EVENTS,
    ),
    "other factors, checked updates": (
        lambda: Stepped(
            DYNAMIC,
            dynamic_settings(2, 2, "finite", growth_factor=1.5, backoff_factor=0.7),
            dynamic_settings(2, 2, "growth", growth_factor=3.0),
            decay=0.0,
            check_updates=True,
        ),
        [*EVENTS, *UPDATES],
    ),
    "headroom": (lambda: headroom_steps(history=2, recent=2), FEWER),
    "headroom that fades by a third": (
        lambda: headroom_steps(history=3, recent=2),
        FEWER,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "doubling",
        "headroom",
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*CASES][1::2]),
    ],
)
def test_steps_follow_their_definition_after_every_history(name):
    machine, events = CASES[name]
    explored = explore(machine(), events, LENGTH)
    assert explored.histories > 5**LENGTH
    assert explored.states > 500
