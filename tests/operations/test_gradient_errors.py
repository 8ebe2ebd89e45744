"""`gradient_errors`: the gradient in half precision beside that in float32."""

import functools
import io

import equinox as eqx
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


@pytest.mark.parametrize("fun", [loss_fn, ols.autocast(loss_fn)])
def test_a_right_gradient_has_the_error_of_a_few_roundings(fun):
    errors = gradient_errors(fun, PARAMS, X, loss_scale=2.0**10)
    assert set(errors) == {"w", "b"}
    grads = jax.grad(loss_fn)(PARAMS, X)
    for name, error in errors.items():
        assert 0 < error.relative_error < 4 * ROUNDING
        assert (error.flushed, error.nonfinite) == (0, 0)
        np.testing.assert_allclose(error.norm, jnp.linalg.norm(grads[name]), rtol=1e-5)
        assert error.size == grads[name].size


@pytest.mark.slow
def test_the_relative_error_is_that_of_the_gradient_of_autocast():
    low = ols.autocast(loss_fn, jnp.bfloat16)
    grads, right = jax.grad(low)(PARAMS, X)["w"], jax.grad(loss_fn)(PARAMS, X)["w"]
    expected = np.linalg.norm(grads - right) / np.linalg.norm(right)
    errors = gradient_errors(loss_fn, PARAMS, X, dtype=jnp.bfloat16)
    np.testing.assert_allclose(errors["w"].relative_error, expected, rtol=0.02)


def small(params, x):
    """The gradients of two of four columns are flushed in float16."""
    return jnp.sum(x @ params["w"] * jnp.array([2.0**-30, 2.0**-30, 1.0, 1.0]))


@pytest.mark.parametrize(("loss_scale", "flushed"), [(1.0, 0.5), (2.0**15, 0.0)])
def test_a_loss_scale_keeps_small_gradients_from_being_flushed(loss_scale, flushed):
    error = gradient_errors(small, PARAMS, X, loss_scale=loss_scale)["w"]
    assert error.flushed == flushed
    assert error.nonfinite == 0


def test_an_overflow_is_counted_and_left_out_of_the_error():
    def fun(params, x):
        return jnp.sum(x @ params["w"] * jnp.array([1.0, 1.0, 1.0, 2.0**17]))

    error = gradient_errors(fun, PARAMS, jnp.ones((16, 8)))["w"]
    assert error.nonfinite == 0.25
    assert error.relative_error == 0


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
    class Net(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.linear(x))

    graph, params, rest = nnx.split(Net(), nnx.Param, ...)

    @ols.autocast
    def loss_fn(params, rest, x):
        model = nnx.merge(graph, params, rest)
        return jnp.mean(jnp.tanh(model(x)) ** 2)

    errors = gradient_errors(loss_fn, params, rest, X)
    of_module = gradient_errors(
        lambda net, x: jnp.mean(jnp.tanh(net(x)) ** 2), Net(), X
    )
    assert {repr(error) for error in errors.values()} == {
        repr(error) for error in of_module.values()
    }


def test_it_works_where_jit_is_disabled():
    expected = gradient_errors(loss_fn, PARAMS, X)
    with jax.disable_jit():
        assert gradient_errors(loss_fn, PARAMS, X) == expected


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


@pytest.mark.slow
def test_equinox_modules_can_be_arguments():
    model = eqx.nn.MLP(8, 4, 8, 1, key=jax.random.key(0))
    errors = gradient_errors(lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), model, X)
    assert len(errors) == 4
    assert max(error.relative_error for error in errors.values()) < 8 * ROUNDING


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
    ("fun", "args", "error"),
    [
        ("loss", (PARAMS,), TypeError),
        (loss_fn, ({"w": 1},), TypeError),
        (lambda p, x: x, (PARAMS, X), TypeError),
    ],
)
def test_what_cannot_be_differentiated_is_refused(fun, args, error):
    with pytest.raises(error, match="must"):
        gradient_errors(fun, *args)


def test_it_is_refused_inside_jit():
    with pytest.raises(TypeError, match="outside `jit`"):
        jax.jit(lambda x: gradient_errors(loss_fn, PARAMS, x))(X)
