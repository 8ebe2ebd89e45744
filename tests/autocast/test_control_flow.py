"""Loops, branches and rematerialization under autocast."""

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from helpers.programs import dtypes_of, equations_of
from helpers.under_autocast import HALF, W, X, assert_autocast, assert_close, with_scan


def test_a_while_loop_runs_and_keeps_its_dtypes():
    def fun(w, x):
        def body(carry):
            i, x = carry
            return i + 1, jnp.tanh(x @ w)

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.int32(0), x))

    assert_autocast(fun, W, X, grad=False)


def test_rematerialization_keeps_its_policy():
    policy = jax.checkpoint_policies.dots_saveable

    def fun(w, x):
        return jnp.mean(jax.checkpoint(lambda w: jnp.sin(x @ w), policy=policy)(w))

    program = jax.make_jaxpr(ols.autocast(fun))(W, X)
    (found,) = [e for e in equations_of(program) if e.primitive.name == "remat2"]
    assert found.params["policy"] is policy
    assert_autocast(fun, W, X)


def test_products_that_a_rematerialized_loop_computes_once_are_in_float16():
    def loss(w, x):
        def run(w):
            step = lambda h, _: (jnp.tanh(h @ w), jnp.sin(w @ w).sum())  # noqa: E731
            h, sums = jax.lax.scan(step, x, None, length=3)
            return jnp.mean(h**2) + sums.sum()

        return jax.checkpoint(run)(w)

    fun = jax.grad(loss)
    names = {e.primitive.name for e in equations_of(jax.make_jaxpr(fun)(W, X))}
    assert names & {"closed_call", "eval_jaxpr"}
    assert set(dtypes_of(ols.autocast(fun), W, X)) == {HALF}
    assert_close(ols.autocast(fun)(W, X), fun(W, X), rtol=2e-2)


def test_loop_inputs_are_cast_before_the_loop_and_weights_inside():
    program = jax.make_jaxpr(ols.autocast(with_scan))(W, X)
    (scan,) = [e for e in equations_of(program) if e.primitive.name == "scan"]
    halves = [v for v in scan.invars if v.aval.dtype == jnp.float16]
    assert [variable.aval.shape for variable in halves] == [X.shape]
