"""`compat.numpyro.optax_to_numpyro` in place of NumPyro's function of that name."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import optim as numpyro_own
from numpyro.distributions.constraints import positive
from numpyro.infer import SVI, Trace_ELBO
from numpyro.primitives import mutable

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from optax_lossscale.compat import numpyro as compat

N, SCALE = 512, 2.0**10
WEIGHTS = jnp.array([1.0, -2.0, 0.5])
X = jax.random.normal(jax.random.key(0), (N, 3))
Y = X @ WEIGHTS + 0.3 * jax.random.normal(jax.random.key(1), (N,))
BAD_X = X.at[0, 0].set(jnp.nan)


pytestmark = pytest.mark.usefixtures("standard_promotion")


def model(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x @ weights, 0.3), obs=y)


def guide(x, y):
    loc = numpyro.param("loc", jnp.zeros(3))
    scale = numpyro.param("scale", jnp.ones(3), constraint=positive)
    numpyro.sample("w", dist.Normal(loc, scale).to_event(1))


def inference(optimizer, model=model):
    return SVI(model, guide, optimizer, Trace_ELBO())


def loss_scaled(inner, rule=None):
    rule = ols.dynamic_loss_scale(SCALE) if rule is None else rule
    return compat.optax_to_numpyro(ols.loss_scaled(inner, rule))


@functools.cache
def trained(update="update"):
    """An inference, its compiled update, and its state after one step."""
    svi = inference(loss_scaled(optax.adam(0.05)))
    init = jax.jit(lambda key: svi.init(key, X, Y))
    update = jax.jit(getattr(svi, update))
    return svi, update, update(init(jax.random.key(2)), X, Y)[0]


@pytest.mark.parametrize("method", ["eval_and_update", "eval_and_stable_update"])
@pytest.mark.parametrize("forward", [False, True])
def test_finite_steps_are_those_of_the_bare_optimizer(method, forward):
    # SGD, unlike Adam, would show gradients that are wrong by a factor.
    def two_steps(optimizer):
        update = functools.partial(
            getattr(optimizer, method), forward_mode_differentiation=forward
        )
        state = optimizer.init(jnp.asarray([1.0, -3.0]))
        first, state = update(lambda params: (jnp.sum(params**2), params), state)
        second, state = update(lambda params: (jnp.sum(params**3), params), state)
        return first, second, optimizer.get_params(state)

    # Every number is a fraction of small integers, so nothing is rounded.
    expected = two_steps(numpyro_own.optax_to_numpyro(optax.sgd(0.25)))
    assert_same_bits(two_steps(loss_scaled(optax.sgd(0.25))), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["update", "stable_update"])
def test_a_nan_batch_changes_only_the_scale_and_the_counts(name):
    svi, update, old = trained(name)
    new, loss = update(old, BAD_X, Y)
    assert np.isnan(loss)
    _, (params, opt_state) = new.optim_state
    _, (old_params, old_opt_state) = old.optim_state
    assert_same_bits(params, old_params)
    assert_same_bits(opt_state.inner_state, old_opt_state.inner_state)
    assert_same_bits(svi.get_params(new), svi.get_params(old))
    assert ols.get_loss_scale(new) == SCALE / 2
    _, loss = update(new, X, Y)
    assert np.isfinite(loss)


@pytest.mark.slow
def test_the_loss_scale_is_found_in_the_state_of_svi():
    _, update, old = trained()
    for state in (old, old.optim_state):
        assert ols.find_loss_scale_state(state).step_count == 1
        assert ols.loss_scale_metrics(state)["loss_scale"] == SCALE
        ols.raise_if_stalled(state)
    stalled = old
    for _ in range(3):
        stalled, _ = update(stalled, BAD_X, Y)
    with pytest.raises(ols.LossScaleStalledError, match="the last 3 steps"):
        ols.raise_if_stalled(stalled, max_consecutive=3)


@pytest.mark.slow
def test_where_applied_keeps_the_mutable_state():
    def model_with_statistics(x, y):
        statistics = mutable("statistics", {"mean": jnp.zeros(3)})
        statistics["mean"] = 0.9 * statistics["mean"] + 0.1 * x.mean(0)
        model(x, y)

    svi = inference(loss_scaled(optax.sgd(1e-4)), model_with_statistics)
    old = svi.init(jax.random.key(2), X, Y)
    new, _ = jax.jit(svi.update)(old, BAD_X, Y)
    assert np.isnan(new.mutable_state["statistics"]["mean"][0])
    kept = ols.where_applied(new, new.mutable_state, old.mutable_state)
    assert_same_bits(kept, old.mutable_state)


RULES = [
    ols.dynamic_loss_scale(SCALE),
    ols.static_loss_scale(SCALE, skip_nonfinite=False),
    ols.no_loss_scale(),
]


def not_differentiable(params):
    """A loss that is infinite, with gradients of one."""
    return jax.lax.stop_gradient(jnp.inf) + params.sum(), None


def overflowing(params):
    """A finite loss whose gradient is infinite."""
    return jnp.sqrt(params - 1).sum(), None


@pytest.mark.parametrize("rule", RULES, ids=["dynamic", "static", "none"])
@pytest.mark.parametrize("loss_fn", [not_differentiable, overflowing])
def test_a_stable_update_needs_a_finite_loss_and_finite_gradients(rule, loss_fn):
    optimizer = loss_scaled(optax.sgd(0.1), rule)
    state = optimizer.init(jnp.ones(2))
    (loss, _), state = optimizer.eval_and_stable_update(loss_fn, state)
    assert np.isnan(loss)
    assert_same_bits(optimizer.get_params(state), jnp.ones(2))
    assert ols.loss_scale_metrics(state)["total_notfinite"] == 1
    # A loss that is infinite in float32 is no reason to lower the scale.
    has_backed_off = rule is RULES[0] and loss_fn is overflowing
    factor = 0.5 if has_backed_off else 1
    assert ols.get_loss_scale(state) == factor * rule.init().loss_scale


def test_the_optimizer_is_given_the_value_of_the_loss():
    seen = []

    def update(grads, state, params=None, *, value):
        seen.append(value)
        return grads, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    optimizer = loss_scaled(inner)
    state = optimizer.init(jnp.full(2, 3.0))
    optimizer.eval_and_update(lambda params: ((params**2).sum(), None), state)
    assert seen == [18.0]


def test_an_optimizer_without_a_loss_scale_is_refused():
    optimizer = compat.optax_to_numpyro(optax.adam(0.05))
    with pytest.raises(ValueError, match="must hold a LossScaleState, got none"):
        optimizer.eval_and_update(overflowing, optimizer.init(jnp.ones(2)))
    with pytest.raises(TypeError, match="`transformation` must be an optimizer"):
        compat.optax_to_numpyro(optax.adam)
    with pytest.raises(TypeError, match="NumPyro's optimizers are not Optax's"):
        compat.optax_to_numpyro(optimizer)


def test_the_result_is_an_optimizer_of_numpyro():
    result = loss_scaled(optax.adam(0.05))
    assert isinstance(result, type(numpyro_own.optax_to_numpyro(optax.adam(0.05))))


def test_the_module_can_be_imported_without_numpyro(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro", None)
    module = importlib.reload(compat)
    with pytest.raises(ImportError, match="numpyro"):
        module.optax_to_numpyro(ols.loss_scaled(optax.adam(0.05)))
