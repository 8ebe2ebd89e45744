"""The programs for Haiku, NumPyro, FlowJAX and others, and what is said of them."""

import functools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.files import ROOT
from helpers.pages import run_section
from helpers.steps import assert_nothing_but_the_scale_changed
from helpers.under_autocast import dtypes_of


@functools.cache
def section(heading):
    return run_section("docs/frameworks.md", heading)


def haiku():
    names = section("Haiku")
    return names, names["carry"], names["images"].at[0, 0].set(jnp.nan)


def test_haiku_trains_and_only_the_products_are_in_float16():
    names, (params, state, _), _ = haiku()
    assert names["loss"] < 0.1
    arguments = params, state, names["images"], names["labels"]
    assert set(dtypes_of(names["loss_fn"], *arguments)) == {"float16"}


def test_haiku_keeps_parameters_moments_and_its_state_after_a_nan():
    names, (params, state, opt_state), bad = haiku()
    labels = names["labels"]
    *new, new_state, _ = names["step"](params, state, opt_state, bad, labels)
    old = [params, state]
    assert_nothing_but_the_scale_changed((new, new_state), (old, opt_state))
    # The state that the model returned is not fit for use.
    grad_fn = ols.scaled_value_and_grad(names["loss_fn"], opt_state, has_aux=True)
    (_, broken), _ = grad_fn(params, state, bad, labels)
    assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(broken))


@pytest.mark.parametrize("name", ["module", "function of a module"])
def test_a_module_of_haiku_must_not_be_under_autocast(name):
    import haiku as hk

    def apply(x):
        low = hk.Linear(2) if name == "module" else lambda x: hk.Linear(2)(x)
        return ols.autocast(low)(x)

    def init_and_apply(net, x):
        return net.apply(net.init(jax.random.key(0), x), None, x)

    with pytest.raises(jax.errors.UnexpectedTracerError, match="JAX transform"):
        init_and_apply(hk.transform(apply), jnp.ones((1, 3)))


def train(names, svi):
    """The loop of the section: the state, and the losses of the last epoch."""
    x, y, size = names["x"], names["y"], names["BATCH"]
    batches = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), (x, y))
    state = svi.init(jax.random.key(2), x[:size], y[:size])
    step = functools.partial(jax.lax.scan, lambda state, xy: svi.update(state, *xy))
    step = jax.jit(step)
    for _ in range(10):
        state, losses = step(state, batches)
    return state, losses


def test_numpyro_trains_as_in_float32(monkeypatch):
    names = section("NumPyro")
    svi = names["svi"]
    assert set(dtypes_of(names["predict"], names["x"], jnp.ones(16))) == {"float16"}
    state, losses = train(names, svi)
    monkeypatch.setitem(names, "predict", jnp.matmul)
    float32 = names["SVI"](svi.model, svi.guide, optax.adam(3e-2), svi.loss)
    _, expected = train(names, float32)
    assert abs(losses.mean() - expected.mean()) < expected.std()
    weights = svi.get_params(state)["w_auto_loc"]
    np.testing.assert_allclose(weights, jnp.linspace(-1, 1, 16), atol=0.05)


def test_numpyro_keeps_the_guide_after_a_nan():
    names = section("NumPyro")
    old, svi, size = names["state"], names["svi"], names["BATCH"]
    bad = names["x"][:size].at[0, 0].set(jnp.nan)
    new, loss = names["step"](old, bad, names["y"][:size])
    assert np.isnan(loss)
    assert_same_bits(svi.get_params(new), svi.get_params(old))
    moments = [optax.tree.get(state, "mu") for state in (new, old)]
    assert_same_bits(*moments)
    assert ols.loss_scale_metrics(new)["total_notfinite"] == 1


def test_numpyro_warns_of_a_dynamic_loss_scale_which_it_does_not_know():
    names = section("NumPyro")
    svi, tx = names["svi"], ols.loss_scaled(optax.adam(3e-2))
    svi = names["SVI"](svi.model, svi.guide, tx, svi.loss)
    with pytest.warns(UserWarning, match="computed without it"):
        svi.run(jax.random.key(2), 1, names["x"], names["y"], progress_bar=False)


def test_a_model_of_numpyro_must_not_be_under_autocast():
    names = section("NumPyro")
    svi = names["svi"]
    svi = names["SVI"](ols.autocast(svi.model), svi.guide, svi.optim, svi.loss)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="side effect"):
        svi.run(jax.random.key(2), 1, names["x"], names["y"], progress_bar=False)


