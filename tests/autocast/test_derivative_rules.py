"""Functions with custom derivatives, and derivatives that must stay stable."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.programs import dtypes_of
from helpers.under_autocast import (
    HALF,
    W,
    X,
    assert_autocast,
    assert_close,
    own_layer,
    relative_error,
)


def test_the_gradient_of_relu_at_zero_is_zero():
    def fun(w, x):
        return jnp.sum(jax.nn.relu(x @ w))

    grads = jax.grad(ols.autocast(fun))(jnp.zeros((4, 4)), X)
    np.testing.assert_array_equal(grads, 0)


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.softmax,
        jax.nn.log_softmax,
        jax.nn.logsumexp,
        jax.nn.softplus,
        jax.nn.gelu,
        jax.nn.silu,
        jax.nn.log_sigmoid,
        jax.nn.relu6,
        jax.nn.elu,
        jnp.linalg.norm,
    ],
)
def test_numerically_stable_functions_stay_stable(function):
    def fun(w, x):
        y = x @ w
        return jnp.mean(function(y) * y)

    x = jnp.concatenate([X, 40 * X, jnp.zeros((1, 4)) + 1e-3])
    assert_close(ols.autocast(fun)(W, x), fun(W, x))
    assert_close(jax.grad(ols.autocast(fun))(W, x), jax.grad(fun)(W, x), 2e-2)


def test_a_derivative_rule_that_reads_its_result_reads_the_rounded_result():
    @jax.custom_jvp
    def own_exp(x):
        return jnp.exp(x)

    @own_exp.defjvp
    def own_exp_jvp(primals, tangents):
        result = own_exp(*primals)
        return result, result * tangents[0]

    def fun(w, x):
        return jnp.mean(own_exp(x @ w) @ w)

    assert_autocast(fun, W, X)
    (_, residuals) = jax.vjp(lambda w: ols.autocast(fun)(w, X), W)
    kept = [leaf.dtype for leaf in jax.tree.leaves(residuals)]
    assert jnp.float16 in kept


def test_derivative_rules_can_close_over_arrays_and_use_symbolic_zeros():
    scale = jnp.arange(1.0, 5.0)
    asked = []

    @jax.custom_vjp
    def scaled(x, y):
        return x * scale[None] + y

    def forward(x, y):
        asked.append((x.perturbed, y.perturbed))
        return scaled(x.value, y.value), None

    def backward(_, cotangent):
        return cotangent * scale[None], cotangent

    scaled.defvjp(forward, backward, symbolic_zeros=True)

    def fun(w, x):
        return jnp.mean(scaled(x @ w, x) ** 2)

    assert_autocast(fun, W, X, grad=False)
    asked.clear()
    assert_close(jax.grad(ols.autocast(fun))(W, X), jax.grad(fun)(W, X))
    assert set(asked) == {(True, False)}
    filtered = eqx.filter_custom_vjp(lambda x: x @ x)
    filtered.def_fwd(lambda perturbed, x: (x @ x, x))
    filtered.def_bwd(lambda x, ct, perturbed, _: ct @ x.T + x.T @ ct)

    def of_filtered(x):
        return jnp.mean(filtered(x) ** 2)

    grads = jax.grad(ols.autocast(of_filtered))(W)
    assert_close(grads, jax.grad(of_filtered)(W))


def test_no_tracer_is_leaked():
    def fun(w, x):
        return jnp.mean(jax.nn.relu(own_layer(w, x)))

    with jax.checking_leaks():
        grads = jax.jit(jax.grad(ols.autocast(fun)))(W, X)
    assert_close(grads, jax.grad(fun)(W, X))


def test_functions_with_derivative_rules_and_integer_results_run_as_written():
    @jax.custom_vjp
    def route(x):
        return jax.lax.top_k(x, 1)

    route.defvjp(lambda x: (route(x), x), lambda x, cotangents: (jnp.zeros_like(x),))

    def fun(w, x):
        values, places = route(x @ w)
        return jnp.sum(values * places.astype(jnp.float32))

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    np.testing.assert_array_equal(jax.grad(ols.autocast(fun))(W, X), 0)


@pytest.mark.parametrize("size", [1e-4, 300.0])
@pytest.mark.parametrize("divide", [jnp.divide, jnp.atan2])
def test_the_derivative_of_a_quotient_neither_overflows_nor_vanishes(divide, size):
    eye = jnp.eye(2)

    def fun(b, a):
        return jnp.sum(divide(a @ eye, b @ eye))

    a, b = jnp.full((2, 2), size), jnp.full((2, 2), 1.5 * size)
    for level in ("O1", "O2", "O3"):
        assert relative_error(fun, b, a, level=level) < 1e-2
    assert dtypes_of(ols.autocast(fun), b, a) == [HALF] * 2


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_a_layer_with_a_rule_can_be_differentiated_by_different_arguments(wrap):
    data = jax.random.normal(jax.random.key(1), (8, 4))
    layer = wrap(ols.autocast(lambda x, w: own_layer(w, x)))

    def fun(first, second, layer=layer):
        return jnp.mean(layer(layer(data, first), second) ** 2)

    def plain(first, second):
        return fun(first, second, lambda x, w: x @ w)

    weights = W, W.T
    grads = jax.grad(fun, (0, 1))(*weights)
    assert_close(grads, jax.grad(plain, (0, 1))(*weights), 2e-2)


def test_gelu_of_large_numbers_has_finite_gradients():
    def fun(w, x):
        return jnp.sum(jax.nn.gelu(x @ w))

    w = 100 * jnp.eye(4)
    assert_close(jax.grad(ols.autocast(fun))(w, X), jax.grad(fun)(w, X))
    assert ("float16",) in dtypes_of(ols.autocast(fun), w, X, name="tanh")
