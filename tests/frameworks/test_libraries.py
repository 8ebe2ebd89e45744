"""Haiku, NumPyro, FlowJAX, solvers and others: programs in examples/frameworks."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.files import ROOT
from helpers.pages import run_program
from helpers.steps import assert_nothing_but_the_scale_changed
from helpers.under_autocast import dtypes_of

run = functools.cache(run_program)


def haiku():
    names = run("haiku_convnet")
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


def test_numpyro_finds_the_weights_with_products_in_float16():
    names = run("numpyro_svi")
    assert set(dtypes_of(names["predict"], names["x"], jnp.ones(16))) == {"float16"}
    weights = names["svi"].get_params(names["state"])["w_auto_loc"]
    np.testing.assert_allclose(weights, jnp.linspace(-1, 1, 16), atol=0.05)


def test_numpyro_keeps_the_guide_after_a_nan():
    names = run("numpyro_svi")
    old, svi, size = names["state"], names["svi"], names["BATCH"]
    bad = names["x"][:size].at[0, 0].set(jnp.nan)
    new, loss = names["step"](old, bad, names["y"][:size])
    assert np.isnan(loss)
    assert_same_bits(svi.get_params(new), svi.get_params(old))
    moments = [optax.tree.get(state, "mu") for state in (new, old)]
    assert_same_bits(*moments)
    assert ols.loss_scale_metrics(new)["total_notfinite"] == 1


def test_numpyro_warns_of_a_dynamic_loss_scale_which_it_does_not_know():
    names = run("numpyro_svi")
    svi, tx = names["svi"], ols.loss_scaled(optax.adam(3e-2))
    svi = names["SVI"](svi.model, svi.guide, tx, svi.loss)
    with pytest.warns(UserWarning, match="computed without it"):
        svi.run(jax.random.key(2), 1, names["x"], names["y"], progress_bar=False)


def test_penzai_keeps_parameters_and_moments_after_a_nan():
    names = run("penzai_trainer")
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


def test_flowjax_learns_and_keeps_the_flow_if_all_batches_are_nan():
    names = run("flowjax_fit")
    losses = names["losses"]["train"]
    assert losses[-1] < losses[0] - 0.5
    flow, losses = names["fit_to_data"](
        names["key"],
        names["flow"],
        names["x"] * jnp.nan,
        loss_fn=names["loss_fn"],
        optimizer=names["tx"],
        max_epochs=1,
        return_best=False,
        show_progress=False,
    )
    assert np.isinf(losses["train"]).all()
    assert_same_bits(*(jax.tree.leaves(eqx_arrays(f)) for f in (flow, names["flow"])))


def eqx_arrays(tree):
    import equinox as eqx

    return eqx.filter(tree, eqx.is_array)


def check_solvers():
    """Runs in a process of its own, in which Equinox has not been imported."""
    names = run("optimistix_root")
    import lineax  # It imports Equinox.

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

    # Diffrax, odeint and Lineax end no run either.
    names = run("solver_steps")
    bad = [jnp.nan * w for w in names["weights"]]
    for solver in (names["by_diffrax"], names["by_odeint"]):
        solve = functools.partial(solver, 1e-3, names["field"])
        grads = jax.jit(jax.grad(lambda w, solve=solve: solve(w)[-1].sum()))(bad)
        assert not ols.all_finite(grads)
    matrix = lineax.MatrixLinearOperator(bad[0])
    assert np.isnan(jax.jit(lineax.linear_solve)(matrix, names["y0"]).value).all()

    # A solver that is the training loop.
    loss = ols.scaled_backward(ols.autocast(lambda z: ((z - 1) ** 2).sum()), 2.0**10)
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(1.0))
    solver = optx.OptaxMinimiser(tx, rtol=1e-4, atol=1e-4)
    found = optx.minimise(lambda z, _: loss(z), solver, jnp.zeros(2))
    np.testing.assert_allclose(found.value, 1, atol=0.01)


def test_a_step_is_skipped_if_a_solver_cannot_solve():
    folders = ROOT / "tests", ROOT / "tests" / "frameworks"
    path = os.pathsep.join(map(str, folders))
    command = "import test_libraries; test_libraries.check_solvers()"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_diffrax_raises_an_error_for_a_nan_unless_equinox_is_told_not_to():
    names = run("solver_steps")  # It prints how many steps are made.
    bad = [jnp.nan * w for w in names["weights"]]
    with pytest.raises(Exception, match="maximum number of solver steps was reached"):
        names["by_diffrax"](1e-3, names["field"], bad)


def test_a_module_of_haiku_and_a_model_of_numpyro_must_not_be_under_autocast():
    hk, names = run("haiku_convnet")["hk"], run("numpyro_svi")
    svi, x, y = names["svi"], names["x"], names["y"]
    net = hk.transform(lambda x: ols.autocast(hk.Linear(2))(x))
    with pytest.raises(jax.errors.UnexpectedTracerError, match="JAX transform"):
        net.apply(net.init(jax.random.key(0), x), None, x)
    svi = names["SVI"](ols.autocast(svi.model), svi.guide, svi.optim, svi.loss)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="side effect"):
        svi.run(jax.random.key(2), 1, x, y, progress_bar=False)
