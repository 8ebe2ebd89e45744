"""A product of a value with itself is a square, which is computed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_lossscale as ols
from helpers.programs import dtypes_of
from helpers.under_autocast import HALF, W, X, assert_close

EYE = jnp.eye(4)
# The squares of the first overflow in float16, those of the second underflow.
LARGE, SMALL = 700 * X, 1e-4 * X
DTYPES = [("float16", "O1"), ("float16", "O2"), ("float16", "O3"), ("bfloat16", "O1")]
times = jax.jit(lambda a, b: a * b)


def scanned(y):
    return lax.scan(lambda total, row: (total + jnp.sum(row * row), None), 0.0, y)[0]


SUMS_OF_SQUARES = {
    "a value with itself": lambda y: jnp.sum(y * y),
    "a mean square": lambda y: 12 * jnp.mean(y * y),
    "stop_gradient": lambda y: jnp.sum(y * lax.stop_gradient(y)),
    "conj": lambda y: jnp.sum(jnp.conj(y) * y),
    "a magnitude": lambda y: jnp.sum(jnp.abs(y) * jnp.abs(y)),
    "a sign": lambda y: -jnp.sum(-y * y),
    "a factor": lambda y: 2 * jnp.sum(0.5 * y * y),
    "a divisor": lambda y: 2 * jnp.sum(y / 2 * y),
    "a transposition": lambda y: jnp.sum(y.T.ravel() * y.T.reshape(-1)),
    "a cast": lambda y: jnp.sum(y.astype(jnp.bfloat16).astype(jnp.float32) * y),
    "a part": lambda y: jnp.sum(y[:2] * y[:2]) + jnp.sum(-y[2] * y[2]) * -1,
    "a choice": lambda y: jnp.sum(jnp.where(y > 0, y, 0) * y + jnp.minimum(y, 0) * y),
    "a value computed twice": lambda y: jnp.sum((y + 0) * (y + 0)),
    "a jitted helper": lambda y: jnp.sum(times(y, y)),
    "checkpoint": lambda y: jnp.sum(jax.checkpoint(times)(y, y)),
    "cond": lambda y: lax.cond(
        True, lambda a, b: jnp.sum(a * b), lambda a, b: 0.0, y, y
    ),
    "scan": scanned,
    "dot": lambda y: jnp.dot(y.ravel(), y.ravel()),
    "vdot": lambda y: jnp.vdot(y, y),
    "einsum": lambda y: jnp.sum(jnp.einsum("bi,bi->b", y, y)),
    "vmap of dot": lambda y: jnp.sum(jax.vmap(jnp.dot)(y, y)),
    "rows times columns": lambda y: jnp.sum(y[:, None, :] @ y[:, :, None]),
    "a product with ones": lambda y: jnp.sum((y * y) @ jnp.ones(4)),
    "norm": lambda y: jnp.linalg.norm(y) ** 2,
    "norm of rows": lambda y: jnp.sum(jnp.linalg.norm(y, axis=1) ** 2),
    "global_norm": lambda y: optax.tree.norm([y]) ** 2,
}


@pytest.mark.fast_every(5)
@pytest.mark.parametrize("name", SUMS_OF_SQUARES)
def test_a_square_written_as_a_product_neither_overflows_nor_underflows(name):
    fun = SUMS_OF_SQUARES[name]
    for x in (LARGE, SMALL):
        expected = jnp.sum(jnp.square(x))
        for dtype, level in DTYPES:
            cast = ols.autocast(lambda w, x: fun(x @ w), dtype, level=level)
            np.testing.assert_allclose(cast(EYE, x), expected, rtol=3e-2)


@pytest.mark.parametrize("order", [1, 2, 3, 4, 2.5, np.inf])
def test_every_norm_of_a_large_or_small_product_is_right(order):
    for x in (LARGE, SMALL):
        for dtype, level in DTYPES:
            cast = ols.autocast(
                lambda w, x: jnp.linalg.norm(x @ w, ord=order, axis=1),
                dtype,
                level=level,
            )
            expected = jnp.linalg.norm(x, ord=order, axis=1)
            np.testing.assert_allclose(cast(EYE, x), expected, rtol=3e-2)


def test_the_gradient_of_a_norm_is_right():
    def loss(w, x):
        y = x @ w
        return jnp.sum(y / jnp.linalg.norm(y, axis=1, keepdims=True) * X)

    for x in (X, 500 * X):
        assert_close(jax.grad(ols.autocast(loss))(W, x), jax.grad(loss)(W, x), 2e-2)


def test_products_of_different_values_and_gram_matrices_stay_in_float16():
    def fun(w, x):
        y = x @ w
        gate = y[:, :2] * y[:, 2:]
        return gate * jnp.tanh(gate), y @ y.T, jnp.vdot(y, x @ w.T)

    cast = ols.autocast(fun)
    assert set(dtypes_of(cast, W, X)) == {HALF}
    assert set(dtypes_of(cast, W, X, name="mul")) == {HALF}


def test_a_square_saves_only_its_half_precision_operand_for_the_backward_pass():
    def fun(y):
        return jnp.sum(y * y) + jnp.vdot(y, y)

    w, x = jnp.ones((4, 64)), jnp.ones((64, 4))
    cast = ols.autocast(lambda w, x: fun(x @ w))
    _, pullback = jax.vjp(lambda w: cast(w, x), w)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size == 64 * 64]
    assert {leaf.dtype.name for leaf in saved} == {"float16"}


def test_low_mul_asks_for_squares_in_the_low_dtype_too():
    cast = ols.autocast(lambda w, x: (x @ w) * (x @ w), low=["mul"])
    assert dtypes_of(cast, W, X, name="mul") == [HALF]
