"""The rules, and the steps under them, after every history of twelve events.

The events are what can happen in a step, and to a run between two steps. After each,
every number of the state is compared with `stepwise`, which was written from the
definitions; `model_checking` says how all histories can be tried.

States that differ only in counts of steps are merged. The counts themselves are
compared after every event. That nothing else depends on them is compared too: each
event is also applied to the same state with larger counts.
"""

import functools
import itertools
import json
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
from optax_lossscale._scaling import headroom

LENGTH = 12
F32 = np.float32
SMALLEST, LARGEST = 2.0**-126, 2.0**126


class Gradients(NamedTuple):
    """A step; `largest` is the largest magnitude of its true gradients."""

    largest: float
    accept: bool = True
    grads_finite: bool = True
    factor: float = 1.0  # By which the updates are multiplied.

    def __str__(self):
        usual = Gradients(self.largest)
        return ", ".join(
            f"{name} {value}"
            for name, value in self._asdict().items()
            if name == "largest" or value != getattr(usual, name)
        )


class Restored(NamedTuple):
    """A checkpoint, from which the run goes on under the same or the other rule."""

    is_other: bool

    def __str__(self):
        return "restored" + " under the other rule" * self.is_other


class Damaged(NamedTuple):
    """A loss scale that cannot be used."""

    loss_scale: float

    def __str__(self):
        return f"loss scale {self.loss_scale}"


RESTORED = [Restored(is_other=False), Restored(is_other=True)]
BAD = [Gradients(math.inf), Gradients(math.nan), Gradients(1.0, grads_finite=False)]
REJECTED = [Gradients(1.0, accept=False), Gradients(math.inf, accept=False)]
UPDATES = [Gradients(1.0, factor=math.inf), Gradients(math.inf, factor=math.inf)]
DAMAGED = [
    Damaged(value)
    for value in (0.0, -8.0, math.nan, math.inf, -math.inf, 2.0**127, 2.0**-149)
]


def checkpointed(states, dtype=None):
    """What JSON makes of many states; with a dtype, of all their numbers."""

    def restore(leaf):
        restored = np.asarray(json.loads(json.dumps(leaf.tolist())))
        return restored.astype(leaf.dtype if dtype is None else dtype)

    return jax.tree.map(restore, states)


