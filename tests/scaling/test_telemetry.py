"""Metrics of a training loop, and the error and the warning for a run that stalls."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compat import enable_x64
from helpers.inner import adam
from helpers.nodes import Twins

RULE = ols.dynamic_loss_scale(1024.0)


def after(history, rule=RULE):
    state = rule.init()
    for finite in history:
        state = rule.adjust(state, finite)
    return state


def test_metrics_before_the_first_step_show_the_initial_scale():
    metrics = ols.loss_scale_metrics(RULE.init())
    assert {name: value.item() for name, value in metrics.items()} == {
        "loss_scale": 1024.0,
        "last_finite": True,
        "notfinite_count": 0,
        "total_notfinite": 0,
        "skip_rate": 0.0,
    }


def test_metrics_after_some_steps_count_the_skipped_ones():
    metrics = ols.loss_scale_metrics(after([False, True, False, False]))
    assert {name: value.item() for name, value in metrics.items()} == {
        "loss_scale": 128.0,
        "last_finite": False,
        "notfinite_count": 2,
        "total_notfinite": 3,
        "skip_rate": 0.75,
    }


def test_the_skip_rate_is_one_in_float32_when_the_only_step_was_skipped():
    with enable_x64(True):
        rate = ols.loss_scale_metrics(after([False]))["skip_rate"]
    assert (rate, rate.dtype) == (1.0, jnp.float32)


def test_metrics_can_be_stacked_by_scan():
    def step(state, finite):
        state = RULE.adjust(state, finite)
        return state, ols.loss_scale_metrics(state)

    _, history = jax.lax.scan(step, RULE.init(), jnp.asarray([True, False]))
    assert history["loss_scale"].tolist() == [1024.0, 512.0]
    assert history["skip_rate"].tolist() == [0.0, 0.5]


def test_metrics_can_be_read_from_an_optimizer_state():
    opt_state = ols.loss_scaled(adam(), RULE).init(jnp.ones(2))
    assert ols.loss_scale_metrics(opt_state)["loss_scale"] == 1024.0


def test_raise_if_stalled_is_silent_below_the_limit():
    ols.raise_if_stalled(after([False] * 49))
    ols.raise_if_stalled(after([False] * 60 + [True]))


def test_raise_if_stalled_warns_of_a_scale_at_its_floor():
    """Batches that overflow at every scale bring it there, though most are applied."""
    ols.raise_if_stalled(after([False, True] * 39), max_consecutive=40)
    with pytest.warns(UserWarning, match=r"is 5.96046e-08, at .* 39 of 79 steps"):
        ols.raise_if_stalled(after([False, True] * 39 + [True]), max_consecutive=40)


def test_raise_if_stalled_says_scale_counts_and_what_to_look_at():
    message = (
        r"the last 50 steps were skipped \(limit 50; 50 of 51 in all\), and the loss "
        r"scale is 5.96046e-08. \(Look for NaN and infinity in the batch"
    )
    with pytest.raises(ols.LossScaleStalledError, match=message):
        ols.raise_if_stalled(after([True] + [False] * 50))


def test_raise_if_stalled_looks_at_every_member_of_an_ensemble():
    states = jax.tree.map(lambda *x: jnp.stack(x), after([True]), after([False]))
    with pytest.raises(ols.LossScaleStalledError, match="last 1 steps"):
        ols.raise_if_stalled(states, max_consecutive=1)


@pytest.mark.parametrize("limit", [0, -1])
def test_raise_if_stalled_refuses_a_limit_below_one(limit):
    with pytest.raises(ValueError, match=r"`max_consecutive` must be at least 1"):
        ols.raise_if_stalled(RULE.init(), limit)


def numbers(state):
    """A state as JSON or msgpack restores it: numbers of Python."""
    return jax.tree.map(lambda leaf: leaf.item(), state)


def unsigned(leaf):
    return leaf.astype(jnp.uint16) if leaf.dtype == jnp.int32 else leaf


RESTORED = {
    "Python": numbers,
    "NumPy": lambda state: jax.tree.map(lambda leaf: leaf.dtype.type(leaf), state),
    "NumPy, 64 bits": lambda state: jax.tree.map(np.asarray, numbers(state)),
    "float": lambda state: jax.tree.map(float, state),
    "JAX, float": lambda state: jax.tree.map(lambda leaf: leaf.astype(float), state),
    "JAX, unsigned": lambda state: jax.tree.map(unsigned, state),
}


@pytest.mark.parametrize("kind", RESTORED)
def test_metrics_of_a_state_restored_as_numbers_are_those_of_its_arrays(kind):
    state = after([False, True, False])
    metrics = ols.loss_scale_metrics(RESTORED[kind](state))
    assert_same_bits(metrics, ols.loss_scale_metrics(state))
    assert metrics["skip_rate"] == jnp.float32(2 / 3)


@pytest.mark.parametrize("kind", RESTORED)
def test_raise_if_stalled_reads_a_state_restored_as_numbers(kind):
    state = RESTORED[kind](after([False, False]))
    ols.raise_if_stalled(state, max_consecutive=3)
    with pytest.raises(ols.LossScaleStalledError, match=r"the last 2 steps .* is 256"):
        ols.raise_if_stalled(state, max_consecutive=2)


@pytest.mark.fast_every(4)
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("kind", RESTORED)
def test_a_run_goes_on_with_the_same_types_from_a_state_of_numbers(kind, is_jitted):
    tx = ols.loss_scaled(optax.sgd(0.1), RULE)
    params = jnp.ones(2)
    update = jax.jit(tx.update) if is_jitted else tx.update
    state = tx.init(params)._replace(loss_scale_state=after([False, True]))
    restored = state._replace(loss_scale_state=RESTORED[kind](after([False, True])))
    expected, actual = (update(params, s, params)[1] for s in (state, restored))
    assert_same_bits(actual, expected)
    assert types(actual) == types(expected)
    scaled = ols.scale(2.0, restored)
    assert (scaled, scaled.dtype) == (1024.0, jnp.float32)


def test_metrics_of_no_loss_scale_show_the_scale_that_is_used():
    state = ols.no_loss_scale().init()._replace(loss_scale=jnp.float32(jnp.nan))
    assert ols.loss_scale_metrics(state)["loss_scale"] == ols.get_loss_scale(state) == 1


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_metrics_give_the_norm_of_the_unscaled_gradients(jit):
    tx = ols.loss_scaled(adam(), RULE)
    params = {"w": jnp.zeros(2), "b": jnp.zeros(()), "steps": jnp.arange(2)}
    opt_state = tx.init({"w": params["w"], "b": params["b"]})
    loss_fn = lambda p: 3 * p["w"][0] + 4 * p["w"][1] + 12 * p["b"]  # noqa: E731
    grads = ols.scaled_grad(loss_fn, opt_state)(params)
    metrics = jit(lambda g: ols.loss_scale_metrics(opt_state, grads=g))(grads)
    assert metrics["grad_norm"].dtype == jnp.float32
    assert metrics["grad_norm"] == 13.0


def test_the_gradient_norm_of_an_overflow_is_not_finite():
    metrics = ols.loss_scale_metrics(RULE.init(), grads=jnp.asarray([jnp.inf, 1.0]))
    assert metrics["grad_norm"] == jnp.inf


def test_the_gradient_norm_leaves_out_what_is_no_floating_array():
    grads = {"w": jnp.full(1, 2048.0, jnp.float16), "n": jnp.arange(3), "f": None}
    assert ols.loss_scale_metrics(RULE.init(), grads=grads)["grad_norm"] == 2.0


def test_metrics_become_json_by_the_documented_call():
    metrics = ols.loss_scale_metrics(after([True, False]))
    text = json.dumps(jax.tree.map(lambda x: x.tolist(), metrics))
    assert json.loads(text) == {
        "loss_scale": 512.0,
        "last_finite": False,
        "notfinite_count": 1,
        "total_notfinite": 1,
        "skip_rate": 0.5,
    }


def test_raise_if_stalled_inside_jit_says_where_to_call_it():
    with pytest.raises(TypeError, match=r"got traced ones, as inside `jit`.*returns"):
        jax.jit(lambda state: ols.raise_if_stalled(state))(RULE.init())


def test_the_gradient_norm_counts_every_leaf_of_a_node_that_gives_all_one_key():
    grads = Twins(*(jnp.full(1, 1024.0) for _ in range(4)))
    assert ols.loss_scale_metrics(RULE.init(), grads=grads)["grad_norm"] == 2.0
    assert len(ols.diagnostics.nonfinite_report(grads)) == 4


WARNING = (
    "the last 3 steps were skipped, and the loss scale is 128. (Look for NaN and "
    "infinity in the batch, the parameters and the loss, and for numbers above 65504 "
    "inside the model, which no scale can prevent: "
    "`ols.diagnostics.trace_operations` names the operation. Check the learning rate. "
    "If you pass `accept`, it may refuse every step.)"
)


def warnings_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(run())
    return [str(warning.message) for warning in caught]


def steps_of(history, tx, opt_state, jit=jax.jit):
    update = jit(lambda grads, opt_state: tx.update(grads, opt_state)[1])
    for finite in history:
        opt_state = update(jnp.full(2, 1.0 if finite else jnp.nan), opt_state)
    return opt_state


def scanned(history, tx, opt_state, returned):
    """The last state (0) or all scales (1): XLA computes only what leads to them."""

    def step(opt_state, finite):
        grads = jnp.where(finite, 1.0, jnp.full(2, jnp.nan))
        opt_state = tx.update(grads, opt_state)[1]
        return opt_state, ols.get_loss_scale(opt_state)

    return jax.jit(lambda *args: jax.lax.scan(step, *args)[returned])(
        opt_state, jnp.asarray(history)
    )


WAYS = {
    "jit": steps_of,
    "eager": lambda *args: steps_of(*args, jit=lambda f: f),
    "scan": functools.partial(scanned, returned=0),
    "scales": functools.partial(scanned, returned=1),
}


@pytest.mark.parametrize("way", WAYS)
def test_warn_after_warns_once_in_the_step_that_completes_the_row(way):
    tx = ols.loss_scaled(optax.sgd(0.1), RULE, warn_after=3)
    run = lambda history: WAYS[way](history, tx, tx.init(jnp.ones(2)))  # noqa: E731
    assert warnings_of(lambda: run([False, False, True, False, False])) == []
    assert warnings_of(lambda: run([False] * 8)) == [WARNING]


def test_warn_after_works_where_transfers_are_forbidden():
    tx = ols.loss_scaled(optax.sgd(0.1), RULE, warn_after=3)
    opt_state, grads = tx.init(jnp.ones(2)), jnp.full(2, jnp.nan)
    update = jax.jit(lambda opt_state: tx.update(grads, opt_state)[1])

    def run(opt_state):
        with jax.transfer_guard("disallow"):
            for _ in range(4):
                opt_state = update(opt_state)
        return opt_state

    update(opt_state)  # Compiled before transfers are forbidden.
    assert warnings_of(lambda: run(opt_state)) == [WARNING]


def test_warn_after_changes_nothing_else():
    tx = ols.loss_scaled(optax.sgd(0.1), RULE)
    warning = ols.loss_scaled(optax.sgd(0.1), RULE, warn_after=2)
    history = [True, False, False, False, True]
    opt_state = tx.init(jnp.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = [steps_of(history, each, opt_state) for each in (tx, warning)]
    assert_same_bits(*states)


def test_warn_after_sees_one_member_of_an_ensemble():
    tx = ols.loss_scaled(optax.sgd(0.1), RULE, warn_after=3)
    opt_state = jax.vmap(tx.init)(jnp.ones((2, 2)))
    grads = jnp.asarray([[1.0, 1.0], [1.0, jnp.nan]])

    def run(opt_state):
        for _ in range(5):
            _, opt_state = jax.jit(jax.vmap(tx.update))(grads, opt_state)
        return opt_state

    assert warnings_of(lambda: run(opt_state)) == [WARNING]


@pytest.mark.parametrize("rule", [RULE, ols.no_loss_scale()])
def test_warn_after_counts_steps_that_are_not_accepted(rule):
    tx = ols.loss_scaled(optax.sgd(0.1), rule, warn_after=2)

    def run(opt_state):
        for _ in range(3):
            _, opt_state = tx.update(jnp.ones(2), opt_state, accept=False)
        return opt_state

    (message,) = warnings_of(lambda: run(tx.init(jnp.ones(2))))
    assert message.startswith("the last 2 steps were skipped, and the loss scale is 1")


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError)])
def test_warn_after_must_be_a_number_of_steps(value, error):
    with pytest.raises(error, match="`warn_after` must be"):
        ols.loss_scaled(optax.sgd(0.1), warn_after=value)
