"""Arguments and results of functions under autocast."""

import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.under_autocast import W, X, assert_close


def test_numpy_scalars_are_static_and_numpy_arrays_are_arrays():
    cast = ols.autocast(lambda x, rows: x.reshape(rows, -1))
    assert cast(np.ones(6), np.int64(2)).shape == (2, 3)
    assert cast(np.ones(6), np.int64(2)).dtype == jnp.float32


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
