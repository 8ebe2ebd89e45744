"""Metrics of a training loop, and the error and the warning for a run that stalls."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.compat import enable_x64
from helpers.inner import adam
from helpers.nodes import Twins
from helpers.steps import eager_and_jitted

RULE = ols.dynamic_loss_scale(1024.0)


def after(history, rule=RULE):
    state = rule.init()
    for finite in history:
        state = rule.adjust(state, finite)
    return state


def stacked(*states):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], [1024.0, True, 0, 0, 0.0]),
        ([False], [512.0, False, 1, 1, 1.0]),
        ([False, True, False, False], [128.0, False, 2, 3, 0.75]),
    ],
)
def test_metrics_count_the_skipped_steps_and_become_json(history, expected, x64):
    with enable_x64(x64):
        metrics = ols.loss_scale_metrics(after(history))
    kinds = {name: metrics[name].dtype.name for name in metrics}
    counts = dict.fromkeys(["notfinite_count", "total_notfinite"], "int32")
    floats = dict.fromkeys(["loss_scale", "skip_rate"], "float32")
    assert kinds == {"last_finite": "bool", **counts, **floats}
    text = json.dumps(jax.tree.map(lambda x: x.tolist(), metrics))
    names = "loss_scale", "last_finite", "notfinite_count", "total_notfinite"
    assert json.loads(text) == dict(zip([*names, "skip_rate"], expected, strict=True))


def test_raise_if_stalled_is_silent_below_the_limit():
    ols.raise_if_stalled(after([False] * 49))
    ols.raise_if_stalled(after([False] * 60 + [True]))


def test_raise_if_stalled_warns_of_a_scale_at_its_floor():
    """Batches that overflow at every scale bring it there, though most are applied."""
    ols.raise_if_stalled(after([False, True] * 39), max_consecutive=40)
    message = r"is 5.96046e-08, at .* 39 of 79 steps"
    with pytest.warns(UserWarning, match=message) as warnings:
        ols.raise_if_stalled(after([False, True] * 39 + [True]), max_consecutive=40)
    assert [warning.filename for warning in warnings] == [__file__]


def applied(scale, steps):
    state = ols.static_loss_scale(scale).init()
    return state._replace(step_count=jnp.int32(steps))


def test_raise_if_stalled_warns_of_a_member_at_its_floor_and_of_a_lower_one():
    members = applied(2.0**15, 60), applied(2.0**-24, 60)
    states = stacked(*members)
    for state in (states, applied(2.0**-30, 60)):
        with pytest.warns(UserWarning, match="at which float16 gradients are zero"):
            ols.raise_if_stalled(state)


def test_raise_if_stalled_says_nothing_of_a_scale_above_its_floor():
    state = ols.dynamic_loss_scale(2.0**-23).init()
    ols.raise_if_stalled(state._replace(step_count=jnp.int32(60)))


def test_raise_if_stalled_says_scale_counts_and_what_to_look_at():
    message = (
        r"the last 50 steps were skipped \(limit 50; 50 of 51 in all\), and the loss "
        r"scale is 5.96046e-08. \(Look for NaN and infinity in the batch"
    )
    with pytest.raises(ols.LossScaleStalledError, match=message):
        ols.raise_if_stalled(after([True] + [False] * 50))


def test_raise_if_stalled_looks_at_every_member_of_an_ensemble():
    members = [after([False, True, True]), after([False, False])]
    message = r"the last 2 steps .* 2 of 3 in all\), and the loss scale is 256\."
    for order in (members, members[::-1]):
        states = stacked(*order)
        with pytest.raises(ols.LossScaleStalledError, match=message):
            ols.raise_if_stalled(states, max_consecutive=1)


def test_metrics_have_an_entry_for_each_member_of_an_ensemble():
    members = after([False, True]), after([])
    states = stacked(*members)
    metrics = ols.loss_scale_metrics(states)
    assert metrics["skip_rate"].tolist() == [0.5, 0.0]
    assert metrics["loss_scale"].tolist() == [512.0, 1024.0]
    unscaled = jax.vmap(lambda _: ols.no_loss_scale().init())(jnp.arange(2))
    assert ols.loss_scale_metrics(unscaled)["loss_scale"].tolist() == [1.0, 1.0]


def test_raise_if_stalled_reads_a_state_beside_traced_arrays():
    def loss(rate):
        ols.raise_if_stalled({"rate": rate, "state": RULE.init()})
        return rate**2

    assert jax.grad(loss)(3.0) == 6.0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ols.raise_if_stalled(RULE.init(), 0), ValueError, "`max_consecutive`"),
        *(
            (lambda n=n: ols.raise_if_stalled(RULE.init(), n), TypeError, "an integer")
            for n in (True, 50.7, "50")
        ),
        (
            lambda: jax.jit(lambda state: ols.raise_if_stalled(state))(RULE.init()),
            TypeError,
            r"got traced ones, as inside `jit`.*returns",
        ),
        (lambda: ols.loss_scaled(warn_after=0), ValueError, "`warn_after` must be"),
        (lambda: ols.loss_scaled(warn_after=True), TypeError, "`warn_after` must be"),
    ],
)
def test_what_cannot_be_watched_for_a_stall_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@eager_and_jitted
def test_metrics_give_the_norm_of_the_unscaled_gradients(run):
    tx = ols.loss_scaled(adam(), RULE)
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    opt_state = tx.init(params)
    loss_fn = lambda p: 3 * p["w"][0] + 4 * p["w"][1] + 12 * p["b"]  # noqa: E731
    grads = ols.scaled_grad(loss_fn, opt_state)(params)
    metrics = run(lambda g: ols.loss_scale_metrics(opt_state, grads=g))(grads)
    assert metrics["grad_norm"].dtype == jnp.float32
    assert metrics["grad_norm"] == 13.0


@pytest.mark.parametrize(
    ("grads", "expected"),
    [
        (jnp.asarray([jnp.inf, 1.0]), jnp.inf),
        ({"w": jnp.full(1, 2048, jnp.float16), "n": jnp.arange(3), "f": None}, 2.0),
        (Twins(*(jnp.full(1, 1024.0) for _ in range(4))), 2.0),
        ([jnp.full(1, 1024.0 * (2 + 3j)), jnp.full(3, 1024.0)], 4.0),
        ({}, 0.0),
    ],
    ids=["overflow", "not floating", "leaves of one key", "complex", "none"],
)
def test_the_gradient_norm_counts_every_floating_leaf(grads, expected):
    assert ols.loss_scale_metrics(RULE.init(), grads=grads)["grad_norm"] == expected


def test_the_gradient_norm_is_computed_in_float32_or_wider():
    norm = lambda g: ols.loss_scale_metrics(RULE.init(), grads=g)["grad_norm"]  # noqa: E731
    # A TPU would round a product of matrices to bfloat16.
    assert "dot_general" not in str(jax.make_jaxpr(norm)(jnp.ones(3)))
    with enable_x64(True):
        assert float(norm(jnp.asarray([1024.0 * 2.0**130]))) == 2.0**130


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


OPTIMIZER = ols.loss_scaled(optax.sgd(0.1), RULE, warn_after=3)


def steps_of(history, opt_state, jit=jax.jit):
    update = jit(lambda grads, opt_state: OPTIMIZER.update(grads, opt_state)[1])
    for finite in history:
        opt_state = update(jnp.full(2, 1.0 if finite else jnp.nan), opt_state)
    return opt_state


def scanned(history, opt_state, returned):
    """The last state (0) or all scales (1): XLA computes only what leads to them."""

    def step(opt_state, finite):
        grads = jnp.where(finite, 1.0, jnp.full(2, jnp.nan))
        opt_state = OPTIMIZER.update(grads, opt_state)[1]
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
    run = lambda history: WAYS[way](history, OPTIMIZER.init(jnp.ones(2)))  # noqa: E731
    assert warnings_of(lambda: run([False, False, True, False, False])) == []
    assert warnings_of(lambda: run([False] * 5)) == [WARNING]


def test_warn_after_changes_nothing_else_and_works_where_transfers_are_forbidden():
    opt_state, bad = OPTIMIZER.init(jnp.ones(2)), jnp.full(2, jnp.nan)

    def run(tx):
        update = jax.jit(lambda opt_state: tx.update(bad, opt_state)[1])
        update(opt_state)  # Compiled before transfers are forbidden.
        with jax.transfer_guard("disallow"):
            return update(update(update(opt_state)))

    states = []
    assert warnings_of(lambda: states.append(run(OPTIMIZER))) == [WARNING]
    states.append(run(ols.loss_scaled(optax.sgd(0.1), RULE)))
    assert_same_bits(*states)


def test_warn_after_sees_one_member_of_an_ensemble():
    opt_state = jax.vmap(OPTIMIZER.init)(jnp.ones((2, 2)))
    grads = jnp.asarray([[1.0, 1.0], [1.0, jnp.nan]])
    update = jax.jit(jax.vmap(OPTIMIZER.update))

    def run(opt_state):
        for _ in range(5):
            _, opt_state = update(grads, opt_state)
        return opt_state

    assert warnings_of(lambda: run(opt_state)) == [WARNING]


def test_members_of_an_ensemble_are_warned_of_together_or_each_at_its_own_step():
    silent = ols.loss_scaled(optax.sgd(0.1), RULE)

    def run(first_bad, tx=OPTIMIZER):
        update = jax.jit(jax.vmap(tx.update))
        opt_state = jax.vmap(tx.init)(jnp.ones((2, 2)))
        for step in range(6):
            bad = step >= jnp.asarray(first_bad)
            grads = jnp.where(bad[:, None], jnp.nan, jnp.ones((2, 2)))
            _, opt_state = update(grads, opt_state)
        return opt_state

    assert warnings_of(lambda: run([0, 0])) == [WARNING]
    states = []
    assert len(warnings_of(lambda: states.append(run([0, 2])))) == 2
    assert_same_bits(*states, run([0, 2], silent))


def test_the_warning_shows_a_small_scale():
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(2.0**-24), warn_after=1)
    bad = jnp.full(2, jnp.nan)
    (message,) = warnings_of(lambda: jax.jit(tx.update)(bad, tx.init(bad)))
    assert "the loss scale is 5.96046e-08. (Look" in message


def test_a_step_with_nothing_to_say_does_not_call_the_host(monkeypatch):
    pure_callback, calls = jax.pure_callback, []

    def counting(function, *args, **kwargs):
        def counted(*arrays):
            calls.append(arrays)
            return function(*arrays)

        return pure_callback(counted, *args, **kwargs)

    monkeypatch.setattr(jax, "pure_callback", counting)
    history = [True, False, False, True, False, False, False, False]
    assert warnings_of(lambda: steps_of(history, OPTIMIZER.init(jnp.ones(2))))
    assert len(calls) == 1


@pytest.mark.parametrize("rule", [RULE, ols.no_loss_scale()])
def test_warn_after_counts_steps_that_are_not_accepted(rule):
    tx = ols.loss_scaled(optax.sgd(0.1), rule, warn_after=2)
    update = jax.jit(lambda state: tx.update(jnp.ones(2), state, accept=False)[1])
    first = tx.init(jnp.ones(2))
    (message,) = warnings_of(lambda: update(update(update(first))))
    assert message.startswith("the last 2 steps were skipped, and the loss scale is 1")


def test_metrics_compile_nothing_when_they_are_read_again(caplog):
    state, grads = RULE.init(), {"w": jnp.ones(2)}
    ols.loss_scale_metrics(state, grads=grads)
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(grads["w"])
        assert "Compiling" in caplog.text
        caplog.clear()
        ols.loss_scale_metrics(state, grads=grads)
    assert "Compiling" not in caplog.text


def test_every_metric_has_a_strong_type_also_of_no_gradients():
    for grads in ({}, {"w": jnp.ones(2)}):
        metrics = ols.loss_scale_metrics(RULE.init(), grads=grads)
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(metrics))


def test_warn_after_counts_steps_that_are_rejected_for_their_updates():
    tx = ols.loss_scaled(optax.sgd(jnp.inf), RULE, warn_after=2, check_updates=True)
    update = jax.jit(lambda state: tx.update(jnp.ones(2), state)[1])
    assert len(warnings_of(lambda: update(update(tx.init(jnp.ones(2)))))) == 1


def test_a_step_that_warns_can_be_differentiated_by_its_scale():
    tx = ols.loss_scaled(optax.sgd(1.0), RULE, warn_after=2)
    state, grads = tx.init(jnp.ones(())), jnp.float32(1024.0)

    def update_of(scale):
        scaled = state.loss_scale_state._replace(loss_scale=scale)
        updates, new = tx.update(grads, state._replace(loss_scale_state=scaled))
        return updates + new.loss_scale_state.loss_scale

    assert jax.grad(update_of)(jnp.float32(1024.0)) == 1 / 1024.0
