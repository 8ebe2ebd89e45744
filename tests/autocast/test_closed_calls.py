"""The body of a call runs low where autocast cannot look into its rules, and it warns.

These are, as docs/limits.md says, `custom_vmap`, `linear_call`, and what JAX keeps
closed: from 0.12 on `jax.lax.custom_root`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.custom_derivatives import linear_call

import optax_lossscale as ols

W = jax.random.normal(jax.random.key(0), (8, 8)) / 4
X = jax.random.normal(jax.random.key(1), (4, 8))
LOW = ols.autocast(jnp.matmul)(X, W)


@custom_vmap
def batched_by_hand(x, w):
    return x @ w


@batched_by_hand.def_vmap
def _rule(size, is_batched, x, w):
    return jnp.einsum("bij,jk->bik", x, w), True


@sequential_vmap
def one_by_one(x, w):
    return x @ w


def linear(x, w):
    return linear_call(lambda x, w: x @ w, lambda x, g: x.T @ g, x, w)


def closed(x, w, fun=jnp.matmul):
    """A call of a class that JAX knows nothing more of."""
    hijax = pytest.importorskip("jax.experimental.hijax", exc_type=ImportError)
    kind = getattr(hijax, "HiPrim", getattr(hijax, "VJPHiPrimitive", None))
    if kind is None:
        pytest.skip("This version of JAX has no calls that it keeps closed.")

    class Closed(kind):
        def __init__(self, x, w):
            self.in_avals = jax.typeof(x), jax.typeof(w)
            self.out_aval = jax.typeof(x)
            self.params = {}
            super().__init__()

        def expand(self, x, w):
            return fun(x, w)

    return Closed(x, w)(x, w)


NAMES = {
    closed: "Closed",
    batched_by_hand: "custom_vmap_call",
    one_by_one: "custom_vmap_call",
    linear: "linear_call",
}


@pytest.mark.parametrize("fun", NAMES)
def test_the_body_of_a_closed_call_runs_low_with_a_warning_and_a_row_of_the_report(
    fun, capsys
):
    name = NAMES[fun]
    with pytest.warns(UserWarning, match=f"cannot look into the rules of {name},"):
        result = ols.autocast(fun)(X, W)
    np.testing.assert_array_equal(result, LOW)
    ols.autocast_report(fun, X, W)
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert ["float16" in row for row in rows] == [True, False]
    assert "rules not looked into" in rows[1]


@pytest.mark.parametrize("fun", NAMES)
def test_a_marked_call_runs_as_written_without_a_warning(fun, capsys):
    marked = ols.full_precision(fun)
    np.testing.assert_array_equal(ols.autocast(marked)(X, W), fun(X, W))
    ols.autocast_report(marked, X, W)
    shown = capsys.readouterr().out
    assert "full_precision" in shown
    assert "rules" not in shown


def test_a_call_without_products_is_not_changed_and_not_warned_of():
    def fun(x):
        return closed(x, x, fun=lambda x, _: jnp.tanh(x))

    expected = jax.make_jaxpr(fun)(X)
    assert str(jax.make_jaxpr(ols.autocast(fun))(X)) == str(expected)


@pytest.mark.filterwarnings("ignore:.* cannot look into the rules:UserWarning")
def test_rules_for_batches_and_transposes_run_as_written():
    xs = jnp.stack([X, 2 * X])
    mapped = jax.vmap(batched_by_hand, (0, None))
    np.testing.assert_array_equal(ols.autocast(mapped)(xs, W)[0], LOW)
    outside = jax.vmap(ols.autocast(batched_by_hand), (0, None))(xs, W)
    np.testing.assert_allclose(outside, mapped(xs, W), rtol=1e-6, atol=1e-6)
    (grad,) = jax.vjp(lambda w: ols.autocast(linear)(X, w), W)[1](X)
    np.testing.assert_allclose(grad, X.T @ X, rtol=1e-6, atol=1e-6)


def root(w, x):
    """A deep equilibrium layer: y = x + tanh(w @ y) / 10."""

    def residual(y):
        return y - jnp.tanh(w @ y) / 10 - x

    def solve(g, y):
        return lax.fori_loop(0, 9, lambda _, y: y - g(y), y)

    def tangent_solve(g, y):
        return jnp.linalg.solve(jax.jacobian(g)(y), y)

    return lax.custom_root(residual, jnp.zeros(8), solve, tangent_solve)


@pytest.mark.filterwarnings("ignore:.* rules of CustomRoot:UserWarning")
@pytest.mark.slow
def test_the_solver_of_a_root_runs_low_and_gradients_agree():
    (y, low), (exact, grad) = (
        jax.jit(jax.value_and_grad(lambda w, f=f: jnp.sum(f(w, X[0]) ** 2)))(W)
        for f in (ols.autocast(root), root)
    )
    assert y != exact
    np.testing.assert_allclose(y, exact, rtol=1e-3)
    np.testing.assert_allclose(low, grad, rtol=0.02, atol=1e-3)
