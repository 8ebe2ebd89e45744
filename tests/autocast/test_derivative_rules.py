"""Products in derivative rules of the user's run low too (docs/guides/autocast.md)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_lossscale as ols
from helpers.under_autocast import (
    W,
    X,
    assert_autocast,
    assert_close,
    integers,
)


def test_a_backward_rule_computes_the_forward_pass_again_to_the_bit():
    """Loops of Equinox do so, and decide by the numbers which steps to take."""

    @jax.custom_vjp
    def layer(w):
        return w @ w

    layer.defvjp(lambda w: (layer(w), w), lambda w, cotangent: (cotangent * (w @ w),))
    result, pullback = jax.vjp(ols.autocast(layer), W)
    (again,) = pullback(jnp.ones_like(result))
    np.testing.assert_array_equal(again, result)


def test_a_rule_for_tangents_can_hold_products_in_a_loop_and_a_branch():
    @jax.custom_jvp
    def shift(x):
        return x + 1.0

    @shift.defjvp
    def _(primals, tangents):
        step = lax.scan(lambda t, _: (t @ W, None), *tangents, length=2)[0]
        return shift(*primals), lax.cond(True, lambda t: t @ W, lambda t: t, step)

    assert_autocast(lambda w, x: jnp.mean(shift(x @ w) ** 2), W, X)


def test_rules_can_ask_which_arguments_have_derivatives():
    asked = []

    @jax.custom_vjp
    def scaled(x, y):
        return x * 2 + y

    def forward(x, y):
        asked.append((x.perturbed, y.perturbed))
        return scaled(x.value, y.value), None

    scaled.defvjp(forward, lambda _, ct: (ct * 2, ct), symbolic_zeros=True)

    def fun(w, x):
        return jnp.mean(scaled(x @ w, x) ** 2)

    assert_close(jax.grad(ols.autocast(fun))(W, X), jax.grad(fun)(W, X))
    assert set(asked) == {(True, False)}


def float0_of(leaf):
    return np.zeros(leaf.shape, jax.dtypes.float0)


@pytest.mark.slow
def test_rules_can_take_integers_keys_and_static_arguments():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def layer(act, w, count, nothing, key):
        assert nothing is None
        return act(w @ w) + jax.random.normal(key, w.shape), count

    def forward(act, w, count, nothing, key):
        return layer(act, w, count, nothing, key), (w, count)

    def backward(act, saved, cts):
        w, count = saved
        assert cts[1].dtype == jax.dtypes.float0
        return cts[0] @ w.T * count.astype(w.dtype), float0_of(count), None, None

    layer.defvjp(forward, backward)

    def fun(w):
        y, count = layer(jnp.tanh, w, jnp.int32(3), None, jax.random.key(0))
        return jnp.mean(y**2) * count.astype(y.dtype)

    assert_autocast(fun, W)


def test_a_rule_may_give_a_product_no_gradient():
    @jax.custom_vjp
    def first(a, b):
        return a + 0 * jnp.sum(b)

    first.defvjp(lambda a, b: (first(a, b), None), lambda _, ct: (ct, None))

    def fun(w):
        return first(jnp.sum(w), X @ w)

    assert jnp.all(jax.grad(ols.autocast(fun))(W) == 1)


def test_gradients_of_integers_are_float0_inside_and_outside():
    def fun(params):
        return jnp.mean((X @ params["w"]) ** 2)

    params = {"w": W, "steps": jnp.arange(3)}
    grad = functools.partial(jax.grad, allow_int=True)
    expected = grad(fun)(params)
    for grads in (ols.autocast(grad(fun))(params), grad(ols.autocast(fun))(params)):
        assert grads["steps"].dtype == jax.dtypes.float0
        assert_close(grads["w"], expected["w"])


def test_a_rule_in_a_marked_function_may_read_numbers():
    rule = jax.custom_vjp(lambda x: jnp.sum(jnp.sin(x)))
    rule.defvjp(
        lambda x: (jnp.sum(jnp.sin(x)), x),
        lambda x, g: (g * jnp.cos(x) if float(g) > 0 else x,),
    )
    grads = jax.grad(ols.autocast(ols.full_precision(rule)))(X)
    np.testing.assert_array_equal(grads, jax.grad(rule)(X))


def test_what_a_backward_rule_returns_is_rounded_unless_it_is_marked():
    numbers = integers(64, 4)

    def gradient(mark):
        layer = jax.custom_vjp(lambda w: numbers @ w)
        layer.defvjp(lambda w: (numbers @ w, None), lambda _, g: (mark(numbers.T, g),))
        return jax.vjp(ols.autocast(layer), W)[1](numbers)[0]

    exact = numbers.T @ numbers
    rounded = exact.astype(jnp.float16).astype(jnp.float32)
    np.testing.assert_array_equal(gradient(jnp.dot), rounded)
    np.testing.assert_array_equal(gradient(ols.full_precision(jnp.dot)), exact)
    assert jnp.any(exact != rounded)


@pytest.mark.parametrize(
    ("mark", "low"),
    [
        (lambda fun: ols.autocast(jax.named_scope("scope")(fun), high=["scope"]), True),
        (lambda fun: ols.autocast(ols.full_precision(fun)), False),
    ],
)
def test_a_kernel_in_rules_gets_what_the_function_outside_its_rules_gets(mark, low):
    seen = []

    @ols.low_precision
    def kernel(x, w):
        seen.append(x.dtype)
        return x @ w

    rule = jax.custom_vjp(lambda x, w: kernel(x, w))
    rule.defvjp(
        lambda x, w: (kernel(x, w), (x, w)),
        lambda xw, g: (kernel(g, xw[1].T), kernel(xw[0].T, g)),
    )
    fun, w = mark(lambda w: jnp.sum(rule(X @ w, w) ** 2)), W + 2.0**-12
    assert jax.value_and_grad(fun)(w)[0] == fun(w)
    assert {dtype == jnp.float16 for dtype in seen} == {low}
