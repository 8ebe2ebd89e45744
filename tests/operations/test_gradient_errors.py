"""docs/guides/debugging_a_skipped_step.md, "Is the gradient right?"."""

import io

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
    trace_operations,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(8, 4)) / 3, jnp.float32),
    "b": jnp.zeros(4),
}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (ols.autocast(loss_fn), jnp.float16),
        pytest.param(loss_fn, jnp.bfloat16, marks=pytest.mark.slow),
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


def test_flushed_and_infinite_gradients_are_counted():
    factors = {  # The gradient of each row of a kernel.
        "small": jnp.float32([2.0**-30, 2.0**-30, 1, 0]),
        "one infinite": jnp.float32([0, 0, 1, 2.0**17]),
        "all infinite": jnp.float32([2.0**17] * 4),
    }
    params = {name: jnp.ones((2, 4)) for name in factors}
    params |= {"empty": jnp.ones(0), "root": jnp.float32([0, 4]), "complex": 1j * X[0]}

    def fun(params, x):
        products = [jnp.sum(x @ params[name] * factors[name]) for name in factors]
        roots = jnp.sum(jnp.sqrt(params["root"]))
        return sum(products) + roots + jnp.sum(jnp.abs(params["complex"]) ** 2)

    def errors_of(loss_scale):
        return gradient_errors(fun, params, jnp.ones((1, 2)), loss_scale=loss_scale)

    near, errors, scaled = pytest.approx, errors_of(1.0), errors_of(2.0**15)
    norms = [near(2**0.5 * np.linalg.norm(row)) for row in factors.values()]
    assert errors["small"] == (near(0, abs=1e-8), 2 / 3, 0, norms[0], 8)
    assert scaled["small"] == (0, 0, 0, norms[0], 8)
    # Infinite entries are left out of the error, unless nothing is left.
    assert errors["one infinite"] == (0, 0, 0.25, norms[1], 8)
    assert errors["all infinite"] == (np.inf, 0, 1, norms[2], 8)
    assert errors["empty"] == (0, 0, 0, 0, 0)
    assert errors["root"] == (0, 0, 0, 0.25, 2)  # Infinite in float32 too.
    assert errors["complex"] == (0, 0, 0, near(2 * np.linalg.norm(X[0])), 8)


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


def test_a_model_that_casts_by_itself_has_a_reference():
    def low(w):
        return jnp.mean((X.astype(jnp.float16) @ w.astype(jnp.float16)) ** 2)

    settings = {"level": "O0", "loss_scale": 2.0**10}
    (alone,) = gradient_errors(low, PARAMS["w"], **settings).values()
    (error,) = gradient_errors(
        low, PARAMS["w"], **settings, reference=lambda w: jnp.mean((X @ w) ** 2)
    ).values()
    assert alone.relative_error < error.relative_error / 2 < 0.005


class Net(nnx.Module):
    """It has one layer, in float16, twice."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(8, 8, rngs=rngs, param_dtype=jnp.float16)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.same_layer = self.layer

    def __call__(self, x):
        return jnp.mean(self.same_layer(jnp.tanh(self.norm(self.layer(x)))) ** 4)


@pytest.mark.slow
def test_nnx_modules_can_be_arguments_or_merged_and_are_not_changed():
    net = Net()
    before = jax.tree.map(jnp.copy, nnx.state(net))
    errors = gradient_errors(lambda net, x: net(x), net, X)
    names = {name.removesuffix("/value") for name in errors}
    assert names == {"layer/kernel", "layer/bias", "norm/scale", "norm/bias"}
    assert all(0 < error.relative_error < 0.02 for error in errors.values())
    assert trace_operations(lambda net, x: net(x), net, X)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(net))

    graph, params, rest = nnx.split(net, nnx.Param, ...)

    @ols.autocast
    def merged(params, rest, x):
        return nnx.merge(graph, params, rest)(x)

    of_merged = gradient_errors(merged, params, rest, X)
    assert sorted(of_merged.values()) == sorted(errors.values())


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
