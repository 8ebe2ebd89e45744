"""Metrics for any logger, and the check that training has not stalled."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.history import states_after
from helpers.steps import eager_and_jitted

RULE = ols.dynamic_loss_scale(2.0**10)


def state_after(history, rule=RULE):
    if not history:
        return rule.init()
    states = states_after(rule, [step == "+" for step in history])
    return jax.tree.map(lambda leaf: leaf[-1], states)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("", [2.0**10, True, 0, 0, 0.0]),
        ("+-", [2.0**9, False, 1, 1, 0.5]),
        ("--+-++++", [2.0**7, True, 0, 3, 0.375]),
        ("---", [2.0**7, False, 3, 3, 1.0]),
    ],
)
def test_metrics_tell_the_scale_and_the_skipped_steps_and_become_json(
    history, expected
):
    opt_state = ols.LossScaledState(state_after(history), ())
    metrics = jax.jit(ols.loss_scale_metrics)(opt_state)
    names = ["loss_scale", "last_finite", "notfinite_count", "total_notfinite"]
    plain = json.loads(json.dumps(jax.tree.map(lambda x: x.tolist(), metrics)))
    assert plain == dict(zip([*names, "skip_rate"], expected, strict=True))


@eager_and_jitted
@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_the_norm_is_that_of_the_unscaled_gradients(run, dtype):
    grads = {"a": jnp.asarray([3.0, 0.0], dtype) * 1024, "b": jnp.asarray(4096.0)}
    grads |= {"i": jnp.arange(3), "n": None}
    metrics = run(lambda grads: ols.loss_scale_metrics(RULE.init(), grads=grads))
    assert metrics(grads)["grad_norm"] == 5.0
    assert metrics(grads)["grad_norm"].dtype == jnp.float32


def test_the_norm_of_bad_gradients_is_not_finite():
    for value in (np.nan, np.inf):
        metrics = ols.loss_scale_metrics(RULE.init(), grads=jnp.asarray([1.0, value]))
        assert not np.isfinite(metrics["grad_norm"])


def test_metrics_can_be_collected_by_a_scan():
    def step(state, finite):
        return RULE.adjust(state, finite), ols.loss_scale_metrics(state)

    _, metrics = jax.lax.scan(step, RULE.init(), jnp.asarray([True, False, False]))
    assert metrics["loss_scale"].tolist() == [1024.0, 1024.0, 512.0]
    assert metrics["total_notfinite"].tolist() == [0, 0, 1]


def test_a_stall_is_an_error_from_the_limit_on():
    ols.raise_if_stalled(state_after("+" + "-" * 49))
    message = r"the last 50 steps were skipped \(limit 50; 50 of 51 in all\).*the batch"
    with pytest.raises(ols.LossScaleStalledError, match=message):
        ols.raise_if_stalled(state_after("+" + "-" * 50))
    ols.raise_if_stalled(state_after("----+"), max_consecutive=3)
    ols.raise_if_stalled({"opt": state_after("--")}, max_consecutive=3)
    for history in ("---", "----"):
        with pytest.raises(ols.LossScaleStalledError, match=r"\(limit 3;"):
            ols.raise_if_stalled(state_after(history), max_consecutive=3)


def test_one_stalled_member_of_an_ensemble_is_enough():
    members = [state_after("---"), state_after("+++")]
    states = jax.tree.map(lambda *x: jnp.stack(x), *members)
    with pytest.raises(ols.LossScaleStalledError, match="the last 3 steps"):
        ols.raise_if_stalled(states, max_consecutive=3)


def test_a_scale_at_which_nothing_is_learnt_is_warned_of():
    state = state_after("-" * 40 + "+" * 50, ols.dynamic_loss_scale())
    with pytest.warns(UserWarning, match=r"5.96046e-08, at which most .* 40 of 90"):
        ols.raise_if_stalled(state)
    with warnings.catch_warnings(action="error"):
        ols.raise_if_stalled(state_after("-" * 38 + "+" * 60, ols.dynamic_loss_scale()))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: ols.raise_if_stalled(s, 0), ValueError, "must be at least 1"),
        (lambda s: ols.raise_if_stalled(s, 1.5), TypeError, "must be an integer"),
        (
            jax.jit(ols.raise_if_stalled),
            TypeError,
            "on the state that the step returns",
        ),
        (lambda s: ols.raise_if_stalled(()), ValueError, "got none"),
    ],
)
def test_what_cannot_be_watched_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(RULE.init())


def test_a_step_calls_nobody_on_the_host():
    tx = ols.loss_scaled(optax.sgd(0.1))
    params = jnp.ones(2)

    def step(grads, state):
        updates, state = tx.update(grads, state, params)
        return updates, ols.loss_scale_metrics(state, grads=grads)

    text = jax.jit(step).lower(params, tx.init(params)).as_text()
    assert "callback" not in text
