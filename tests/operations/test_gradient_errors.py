"""`gradient_errors`: the gradient in half precision beside that in float32."""

import functools
import io

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lossscale as ols
from optax_lossscale.diagnostics import (
    GradientError,
    gradient_errors,
    print_gradient_errors,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(8, 4)) / 3, jnp.float32),
    "b": jnp.zeros(4),
}
ROUNDING = 2.0**-11


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (loss_fn, jnp.float16),
        (ols.autocast(loss_fn), jnp.float16),
        (loss_fn, jnp.bfloat16),
    ],
)
def test_the_error_is_that_of_the_gradient_of_autocast(fun, dtype):
    errors = gradient_errors(fun, PARAMS, X, dtype=dtype, loss_scale=2.0**10)
    assert set(errors) == {"w", "b"}
    grads, right = (
        jax.grad(f)(PARAMS, X) for f in (ols.autocast(loss_fn, dtype), loss_fn)
    )
    for name, error in errors.items():
        difference, norm = map(
            jnp.linalg.norm, (grads[name] - right[name], right[name])
        )
        np.testing.assert_allclose(error.relative_error, difference / norm, rtol=0.1)
        assert (error.flushed, error.nonfinite) == (0, 0)
        np.testing.assert_allclose(error.norm, norm, rtol=1e-5)
        assert error.size == right[name].size


SMALL = [2.0**-30, 2.0**-30, 1.0, 1.0]  # Two of four gradients are flushed in float16.


@pytest.mark.parametrize(
    ("factors", "loss_scale", "flushed", "nonfinite"),
    [
        (SMALL, 1, 0.5, 0),
        (SMALL, 2.0**15, 0, 0),
        ([1, 1, 1, 2.0**17], 1, 0, 0.25),
        ([2.0**17] * 4, 1, 0, 1),
    ],
)
def test_flushed_and_infinite_gradients_are_counted(
    factors, loss_scale, flushed, nonfinite
):
    def fun(params, x):
        return jnp.sum(x @ params["w"] * jnp.asarray(factors))

    x = jnp.ones((16, 8))
    error = gradient_errors(fun, PARAMS, x, loss_scale=loss_scale)["w"]
    assert (error.flushed, error.nonfinite) == (flushed, nonfinite)
    if nonfinite:  # Left out of the error, unless nothing is left.
        assert error.relative_error == (np.inf if nonfinite == 1 else 0)
        assert 0 < error.norm < np.inf


def test_entries_that_are_infinite_in_float32_too_are_left_out():
    error = gradient_errors(lambda w: jnp.sum(jnp.sqrt(w)), jnp.array([0.0, 4.0]))
    (error,) = error.values()
    assert (error.relative_error, error.nonfinite, error.norm) == (0, 0, 0.25)


@pytest.mark.slow
def test_a_gradient_that_is_wrong_and_finite_is_found():
    hits = jnp.zeros(16384, int)  # Ones, added up in float16, stop at 2048.

    def fun(params, x):
        rows = params["table"][hits].astype(jnp.float32)
        return loss_fn(params, x) + jnp.sum(rows)

    params = {**PARAMS, "table": jnp.ones(1, jnp.float16)}
    errors = gradient_errors(fun, params, X, level="O0")
    assert errors["table"].relative_error == 1 - 2048 / 16384
    assert errors["w"].relative_error == 0


@pytest.mark.slow
def test_half_precision_parameters_are_compared_with_float32_ones():
    half = ols.cast_params(PARAMS)
    table = gradient_errors(loss_fn, half, X.astype(jnp.float16), level="O0")
    assert 0 < table["w"].relative_error < 8 * ROUNDING
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    right = jax.grad(loss_fn)(wide, X.astype(jnp.float16).astype(jnp.float32))
    norm = np.linalg.norm(np.asarray(right["w"]).ravel())
    np.testing.assert_allclose(table["w"].norm, norm, rtol=1e-5)


