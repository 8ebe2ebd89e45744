"""Scatters, kernels, callbacks and mutable references under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7
from helpers.programs import dtypes_of
from helpers.under_autocast import W, X, assert_close


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("name", ["max", "min", "set", "add", "multiply", "apply"])
def test_every_kind_of_scatter_runs(name):
    def fun(w, x):
        at = (x @ w).at[jnp.array([0, 2])]
        return at.apply(jnp.sin) if name == "apply" else getattr(at, name)(x[:2])

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    places = jnp.array([0, 0, 1])
    of_segments = ols.autocast(lambda w, x: jax.ops.segment_max(x @ w, places, 2))
    assert_close(of_segments(W, X), jax.ops.segment_max(X @ W, places, 2))


def test_kernels_and_callbacks_run_as_written(capsys):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fun(w, x):
        y = x @ w
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        y = pl.pallas_call(kernel, shape, interpret=True)(y)
        y = jax.pure_callback(lambda y: np.asarray(y) + 1, shape, y)
        jax.debug.print("sum {}", jnp.sum(y))
        return jnp.mean(y)

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    assert capsys.readouterr().out.count("sum") == 2
    cast = ols.autocast(fun)
    for name in ("pallas_call", "pure_callback"):
        assert dtypes_of(cast, W, X, name=name) == [("float32",)]
    in_kernel = dtypes_of(cast, W, X, name="mul")
    assert in_kernel == [("float32", "float32")]


@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 has no jax.new_ref")
def test_mutable_references_keep_their_dtype():
    def fun(w, x):
        ref = jax.new_ref(jnp.zeros((3, 4)))
        ref[...] = x @ w
        jax.lax.fori_loop(0, 2, lambda i, _: ref.__setitem__(..., ref[...] * 2), None)
        return ref[...]

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    for name, count in (("get", 1), ("swap", 2)):
        dtypes = dtypes_of(ols.autocast(fun), W, X, name=name)
        assert set(dtypes) == {("float32",) * count}
