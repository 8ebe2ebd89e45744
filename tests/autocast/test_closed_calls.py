"""Products in calls that JAX keeps closed run low, or the report says that they do not.

JAX 0.12 keeps `jax.lax.custom_root` closed, and will keep others, which its flags show.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.custom_derivatives import linear_call

import optax_lossscale as ols
from helpers.under_autocast import assert_close
from optax_lossscale._autocast.programs import is_closed_call, with_programs

W = jax.random.normal(jax.random.key(0), (8, 8)) / 4
X = jax.random.normal(jax.random.key(1), (4, 8))
ROUNDED = X.astype(jnp.float16).astype(jnp.float32) @ W.astype(jnp.float16).astype(
    jnp.float32
)


@contextlib.contextmanager
def flag(name):
    if not hasattr(jax.config, f"jax_{name}"):
        pytest.skip(f"This version of JAX has no flag jax_{name}.")
    before = getattr(jax.config, f"jax_{name}")
    jax.config.update(f"jax_{name}", True)
    try:
        yield
    finally:
        jax.config.update(f"jax_{name}", before)
        jax.clear_caches()


def checkpointed(w):
    return jax.checkpoint(lambda w: jnp.tanh(X @ w) @ w)(w)


def policy_of_dots(w):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda w: jnp.tanh(X @ w) @ w, policy=policy)(w)


def looped(w):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), X, jnp.stack([w, w]))[0]


def with_a_vjp(w):
    @jax.custom_vjp
    def fun(w):
        return X @ w

    fun.defvjp(lambda w: (fun(w), None), lambda _, g: (X.T @ g,))
    return fun(w)


def with_a_jvp(w):
    @jax.custom_jvp
    def fun(w):
        return X @ w

    fun.defjvp(lambda primals, tangents: (fun(*primals), X @ tangents[0]))
    return fun(w)


CALLS = {
    ("remat3", checkpointed),
    ("remat3", policy_of_dots),
    ("remat3", looped),
    ("custom_vjp3", with_a_vjp),
    ("custom_jvp3", with_a_jvp),
}


def total(fun):
    return lambda w: jnp.sum(jnp.sin(fun(w)))


@pytest.mark.slow  # All programs are compiled again after a flag has changed.
@pytest.mark.parametrize(("name", "fun"), sorted(CALLS, key=str))
def test_future_calls_are_as_those_of_today(name, fun):
    low = ols.autocast(fun)
    runs = [low, jax.grad(total(low)), jax.vmap(jax.grad(total(low)))]
    inputs = [W, W, jnp.stack([W, 2 * W])]
    today = [run(x) for run, x in zip(runs, inputs, strict=True)]
    written = jax.grad(total(fun))(W)
    with flag(name):
        runs = [low, jax.grad(total(low)), jax.vmap(jax.grad(total(low)))]
        for run, x, expected in zip(runs, inputs, today, strict=True):
            jax.clear_caches()
            # The order of sums may be another one.
            assert_close(run(x), expected, rtol=1e-3)
            assert_close(jax.jit(run)(x), expected, rtol=1e-3)
        assert np.any(jax.grad(total(low))(W) != written)


def root(w, x):
    """A deep equilibrium layer: y = x + tanh(w @ y) / 10."""

    def residual(y):
        return y - jnp.tanh(w @ y) / 10 - x

    def solve(g, y):
        return lax.fori_loop(0, 20, lambda _, y: y - g(y), y)

    def tangent_solve(g, y):
        return jnp.linalg.solve(jax.jacobian(g)(y), y)

    return lax.custom_root(residual, jnp.zeros(8), solve, tangent_solve)


@pytest.mark.slow
def test_the_products_of_a_root_are_low_in_both_passes(capsys):
    low = ols.autocast(root)
    y = jnp.zeros(8)
    for _ in range(20):
        product = ols.autocast(jnp.matmul)(W, y)
        y = y - (y - jnp.tanh(product) / 10 - X[0])
    np.testing.assert_allclose(low(W, X[0]), y, rtol=1e-6)
    grads = jax.grad(lambda w: low(w, X[0]).sum())(W)
    written = jax.grad(lambda w: root(w, X[0]).sum())(W)
    np.testing.assert_allclose(grads, written, rtol=0.02, atol=1e-3)
    assert np.any(grads != written)
    ols.autocast_report(root, W, X[0])
    assert "dot_general  float16" in capsys.readouterr().out


@custom_vmap
def batched_by_hand(w, x):
    return x @ w


@batched_by_hand.def_vmap
def _rule(size, is_batched, w, x):
    return jnp.einsum("bij,jk->bik", x, w), True


@sequential_vmap
def one_by_one(w, x):
    return x @ w


@pytest.mark.parametrize("fun", [batched_by_hand, one_by_one])
def test_the_rule_for_batches_is_low_before_and_after_autocast(fun):
    xs = jnp.stack([X, X])
    after = jax.vmap(ols.autocast(fun), (None, 0))(W, xs)
    inside = ols.autocast(lambda w, xs: jax.vmap(fun, (None, 0))(w, xs))(W, xs)
    rounded = ROUNDED.astype(jnp.float16).astype(jnp.float32)
    for result in (after, inside):
        np.testing.assert_allclose(result, jnp.stack([rounded] * 2), rtol=1e-3)
        assert np.any(result != jnp.stack([X @ W] * 2))
        np.testing.assert_array_equal(result, result.astype(jnp.float16))


def test_a_rule_for_batches_that_stays_is_called_with_values_and_keeps_its_name():
    @custom_vmap
    def scaled(x):
        return x / jnp.max(x)

    @scaled.def_vmap
    def my_rule(size, is_batched, x):
        return x / jnp.max(x), [True]  # JAX expects True alone.

    with pytest.raises(ValueError, match=r"rule \(my_rule\) do not match"):
        jax.vmap(ols.autocast(scaled))(X)

    scaled.def_vmap(lambda size, is_batched, x: (x / float(jnp.max(x)), True))
    kept = ols.autocast(ols.full_precision(scaled))
    np.testing.assert_array_equal(jax.vmap(kept)(X), X / jnp.max(X))


@pytest.mark.slow
def test_the_transpose_of_a_linear_call_is_low():
    def fun(w):
        return linear_call(lambda x, w: x @ w, lambda x, g: x.T @ g, X, w)

    g = jax.random.normal(jax.random.key(2), (4, 8))
    (low,), (written,) = (jax.vjp(f, W)[1](g) for f in (ols.autocast(fun), fun))
    assert np.any(low != written)
    np.testing.assert_allclose(low, written, rtol=0.01, atol=0.01)


def hidden(fun, **params):
    """A call of a class that JAX knows nothing more of."""
    hijax = pytest.importorskip("jax.experimental.hijax", exc_type=ImportError)
    kind = getattr(hijax, "HiPrim", getattr(hijax, "VJPHiPrimitive", None))
    if kind is None:
        pytest.skip("This version of JAX has no calls that it keeps closed.")

    class Hidden(kind):
        def __init__(self, x, w):
            self.in_avals = jax.typeof(x), jax.typeof(w)
            self.out_aval = jax.typeof(x)
            self.params = params
            super().__init__()

        def expand(self, x, w):
            return fun(x, w)

    return lambda w: Hidden(X, w)(X, w)


def test_what_cannot_be_looked_into_is_warned_of_and_in_the_report(capsys):
    fun = hidden(lambda x, w: jnp.tanh(x @ w))
    with pytest.warns(UserWarning, match="cannot look into Hidden"):
        result = ols.autocast(fun)(W)
    np.testing.assert_array_equal(result, fun(W))
    with pytest.warns(UserWarning, match="cannot look into Hidden"):
        ols.autocast_report(fun, W)
    assert "not looked into" in capsys.readouterr().out
    ols.autocast_report(ols.full_precision(fun), W)  # No warning: it was asked for.
    shown = capsys.readouterr().out
    assert "full_precision" in shown
    assert "not looked into" not in shown


def test_a_closed_call_without_products_is_not_warned_of():
    ols.autocast(hidden(lambda x, w: jnp.tanh(x)))(W)


def test_a_closed_call_in_which_nothing_changes_is_returned_itself():
    fun = hidden(lambda x, w: jnp.tanh(x), rules=(jnp.sin, jnp.cos))
    (equation,) = jax.make_jaxpr(fun)(W).eqns
    (call,) = filter(is_closed_call, equation.params.values())
    assert with_programs(call, lambda program: program) is call