@pytest.mark.slow
def test_a_model_that_casts_by_itself_has_a_reference():
    def loss(params, dtype):
        return jnp.mean(nn.Dense(4, dtype=dtype).apply({"params": params}, X) ** 2)

    params = {"kernel": PARAMS["w"], "bias": PARAMS["b"]}
    low, wide = (functools.partial(loss, dtype=d) for d in (jnp.float16, jnp.float32))
    alone = gradient_errors(low, params, level="O0", loss_scale=2.0**10)
    errors = gradient_errors(
        low, params, level="O0", loss_scale=2.0**10, reference=wide
    )
    assert alone["kernel"].relative_error < errors["kernel"].relative_error < 0.005


class Net(nnx.Module):
    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(8, 4, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_nnx_modules_can_be_arguments_and_are_not_changed(dtype):
    model = Net(dtype)
    before = jax.tree.map(jnp.copy, nnx.state(model))
    errors = gradient_errors(lambda model, x: jnp.mean(model(x) ** 4), model, X)
    errors = {name.removesuffix("/value"): error for name, error in errors.items()}
    assert set(errors) == {"layer/kernel", "layer/bias", "norm/scale", "norm/bias"}
    assert 0 < errors["layer/kernel"].relative_error < 0.02
    assert 0 < errors["norm/scale"].relative_error < 0.002
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_a_module_may_be_merged_from_states():
    net = Net(jnp.float32)
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    @ols.autocast
    def merged(params, rest, x):
        return jnp.mean(jnp.tanh(nnx.merge(graph, params, rest)(x)) ** 2)

    errors = gradient_errors(merged, params, rest, X)
    of_module = gradient_errors(lambda net, x: jnp.mean(jnp.tanh(net(x)) ** 2), net, X)
    assert sorted(errors.values()) == sorted(of_module.values())


def test_a_variable_can_be_an_argument():
    weights = nnx.Param(PARAMS["w"].astype(jnp.float16))
    (error,) = gradient_errors(
        lambda w, x: jnp.mean((x @ w[...].astype(x.dtype)) ** 2), weights, X
    ).values()
    assert 0 < error.relative_error < 4 * ROUNDING
    assert weights.dtype == jnp.float16


def test_variables_that_a_module_has_twice_are_one_parameter():
    class Tied(nnx.Module):
        def __init__(self):
            self.first = self.second = nnx.Param(jnp.ones((2, 2)))

    def loss_fn(model, x):
        return jnp.mean(x @ model.first[...] @ model.second[...])

    errors = gradient_errors(loss_fn, Tied(), np.ones((1, 2), np.float32))
    (name,) = errors
    assert name == "first/value"
    # The sum over both places: in each, all four entries are 1.
    assert errors[name].norm == 4


def test_a_zero_gradient_an_empty_and_a_complex_parameter_have_errors():
    params = {"unused": jnp.ones(2), "empty": jnp.ones(0), "c": jnp.ones(2) * 1j}

    def fun(params, x):
        return loss_fn(PARAMS, x) + jnp.sum(jnp.abs(params["c"]) ** 2)

    errors = gradient_errors(fun, params, X)
    assert errors["unused"] == GradientError(0.0, 0.0, 0.0, 0.0, 2)
    assert errors["empty"] == GradientError(0.0, 0.0, 0.0, 0.0, 0)
    np.testing.assert_allclose(errors["c"].norm, 2 * 2**0.5, rtol=1e-6)


def test_the_worst_gradients_are_printed_first():
    good = GradientError(1e-4, 0.0, 0.0, 1.0, 10)
    flushed = good._replace(flushed=0.5)
    wrong = good._replace(relative_error=0.7)
    infinite = good._replace(nonfinite=0.1)
    errors = {"good": good, "flushed": flushed, "infinite": infinite, "wrong": wrong}
    file = io.StringIO()
    print_gradient_errors(errors, limit=3, file=file)
    lines = file.getvalue().splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["gradient", "infinite", "wrong", "flushed", "..."]
    assert lines[2].split() == ["wrong", "7.0e-01", "0.0%", "0.0%", "1", "10"]


@pytest.mark.parametrize(
    ("fun", "args"),
    [("loss", (PARAMS,)), (loss_fn, ({"w": 1},)), (lambda p, x: x, (PARAMS, X))],
)
def test_what_cannot_be_differentiated_is_refused(fun, args):
    with pytest.raises(TypeError, match="must"):
        gradient_errors(fun, *args)
