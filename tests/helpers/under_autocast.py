"""Small programs, and checks of functions under autocast."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ols
from helpers.programs import dtypes_of

HALF = ("float16", "float16")
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32)


def dot_loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def assert_close(actual, expected, rtol=1e-2):
    """Values agree up to the rounding of float16; dtypes agree exactly."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(e), initial=0.0)) or 1.0
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * scale)


def assert_autocast(fun, *args, grad=True):
    """Every product is in float16, forward and backward, and the values are right."""
    cast = ols.autocast(fun)
    assert_close(cast(*args), fun(*args))
    assert_close(jax.jit(cast)(*args), fun(*args))
    assert set(dtypes_of(cast, *args)) == {HALF}
    if grad:
        scaled = jax.grad(lambda *args: cast(*args) * 2.0**8)
        grads = jax.tree.map(lambda g: g / 2.0**8, jax.jit(scaled)(*args))
        assert_close(grads, jax.grad(fun)(*args))
        assert set(dtypes_of(scaled, *args)) == {HALF}


def with_scan(w, x):
    def body(carry, row):
        carry = jnp.tanh(row @ w + carry @ w)
        return carry, jnp.sum(carry)

    carry, sums = jax.lax.scan(body, jnp.zeros(4), x)
    return jnp.mean(carry**2) + jnp.mean(sums)


@jax.custom_vjp
def own_layer(w, x):
    return x @ w


def own_layer_fwd(w, x):
    return own_layer(w, x), (w, x)


def own_layer_bwd(residuals, cotangent):
    w, x = residuals
    return x.T @ cotangent, cotangent @ w.T


own_layer.defvjp(own_layer_fwd, own_layer_bwd)


def computed_in(capsys, fun, *args, **settings):
    """The dtype in which each operation computes, according to the report."""
    ols.autocast_report(ols.autocast(fun, **settings), *args)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    return {row[1]: row[2] for row in rows}


def relative_error(fun, *args, scale=1.0, jit=jax.jit, **settings):
    """Error of the gradient by the first argument, relative to the exact gradient."""
    exact = jit(jax.grad(fun))(*args)
    cast = ols.autocast(fun, **settings)
    grads = jit(jax.grad(lambda *args: cast(*args) * scale))(*args)
    return jnp.linalg.norm((grads / scale - exact).ravel()) / jnp.linalg.norm(
        exact.ravel()
    )
