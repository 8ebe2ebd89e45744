"""autocast under and over transformations of JAX, and programs with strange parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import pallas as pl

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.compat import enable_x64
from helpers.under_autocast import (
    PROGRAMS,
    W,
    X,
    assert_autocast,
    assert_close,
    dot_loss,
    dtypes_of,
)

# --- Inside -----------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except({"branches", "linearize"}, PROGRAMS))
def test_products_run_low_inside_each_transformation(name):
    assert_autocast(lambda w, x: jnp.mean(PROGRAMS[name](w, x) ** 2), W, X)


# --- Outside ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.vmap(f, in_axes=(None, 0)),
        lambda f: lambda w, x: jax.linearize(functools.partial(f, x=x), w)[1](w),
        lambda f: lambda w, x: lax.scan(lambda c, r: (c, f(w, r)), 0.0, x)[1],
    ],
)
def test_results_are_right_under_every_transformation(transform):
    w, x = W[:2], X[:, :2]
    cast = ols.autocast(dot_loss)
    actual, expected = (jax.jit(transform(f))(w, x) for f in (cast, dot_loss))
    assert_close(actual, expected, 3e-2)
    assert set(dtypes_of(transform(cast), w, x)) == {"float16"}


def loop(w, x):
    return jnp.mean(lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0])


def test_a_gradient_is_exported_for_batches_of_any_size():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 4"), jnp.float32)
    gradient = jax.jit(jax.value_and_grad(ols.autocast(loop)))
    exported = export.export(gradient)(W, x)
    assert_close(exported.call(W, X), gradient(W, X))


@pytest.mark.slow
def test_functions_run_without_jit_and_with_64_bits():
    expected = jax.value_and_grad(dot_loss)(W, X)
    with jax.disable_jit():
        assert_close(jax.value_and_grad(ols.autocast(dot_loss))(W, X), expected)
    with enable_x64(True):
        assert_autocast(dot_loss, W, X)


# --- Strange parts ----------------------------------------------------------------


def test_kernels_and_callbacks_read_and_return_float32(capsys):
    def kernel(x_ref, y_ref):
        y_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

    def fun(w, x):
        y = x @ w
        shape = jax.ShapeDtypeStruct((3, 3), y.dtype)
        y = pl.pallas_call(kernel, shape, interpret=True)(y)
        y = jax.pure_callback(lambda y: np.asarray(y) + 1, shape, y)
        return jnp.mean(y)

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    assert dtypes_of(ols.autocast(fun), W, X) == ["float16", "float32"]
    ols.autocast_report(fun, W, X)
    assert "in a kernel" in capsys.readouterr().out


def test_mutable_references_keep_their_dtypes():
    def fun(w, x):
        ref = jax.new_ref(jnp.zeros((3, 4)))
        ref[...] = x @ w
        lax.fori_loop(0, 2, lambda i, _: ref.__setitem__(..., ref[...] @ w), None)
        return ref[...]

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    assert dtypes_of(ols.autocast(fun), W, X) == ["float16"] * 2


def test_gradients_of_an_empty_convolution_are_zeros():
    def loss(images, kernel):
        return jnp.sum(lax.conv(images, kernel, (1, 1), "SAME"))

    args = jnp.ones((0, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
    images, kernel = jax.grad(ols.autocast(loss), (0, 1))(*args)
    assert images.shape == (0, 3, 8, 8)
    assert not np.any(kernel)
