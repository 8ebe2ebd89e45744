"""What works under `jax_transfer_guard="disallow"`, which big_vision sets.

JAX then refuses numbers of Python in operations outside `jit`, such as `x + 1`, and so
what Optax itself does there: `optax.adam(1e-3).init(params)`, and every `update`.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.inner import adam

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
RULES = {
    "dynamic": ols.dynamic_loss_scale(8.0),
    "scheduled": ols.dynamic_loss_scale(8.0, min_scale=lambda step: 1.0),
    "static": ols.static_loss_scale(8.0),
    "headroom": ols.headroom_loss_scale(8.0),
    "none": ols.no_loss_scale(),
    "apex": ols.presets.apex(8.0),
}
of_all_rules = pytest.mark.parametrize("name", RULES)


def refuses(function, *args):
    try:
        with jax.transfer_guard("disallow"):
            function(*args)
    except jax.errors.JaxRuntimeError as error:
        return "Disallowed host-to-device transfer" in str(error)
    return False


READERS = {
    "loss_scale_metrics": ols.loss_scale_metrics,
    "the norm": lambda state: ols.loss_scale_metrics(state, grads=GRADS),
    "get_loss_scale": ols.get_loss_scale,
    "raise_if_stalled": ols.raise_if_stalled,
    "where_applied": lambda state: ols.where_applied(state, PARAMS, GRADS),
    "scale": lambda state: ols.scale(GRADS, state),
    "unscale": lambda state: ols.unscale(GRADS, state),
    "all_finite": lambda _: ols.all_finite(GRADS),
    "max_magnitude": lambda _: ols.max_magnitude(GRADS),
}


@of_all_rules
@pytest.mark.parametrize("reader", READERS)
def test_what_reads_a_state_outside_jit_sends_nothing(reader, name):
    state = ols.loss_scaled(adam(), RULES[name]).init(PARAMS)
    assert not refuses(READERS[reader], state)


def test_a_verdict_that_is_an_array_is_counted_outside_jit_without_sending():
    rule, verdict = RULES["static"], jnp.asarray(True)
    assert not refuses(rule.adjust, rule.init(), verdict)


def test_a_first_state_logs_no_transfer(capfd):
    RULES["dynamic"].init()
    assert capfd.readouterr().err == ""


@of_all_rules
def test_a_first_state_is_made_where_optax_makes_its_own(name):
    sgd = optax.sgd(0.1)
    assert not refuses(sgd.init, PARAMS)
    assert not refuses(ols.loss_scaled(sgd, RULES[name]).init, PARAMS)


@of_all_rules
def test_init_and_update_under_jit_send_nothing(name):
    tx = ols.loss_scaled(adam(), RULES[name])
    assert not refuses(jax.jit(tx.init), PARAMS)
    assert not refuses(jax.jit(tx.update), GRADS, tx.init(PARAMS), PARAMS)


def test_optax_itself_is_refused_outside_jit():
    assert refuses(optax.adam(1e-3).init, PARAMS)
    sgd = optax.sgd(0.1)
    assert refuses(sgd.update, GRADS, sgd.init(PARAMS), PARAMS)


def test_raise_if_stalled_reads_what_it_needs_explicitly(monkeypatch):
    """A GPU refuses other reads; from a CPU JAX refuses none, so this looks itself."""
    get, read = jax.device_get, []
    monkeypatch.setattr(jax, "device_get", lambda x: [read.append(x), get(x)][1])
    state = RULES["dynamic"].init()
    ols.raise_if_stalled(state)
    kinds = [x.dtype.name for x in jax.tree.leaves(read)]
    assert kinds == ["float32", "float32", "bool", "int32", "int32", "int32"]
