"""Arguments and results of autocast, other dtypes, kernels and references."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7, enable_x64
from helpers.under_autocast import W, X, assert_autocast, assert_close, dot_loss


def test_other_dtypes_pass_through():
    def fun(tree):
        return {**tree, "c": tree["c"] @ tree["c"], "i": tree["i"] @ tree["i"]}

    tree = {
        "c": jnp.ones((2, 2), jnp.complex64),
        "i": jnp.full((2, 2), 70_000),
        "b": jnp.ones(2, bool),
        "k": jax.random.key(0),
        "h": jnp.ones(2, jnp.bfloat16),
        "e": jnp.zeros((0, 3)),
    }
    chex.assert_trees_all_equal(ols.autocast(fun)(tree), fun(tree))


@pytest.mark.parametrize("name", ["max", "min", "set", "add", "multiply", "apply"])
def test_every_kind_of_scatter_runs(name):
    def fun(w, x):
        at = (x @ w).at[jnp.array([0, 2])]
        return at.apply(jnp.sin) if name == "apply" else getattr(at, name)(x[:2])

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    places = jnp.array([0, 0, 1])
    of_segments = ols.autocast(lambda w, x: jax.ops.segment_max(x @ w, places, 2))
    assert_close(of_segments(W, X), jax.ops.segment_max(X @ W, places, 2))


def test_numpy_scalars_are_static_and_numpy_arrays_are_arrays():
    cast = ols.autocast(lambda x, rows: x.reshape(rows, -1))
    assert cast(np.ones(6), np.int64(2)).shape == (2, 3)
    assert cast(np.ones(6), np.int64(2)).dtype == jnp.float32


def test_float64_passes_through():
    with enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2)))
        assert x.dtype == jnp.float64

        def fun(x):
            return jnp.sum(jnp.exp(x @ x))

        np.testing.assert_array_equal(ols.autocast(fun)(x), fun(x))
        assert_autocast(dot_loss, W, X)


def test_results_keep_their_dtypes_and_can_be_of_any_type():
    def fun(w, x, name):
        half = (x @ w).astype(jnp.float16)
        return {"y": x @ w, "half": half, "name": name, "none": None, "n": 3, "w": w}

    result = ols.autocast(fun)(W, X, name="layer")
    assert (result["name"], result["none"], result["n"]) == ("layer", None, 3)
    assert (result["y"].dtype, result["half"].dtype) == (jnp.float32, jnp.float16)
    assert result["w"] is not None
    np.testing.assert_array_equal(result["w"], W)
    assert ols.autocast(lambda x: None)(X) is None
    assert ols.autocast(lambda: ())() == ()


def test_arguments_that_are_not_arrays_are_static():
    def fun(w, x, *, power, act):
        return jnp.sum(act(x @ w) ** power)

    cast = ols.autocast(fun)(W, X, power=2, act=jnp.tanh)
    assert_close(cast, fun(W, X, power=2, act=jnp.tanh))


def test_an_argument_that_is_changed_in_place_raises_an_error():
    def fun(params, x):
        params["w"] = params["w"] + 1
        return x @ params["w"]

    with pytest.raises(ValueError, match="`fun` must not change its arguments"):
        ols.autocast(fun)({"w": W}, X)


def test_kernels_callbacks_and_references_run_as_written(capsys):
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


@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 has no jax.new_ref")
def test_mutable_references_keep_their_dtype():
    def fun(w, x):
        ref = jax.new_ref(jnp.zeros((3, 4)))
        ref[...] = x @ w
        jax.lax.fori_loop(0, 2, lambda i, _: ref.__setitem__(..., ref[...] * 2), None)
        return ref[...]

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
