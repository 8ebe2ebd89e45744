"""Functions with custom derivatives, and derivatives that must stay stable."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

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


@pytest.mark.fast_every(12)
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


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_loss_by_logistic_functions_has_gradients_at_every_level(level, dtype):
    # Its rule adds tangents to a row, which at O2 was clamped as a mask would be.
    labels = jnp.eye(4)[jnp.arange(len(X)) % 4]

    def fun(w, x):
        return jnp.mean(optax.sigmoid_binary_cross_entropy(jnp.tanh(x @ w), labels))

    cast = ols.autocast(fun, dtype, level=level)
    assert_close(jax.grad(cast)(W, X), jax.grad(fun)(W, X), 2e-2)


LOOPS = {
    "scan": lambda body, x: jax.lax.scan(lambda c, _: (body(c), c), x, length=2)[1][1],
    "carry": lambda body, x: jax.lax.scan(lambda c, _: (body(c), None), x, length=2)[0],
    "branch": lambda body, x: jax.lax.cond(True, body, body, x),
    "jit": lambda body, x: jax.jit(body)(x),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_rule_with_a_loop_over_tangents_has_gradients_at_every_level(kind, level):
    zeros = jnp.zeros((3, 4))

    @jax.custom_jvp
    def shift(x):
        return x + 1.0

    @shift.defjvp
    def _(primals, tangents):
        return shift(*primals), LOOPS[kind](lambda t: t + zeros, *tangents)

    def fun(w, x):
        return jnp.mean(shift(x @ w) ** 2)

    cast = ols.autocast(fun, level=level)
    assert_close(jax.grad(cast)(W, X), jax.grad(fun)(W, X), 2e-2)


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


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_of_a_function_with_a_rule_that_closes_over_a_constant(level):
    @jax.custom_vjp
    def fun(x):
        return x @ W

    fun.defvjp(lambda x: (x @ W, None), lambda _, cotangent: (cotangent @ W.T,))

    def loss(x):
        return jnp.mean(fun(jnp.tanh(x)) ** 2)

    cast = ols.autocast(loss, level=level)
    assert_close(jax.grad(cast)(X), jax.grad(loss)(X))
    assert set(dtypes_of(jax.grad(cast), X)) == {HALF}


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


@pytest.mark.slow
def test_no_tracer_is_leaked():
    def fun(w, x):
        return jnp.mean(jax.nn.relu(own_layer(w, x)))

    with jax.checking_leaks():
        grads = jax.jit(jax.grad(ols.autocast(fun)))(W, X)
    assert_close(grads, jax.grad(fun)(W, X))


def results_of_all_kinds(w, x):
    """A product, and results that have no derivatives."""
    y = x @ w
    return y, jnp.argmax(y, -1), y > 0, jax.random.key(1), jnp.int8(2)


def float0_of(leaf):
    return np.zeros(leaf.shape, jax.dtypes.float0)


route_vjp = jax.custom_vjp(results_of_all_kinds)
route_vjp.defvjp(
    lambda w, x: (results_of_all_kinds(w, x), (w, x)),
    lambda rest, cts: (3 * rest[1].T @ cts[0], 3 * cts[0] @ rest[0].T),
)
route_jvp = jax.custom_jvp(results_of_all_kinds)


@route_jvp.defjvp
def route_jvp_rule(primals, tangents):
    (w, x), (w_dot, x_dot) = primals, tangents
    y, *others = results_of_all_kinds(w, x)
    dot = 3 * (x_dot @ w + x @ w_dot)
    return (y, *others), (dot, *map(float0_of, others))


@pytest.mark.fast_every(8)
@pytest.mark.parametrize("route", [route_vjp, route_jvp])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f, jax.checkpoint, jax.vmap])
def test_functions_with_rules_and_results_without_derivatives_run_low(route, wrap):
    def fun(w, x):
        y, best, positive, key, two = route(w, x)
        y = jnp.where(positive, y, y / two.astype(y.dtype))
        y = y * jax.random.uniform(key, y.shape)
        return jnp.mean(jnp.take_along_axis(y, best[:, None], -1) ** 2)

    args = (W[None], X[None]) if wrap is jax.vmap else (W, X)
    wrapped = wrap(fun)
    assert_autocast(lambda *args: jnp.sum(wrapped(*args)), *args)


@pytest.mark.parametrize("route", [route_vjp, route_jvp])
def test_a_function_whose_results_have_no_derivatives_has_gradient_zero(route):
    def fun(w, x):
        return jnp.mean(route(w, x)[1] * jnp.sin(1.0))

    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(jax.grad(ols.autocast(fun))(W, X), 0)


def test_derivative_rules_can_take_integers_keys_and_static_arguments():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def layer(act, w, count, flag, nothing, key):
        assert nothing is None
        noise = jax.random.normal(key, w.shape)
        return jnp.where(flag, act(w @ w), noise), count

    def forward(act, w, count, flag, nothing, key):
        return layer(act, w, count, flag, nothing, key), (w, count)

    def backward(act, rest, cts):
        w, count = rest
        assert cts[1].dtype == jax.dtypes.float0
        return cts[0] @ w.T * count.astype(w.dtype), float0_of(count), None, None, None

    layer.defvjp(forward, backward)
    others = jnp.int32(3), jnp.array(True), None, jax.random.key(0)

    def fun(w):
        y, count = layer(jnp.tanh, w, *others)
        return jnp.mean(y**2) * count.astype(y.dtype)

    assert_autocast(fun, W)


@pytest.mark.parametrize("optimize", [False, True])
def test_rules_inside_rules_keep_each_rule(optimize):
    @jax.custom_vjp
    def outer(w, x):
        return route_jvp(w, route_vjp(w, x)[0])[:2]

    outer.defvjp(
        lambda w, x: (outer(w, x), (w, x)),
        lambda rest, cts: jax.vjp(
            lambda w, x: route_vjp(w, route_jvp(w, x)[0])[0], *rest
        )[1](2 * cts[0]),
        optimize_remat=optimize,
    )

    def fun(w, x):
        return jnp.mean(jax.checkpoint(outer)(w, x)[0] ** 2)

    cast = ols.autocast(fun)
    assert_close(cast(W, X), fun(W, X))
    assert_close(jax.grad(cast)(W, X), jax.grad(fun)(W, X))


@pytest.mark.slow
def test_implicit_and_linear_rules_give_right_gradients():
    def fun(w, x):
        matrix = 3 * jnp.eye(4) + w / 4
        root = jax.lax.custom_root(
            lambda y: matrix @ y + jnp.tanh(y) - x[0],
            jnp.zeros(4),
            lambda f, y: jax.lax.fori_loop(0, 20, lambda _, y: y - f(y) / 4, y),
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        )
        solution = jax.lax.custom_linear_solve(
            lambda y: matrix @ y,
            x[1],
            lambda _, b: jnp.linalg.solve(matrix, b),
            lambda _, b: jnp.linalg.solve(matrix.T, b),
        )
        moved = jax.custom_derivatives.linear_call(
            lambda w, y: y @ w, lambda w, ct: ct @ w.T, w, x
        )
        return jnp.sum(root**2) + jnp.sum(solution**2) + jnp.mean(moved**2)

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    assert_close(jax.grad(ols.autocast(fun), 1)(W, X), jax.grad(fun, 1)(W, X))


@pytest.mark.fast_every(2)
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


@pytest.mark.slow
@pytest.mark.parametrize("fun", [jax.nn.relu, lambda y: own_layer(y, y.T), jnp.square])
def test_rules_work_in_shard_map_outside_jit_as_they_do_without_autocast(fun):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}

    def loss(x, wrap):
        mapped = wrap(lambda x: fun(x @ W))
        return jnp.mean(jax.shard_map(mapped, **specs, check_vma=False)(x))

    assert_close(jax.grad(loss)(X, ols.autocast), jax.grad(loss)(X, lambda f: f))
