"""`docs/guides/logging.md`: metrics, and the check that training has not stalled."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam

RULE = ols.dynamic_loss_scale(2.0**10)


def state_after(history, rule=RULE):
    """The state after steps, of which + is an applied one."""
    state = rule.init()
    for step in history:
        state = rule.adjust(state, step == "+")
    return state


def stalled(in_a_row, steps):
    """The state after steps of which the last were skipped, in a row."""
    counts = {"notfinite_count": in_a_row, "total_notfinite": in_a_row}
    counts = jax.tree.map(jnp.int32, counts | {"step_count": steps})
    return RULE.init()._replace(**counts)


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


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_the_norm_is_that_of_the_unscaled_gradients(dtype):
    grads = {"a": jnp.asarray([3.0, 0.0], dtype) * 1024, "b": jnp.asarray(4096.0)}
    grads |= {"i": jnp.arange(3), "n": None}
    norm = ols.loss_scale_metrics(RULE.init(), grads=grads)["grad_norm"]
    assert (norm.dtype, float(norm)) == (jnp.float32, 5.0)


def test_the_norm_of_bad_gradients_is_not_finite():
    for value in (np.nan, np.inf):
        metrics = ols.loss_scale_metrics(RULE.init(), grads=jnp.asarray([1.0, value]))
        assert not np.isfinite(metrics["grad_norm"])


def test_a_stall_is_an_error_from_the_limit_on():
    ols.raise_if_stalled(stalled(49, 50))
    message = r"the last 50 steps were skipped \(limit 50; 50 of 51 in all\).*the batch"
    with pytest.raises(ols.LossScaleStalledError, match=message):
        ols.raise_if_stalled(stalled(50, 51))
    ols.raise_if_stalled({"opt": state_after("--")}, max_consecutive=3)
    for in_a_row in (3, 4):
        with pytest.raises(ols.LossScaleStalledError, match=r"\(limit 3;"):
            ols.raise_if_stalled(stalled(in_a_row, 10), max_consecutive=3)


def test_a_thousand_bad_steps_change_nothing_and_are_reported():
    # optax.apply_if_finite accepts a NaN after some of them.
    params, tx = jnp.ones(3), ols.loss_scaled(adam())
    first = tx.init(params)

    def step(state, _):
        return tx.update(params * jnp.nan, state, params)[::-1]

    state, updates = jax.lax.scan(step, first, length=1000)
    assert_same_bits(params + updates[-1], params)
    assert_same_bits(state.inner_state, first.inner_state)
    with pytest.raises(ols.LossScaleStalledError, match="1000 of 1000"):
        ols.raise_if_stalled(state)


def test_one_stalled_member_of_an_ensemble_is_enough():
    states = jax.tree.map(lambda *x: jnp.stack(x), stalled(3, 3), stalled(0, 3))
    with pytest.raises(ols.LossScaleStalledError, match="the last 3 steps"):
        ols.raise_if_stalled(states, max_consecutive=3)


def test_a_scale_at_which_nothing_is_learnt_is_warned_of():
    state = RULE.init()._replace(
        loss_scale=jnp.float32(2.0**-24),
        total_notfinite=jnp.int32(40),
        step_count=jnp.int32(90),
    )
    with pytest.warns(UserWarning, match=r"5.96046e-08, at which most .* 40 of 90"):
        ols.raise_if_stalled(state)
    with warnings.catch_warnings(action="error"):
        ols.raise_if_stalled(ols.set_loss_scale(state, 2.0**-22))


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