def test_penzai_keeps_parameters_and_moments_after_a_nan():
    names = section("Penzai")
    trainer, x, y = names["trainer"], names["x"], names["y"]
    assert names["metrics"]["loss"] < 0.2 * jnp.var(y)
    freeze = names["pz"].freeze_params  # Arrays in place of variables.
    model, low = freeze(trainer.model), ols.autocast(names["loss_fn"])
    assert set(dtypes_of(low, model, None, None, x, y)) == {"float16"}

    before = jax.tree.map(jnp.copy, trainer.state.value)
    assert np.isnan(trainer.step(x=x.at[0, 0].set(jnp.nan), y=y)["loss"])
    assert_same_bits(freeze(trainer.model), model)
    after = trainer.state.value.opt_state
    assert_same_bits(after.inner_state, before.opt_state.inner_state)
    assert ols.loss_scale_metrics(after)["total_notfinite"] == 1


def fit_flow(names, x, **settings):
    """Fits the flow of the section again."""
    fit, key, flow = names["fit_to_data"], names["key"], names["flow"]
    return fit(key, flow, x, show_progress=False, max_epochs=2, **settings)


def test_flowjax_trains_as_with_a_loss_that_is_not_scaled():
    names = section("FlowJAX")
    scaled = {"loss_fn": names["loss_fn"], "optimizer": names["tx"]}
    _, found = fit_flow(names, names["x"], **scaled)
    plain = {"loss_fn": names["MaximumLikelihoodLoss"](), "optimizer": optax.adam(3e-3)}
    _, expected = fit_flow(names, names["x"], **plain)
    np.testing.assert_allclose(found["train"], expected["train"], rtol=1e-3)
    assert names["losses"]["train"][-1] < names["losses"]["train"][0]


def test_flowjax_keeps_the_flow_if_all_batches_are_nan():
    names = section("FlowJAX")
    scaled = {"loss_fn": names["loss_fn"], "optimizer": names["tx"]}
    bad = names["x"] * jnp.nan
    flow, losses = fit_flow(names, bad, return_best=False, **scaled)
    assert np.isinf(losses["train"]).all()
    assert_same_bits(*(jax.tree.leaves(eqx_arrays(f)) for f in (flow, names["flow"])))


def eqx_arrays(tree):
    import equinox as eqx

    return eqx.filter(tree, eqx.is_array)


def check_optimistix():
    """Runs in a process of its own, in which Equinox has not been imported."""
    names = section("Optimistix")
    params, opt_state, x, y = (
        names[name] for name in ("params", "opt_state", "x", "y")
    )
    assert names["loss"] < 0.2 * jnp.var(y)
    assert set(dtypes_of(names["loss_fn"], params, x, y)) == {"float16", "float32"}

    # A NaN, an overflow, and a solve that fails.
    large = ols.set_loss_scale(opt_state, 2.0**24)
    hard = params | {"inner": 1000 * params["inner"]}
    for arguments in (
        (params, opt_state, x.at[0, 0].set(jnp.nan), y),
        (params, large, x, y + 100),
        (hard, opt_state, x, y),
    ):
        *new, _ = names["step"](*arguments)
        assert_nothing_but_the_scale_changed(new, arguments[:2])

    # Without `full_precision` the solver fails.
    optx, solve = names["optx"], names["solve"]
    drive = x @ params["in"]
    assert np.isfinite(jax.vmap(solve, (None, 0))(params["inner"], drive)).all()

    def unmarked(weights, drive):
        solver, guess = optx.Newton(rtol=1e-5, atol=1e-5), jnp.zeros_like(drive)
        arguments = weights, drive
        return optx.root_find(names["residual"], solver, guess, arguments).value

    low = ols.autocast(jax.vmap(unmarked, (None, 0)))
    assert np.isnan(low(params["inner"], drive)).any()

    # A minimiser takes the gradients without the scale.
    def minimum(tx):
        solver = optx.OptaxMinimiser(tx, rtol=1e-4, atol=1e-4)
        return optx.minimise(lambda z, _: ((z - 1) ** 2).sum(), solver, jnp.zeros(2))

    np.testing.assert_allclose(minimum(optax.sgd(0.1)).value, 1, atol=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stopped = minimum(ols.loss_scaled(optax.sgd(0.1)))
    assert any("computed without it" in str(warning.message) for warning in caught)
    np.testing.assert_allclose(stopped.value, 0, atol=0.01)

    # With a constant scale the loss function has it too.
    rule = ols.static_loss_scale(2.0**10)

    def scaled_loss(z, args):
        return ols.scale(((z - 1) ** 2).sum(), rule.init())

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        solver = optx.OptaxMinimiser(ols.loss_scaled(optax.sgd(0.1), rule), 1e-4, 1e-4)
        found = optx.minimise(scaled_loss, solver, jnp.zeros(2))
    np.testing.assert_allclose(found.value, 1, atol=0.01)


def test_optimistix_skips_what_a_solver_cannot_solve():
    folders = ROOT / "tests", ROOT / "tests" / "frameworks"
    path = os.pathsep.join(map(str, folders))
    command = "import test_libraries; test_libraries.check_optimistix()"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