def with_larger_counts(states, smallest=0):
    """Larger counts of a `LossScaleState`, and another last verdict.

    More steps were applied only where a number of them were applied already.
    """
    was_applied = states.step_count - states.total_notfinite >= smallest
    step_count = states.step_count + 900 + 900 * was_applied
    return states._replace(
        last_finite=(states.last_finite == 0).astype(states.last_finite.dtype),
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


class Adjusted:
    """`adjust` of one dynamic rule or another, called by hand."""

    counters = (1, 2, 3, 4)

    def __init__(self, *settings, merges_counts=True):
        self.settings, self.merges_counts = settings, merges_counts
        self.rules = [_rule(tuple(each.items())) for each in settings]

    def first(self):
        rule, _ = self.rules[0]
        return 0, rule.init(), stepwise.first_dynamic(self.settings[0])

    def apply(self, mode, states, event):
        if isinstance(event, Restored):
            return mode ^ event.is_other, After(checkpointed(states))
        _, adjust = self.rules[mode]
        return mode, After(adjust(states, np.full(len(states.loss_scale), event)))

    def follow(self, mode, model, counts, event):
        if isinstance(event, Restored):
            return model, (model.s, *counts, model.n, model.h)
        model = stepwise.dynamic(model, event, self.settings[mode])
        return model, (model.s, *counted(event, counts), model.n, model.h)

    def class_of(self, counts):
        return None if self.merges_counts else counts

    def with_larger_counts(self, states):
        return with_larger_counts(states)


@functools.cache
def _rule(settings):
    """A dynamic rule, and its `adjust`, compiled once for all pairs of rules."""
    rule = ols.dynamic_loss_scale(**dict(settings))
    return rule, in_batches(rule.adjust)


class Stepped:
    """Steps of SGD under one rule or another.

    The learning rate is one more than the number of steps that were taken, and the
    momentum is halved in each. So updates tell of every step that was skipped wrongly,
    or not skipped.

    A mode says under which rule the run is, and whether it was just restored.
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
            return tx.update(
                grads,
                state,
                self.params,
                accept=accept,
                grads_finite=grads_finite,
                **extra_args,
            )

        return update

    def first(self):
        first = self.model.first(self.settings[0])
        return (0, False), self.optimizers[0].init(self.params), (first, 0.0)

    def apply(self, mode, states, event):
        number, _ = mode
        scales = states.loss_scale_state.loss_scale
        params = np.tile(self.params, (len(scales), 1))
        if isinstance(event, Restored):
            # Some checkpoints have one dtype for all numbers, counts and bools too.
            restored = checkpointed(states, F32)
            return (number ^ event.is_other, True), After(restored, params)
        if isinstance(event, Damaged):
            damaged = states.loss_scale_state._replace(
                loss_scale=np.full_like(scales, event.loss_scale)
            )
            return mode, After(states._replace(loss_scale_state=damaged), params)
        # Of the gradients of a bad step one is good.
        other = event.largest if math.isfinite(event.largest) else 1.0
        true = np.asarray([event.largest, other], F32)
        with np.errstate(invalid="ignore", over="ignore"):
            grads = true * scales[:, None]
        arguments = event.accept, event.grads_finite, F32(event.factor)
        arguments = [np.full(len(scales), each) for each in arguments]
        updates, states = self.update[number](grads, states, *arguments)
        return (number, False), After(states, params + updates)

    def follow(self, mode, model, counts, event):
        (rule_state, momentum), params = model, self.params
        *counts, taken = counts
        if isinstance(event, Damaged):
            rule_state = rule_state._replace(s=event.loss_scale)
        elif isinstance(event, Gradients):
            s = rule_state.s
            is_usable = SMALLEST <= s <= LARGEST
            is_overflow = not (math.isfinite(event.largest) and event.grads_finite)
            is_rejected = not (event.accept and math.isfinite(event.factor))
            is_applied = is_usable and not is_overflow and not is_rejected
            if is_applied:
                grads = (F32(event.largest) * F32(s)) * (F32(1.0) / F32(s))
                momentum = float(grads + F32(self.decay * momentum))
                params = params - F32(taken + 1.0) * F32(momentum)
                taken += 1
            if not is_usable:
                first = self.settings[mode[0]]["init_scale"]
                rule_state = rule_state._replace(s=first)
            applied = self.class_of(counts)
            if not is_usable or is_overflow:
                rule_state = self.next(mode[0], rule_state, math.inf, applied)
            elif not is_rejected:
                rule_state = self.next(mode[0], rule_state, event.largest, applied)
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


# Both bounds are reached within a few steps. The first are those of all scales.
RANGES = [
    {"init_scale": 2.0**125, "min_scale": 2.0**123, "max_scale": 2.0**126},
    {"init_scale": 2.0**-125, "min_scale": 2.0**-126, "max_scale": 2.0**-124},
    {"growth_factor": 4.0, "backoff_factor": 0.25},
    # Neither bound is a power of the factors away.
    {"growth_factor": 3.0, "backoff_factor": 0.5, "min_scale": 0.7, "max_scale": 20.0},
    {"growth_factor": 1.5, "backoff_factor": 0.7, "min_scale": 2.0, "max_scale": 9.0},
    # The first scale is below, or above, both bounds.
    {"init_scale": 0.25},
    {"init_scale": 64.0},
]
RULES = [
    dynamic_settings(interval, hysteresis, refill, **others)
    for (interval, hysteresis, refill), others in zip(
        itertools.product((1, 2, 3), (1, 2), ("finite", "growth")),
        itertools.cycle([{}, *RANGES]),
        strict=False,
    )
]


def explored_rules(**options):
    for i, settings in enumerate(RULES):
        other = RULES[(i + 5) % len(RULES)]
        machine = Adjusted(settings, other, **options)
        yield explore(machine, [True, False, *RESTORED], LENGTH)


def test_a_difference_is_reported_with_a_shortest_history_that_leads_to_it():
    settings = dynamic_settings(3, 1, "finite")
    machine = Adjusted(settings, settings)
    machine.settings = [settings | {"growth_interval": 4}] * 2
    message = r"^after True; True; True:\n  .state.loss_scale: 8.0 instead of 4.0\n"
    with pytest.raises(AssertionError, match=message):
        explore(machine, [False, *RESTORED, True], LENGTH)


def test_adjust_follows_the_definition_of_the_dynamic_rule_after_every_history():
    assert sum(explored.states for explored in explored_rules()) > 1000


@pytest.mark.slow
def test_so_it_does_if_only_states_of_equal_counts_are_merged():
    explored = explored_rules(merges_counts=False)
    assert sum(each.states for each in explored) > 50_000


@functools.cache
def machine(name):
    """Steps under two rules, compiled once for all tests."""
    return {
        "doubling": lambda: Stepped(
            DYNAMIC,
            dynamic_settings(3, 2, "growth"),
            dynamic_settings(1, 1, "finite", max_scale=8.0),
        ),
        "other factors, checked updates": lambda: Stepped(
            DYNAMIC,
            dynamic_settings(2, 2, "finite", growth_factor=1.5, backoff_factor=0.7),
            dynamic_settings(2, 1, "growth", growth_factor=3.0),
            decay=0.0,
            check_updates=True,
        ),
        "headroom": lambda: headroom_steps(history=2, recent=2),
        "headroom of one step": lambda: headroom_steps(history=1, recent=1),
        "headroom that fades by a third": lambda: headroom_steps(history=3, recent=2),
    }[name]()


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


GOOD = Gradients(1.0)
EVENTS = [GOOD, *BAD, *REJECTED, *RESTORED]
FEWER = [Gradients(3.0), *BAD[:2], REJECTED[0], *RESTORED]
ZERO = Gradients(0.0)
CASES = {
    "doubling": EVENTS,
    "other factors, checked updates": [*EVENTS, *UPDATES],
    "headroom": [*FEWER, ZERO],
}
LONG_CASES = {
    "headroom of one step": [*EVENTS, ZERO, Gradients(2.0**-6), Gradients(3.0)],
    "headroom that fades by a third": [*FEWER, ZERO],
}


@pytest.mark.parametrize(
    ("name", "events"),
    [
        *CASES.items(),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG_CASES.items()),
        pytest.param("headroom", [*FEWER, GOOD, ZERO], marks=pytest.mark.slow),
    ],
    ids=[*CASES, *LONG_CASES, "headroom, more sizes"],
)
def test_steps_follow_their_definition_after_every_history(name, events):
    explored = explore(machine(name), events, LENGTH)
    assert explored.histories > 5**LENGTH
    assert explored.states > 1000


@pytest.mark.slow
def test_so_do_steps_of_the_headroom_rule_that_is_quiet_long_before_it_forgets(
    monkeypatch,
):
    # So it is after 32 steps, with more than 32 recent magnitudes.
    for module in (headroom, stepwise):
        monkeypatch.setattr(module, "_QUIET_STEPS", 1)
    steps = headroom_steps(history=2, recent=2)
    assert explore(steps, CASES["headroom"], LENGTH).states > 1000


@pytest.mark.parametrize("name", ["doubling", "headroom"])
def test_an_unusable_scale_skips_one_step_and_the_rule_restarts_after_every_history(
    name,
):
    events = [GOOD, BAD[0], REJECTED[0], *RESTORED, *DAMAGED]
    explored = explore(machine(name), events, LENGTH)
    assert explored.states > 1000
