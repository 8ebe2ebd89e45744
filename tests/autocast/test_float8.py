"""Products of float8 operands under autocast.

Expected values come from a reference in NumPy: float8 numbers of `ml_dtypes`, products
in float64.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from _lib.compiled_text import sent_arrays
from helpers.compat import enable_x64
from helpers.programs import equations_of
from helpers.under_autocast import dtypes_of, own_layer, products_of

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
RNG = np.random.default_rng(0)
W = jnp.asarray(0.1 * RNG.normal(size=(32, 48)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(16, 32)), jnp.float32)
to_float8 = functools.partial(ols.autocast, dtype=jnp.float8_e4m3fn)


def quantized(x, dtype, low):
    """The factor in float8 as float64, and the exponent of its scale."""
    x = np.asarray(x).astype(low).astype(np.float64)
    largest = np.max(np.abs(x), where=np.isfinite(x), initial=0)
    top = float(ml_dtypes.finfo(dtype).max)
    exponent = int(np.floor(np.log2(top / largest))) if largest else 0
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(np.isfinite(x), np.ldexp(x, exponent), np.nan)
        return scaled.astype(np.float32).astype(dtype).astype(np.float64), exponent


def product(x, y, dtypes=(E4M3, E4M3), low=ml_dtypes.bfloat16, result=None):
    """Factors are rounded to the low dtype first, because such copies are saved."""
    (x, i), (y, j) = (quantized(a, d, low) for a, d in zip((x, y), dtypes, strict=True))
    result = low if result is None else result
    return np.ldexp(x @ y, -i - j).astype(np.float32).astype(result).astype(np.float32)


def dot(w, x):
    return x @ w


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


dot_in_float8 = to_float8(dot)
jitted = jax.jit(dot_in_float8)


def in_float8(fun, *args):
    """The float8 dtypes of the factors of each product that has them."""
    products = [e.params.get("product") for e in products_of(fun, *args)]
    found = [product.float8 for product in products if product is not None]
    return [tuple(map(str, dtypes)) for dtypes in found if dtypes is not None]


VALUES, WITH_COTANGENT = ("float8_e4m3fn",) * 2, ("float8_e5m2", "float8_e4m3fn")


@pytest.mark.parametrize("size", [0.0, 1.0, 2.0**-100, 2.0**100, 1e-30, 1e37])
def test_a_product_is_that_of_the_scaled_and_rounded_factors(size):
    x = X * jnp.float32(size)
    np.testing.assert_array_equal(jitted(W, x), product(x, W))


@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext(), enable_x64(True), jax.disable_jit()]
)
def test_float8_products_are_the_same_in_any_mode(mode):
    with mode:
        np.testing.assert_array_equal(dot_in_float8(W, X), product(X, W))


@given(
    st.integers(-50, 50), st.integers(-50, 50), st.sampled_from([1.75, 1.0, 1.7500001])
)
def test_powers_of_two_and_the_ends_of_the_range_are_scaled_exactly(i, j, largest):
    x = jnp.asarray(np.ldexp(np.float32(largest), i - RNG.integers(0, 5, X.shape)))
    w = jnp.asarray(np.ldexp(np.float32(1.75), j - RNG.integers(0, 5, W.shape)))
    x, w = x.at[0, 0].set(np.ldexp(np.float32(largest), i)), w.astype(jnp.float32)
    result = jitted(w, x)
    np.testing.assert_array_equal(result, product(x, w))
    assert np.isfinite(result).all()


def test_the_result_is_rounded_to_the_other_dtype():
    fun = jax.jit(to_float8(dot, otherwise=jnp.float16))
    np.testing.assert_array_equal(fun(W, X), product(X, W, low=np.float16))
    # Its sum of scaled factors alone would be beyond the range of float16.
    assert jnp.isfinite(fun(W, 100 * jnp.ones_like(X))).all()


def test_gradients_are_products_with_cotangents_in_e5m2():
    cotangent = jnp.asarray(RNG.normal(size=(16, 48)) * 1e-6, jnp.bfloat16)

    @jax.jit
    def gradients(cotangent):
        return jax.vjp(dot_in_float8, W, X)[1](cotangent)

    for_w, for_x = gradients(cotangent.astype(jnp.float32))
    expected = product(cotangent.T, X, (E5M2, E4M3), result=np.float32).T
    np.testing.assert_allclose(for_w, expected, rtol=1e-6)
    expected = product(cotangent, W.T, (E5M2, E4M3), result=np.float32)
    np.testing.assert_allclose(for_x, expected, rtol=1e-6)
    assert for_w.dtype == for_x.dtype == jnp.float32


def test_all_three_products_of_a_layer_are_in_float8_and_a_weight_gradient_in_float32():
    grad = jax.grad(to_float8(lambda w, x: jnp.sum(dot(w, x) @ w.T) ** 2), 0)
    expected = [VALUES, VALUES, *[WITH_COTANGENT] * 3]
    assert in_float8(grad, W, X) == expected
    results = [str(e.outvars[0].aval.dtype) for e in products_of(grad, W, X)]
    assert results == ["bfloat16"] * 2 + ["float32"] * 3
    casts = [
        str(e.invars[0].aval.dtype)
        for e in equations_of(jax.make_jaxpr(grad)(W, X))
        if e.primitive.name == "convert_element_type"
    ]
    assert set(casts) <= {"float32", "bfloat16"}  # No float8 number is cast up.


def test_no_product_of_a_second_derivative_has_two_factors_in_e5m2():
    hessian = jax.hessian(to_float8(lambda d: loss(W + d[:, None], X)))
    for found in in_float8(hessian, jnp.zeros(32)):
        assert found in (VALUES, WITH_COTANGENT, WITH_COTANGENT[::-1])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_number_that_is_not_finite_spoils_its_own_row_only(bad):
    x = X.at[3, 5].set(bad)
    result = jitted(W, x)
    assert jnp.isnan(result[3]).all()
    expected = product(x.at[3, 5].set(0), W)
    np.testing.assert_array_equal(np.delete(result, 3, 0), np.delete(expected, 3, 0))


def test_gradients_of_a_batch_that_is_not_finite_are_not_finite():
    """So loss scaling skips the step."""
    grads = jax.jit(jax.grad(to_float8(loss)))(W, X.at[0, 0].set(jnp.inf))
    assert not ols.all_finite(grads)


# --- Which products ---------------------------------------------------------------


IMAGE, KERNEL = jnp.ones((1, 16, 16, 16)), jnp.ones((16, 16, 3, 3))
NOT_FLOAT8 = {
    "of 16 x 32 x 30, 30 is not a multiple of 16": (dot, W[:, :30], X),
    "of 1 x 32 x 30, 1 and 30 are not multiples of 16": (dot, W[:, :30], X[:1]),
    "a convolution": (lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME"), KERNEL, IMAGE),
    "a ragged product": (
        lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([8, 8])),
        jnp.ones((2, 32, 16)),
        X,
    ),
    "batch dimensions, as in attention": (jnp.matmul, *[jnp.ones((2, 16, 16))] * 2),
    "in a function with derivative rules of its own": (own_layer, W, X),
}


@pytest.mark.parametrize("reason", NOT_FLOAT8)
def test_the_report_says_why_a_product_is_not_in_float8(capsys, reason):
    fun, *args = NOT_FLOAT8[reason]
    ols.autocast_report(to_float8(fun), *args)
    (row,) = capsys.readouterr().out.splitlines()[1:-1]
    assert reason in row
    assert row.split()[2] == "bfloat16"


def test_the_report_says_that_a_product_is_in_float8(capsys):
    ols.autocast_report(dot_in_float8, W, X)
    assert "float8_e4m3fn  16x32 * 32x48" in capsys.readouterr().out


MATRICES = {
    "the left factor": lambda w, x: w.T @ jnp.tanh(x).T,
    "of heads": lambda w, x: jnp.einsum("mk,khn->mhn", x, w.reshape(32, 3, 16)),
    "under vmap": lambda w, x: jax.vmap(lambda x: jnp.tanh(x) @ w)(x),
}


@pytest.mark.parametrize("fun", MATRICES.values(), ids=MATRICES)
def test_a_product_of_two_matrices_is_in_float8(fun):
    def total(w, x):
        return sum(jnp.sum(result**2) for result in jax.tree.leaves(fun(w, x)))

    grad = jax.grad(to_float8(total))
    assert in_float8(grad, W, X) == [VALUES, WITH_COTANGENT]
    found, exact = (jax.jit(fun)(W, X) for fun in (grad, jax.grad(total)))
    error = jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)
    assert 1e-3 < error < 0.2  # The rounding of float8, of three or four digits.


@jax.custom_jvp
def linear(w, x):
    return x @ w


linear.defjvp(lambda xs, ts: (linear(*xs), xs[1] @ ts[0] + ts[1] @ xs[0]))


@pytest.mark.parametrize("fun", [own_layer, linear])
def test_functions_with_derivative_rules_are_in_the_other_dtype_in_both_passes(fun):
    """Cotangents are not rounded as values are, and a loss is the same in both."""
    total = to_float8(lambda w, x: jnp.sum(fun(w, x)))
    value_and_grad = jax.value_and_grad(total)
    assert in_float8(total, W, X) == in_float8(value_and_grad, W, X) == []
    assert dtypes_of(value_and_grad, W, X) == ["bfloat16"] * 3
    assert total(W, X) == value_and_grad(W, X)[0]


# --- Transformations --------------------------------------------------------------


def test_under_vmap_the_batch_has_one_scale():
    xs = jnp.stack([X, 100 * X])
    result = jax.jit(jax.vmap(dot_in_float8, (None, 0)))(W, xs)
    flat = product(xs.reshape(32, 32), W)
    np.testing.assert_array_equal(result, flat.reshape(2, 16, 48))


def test_no_more_is_saved_for_the_backward_pass_than_in_bfloat16():
    def saved(dtype):
        fun = ols.autocast(lambda w, x: jnp.tanh(x @ w) @ jnp.tanh(w.T), dtype)
        pullback = jax.eval_shape(lambda: jax.vjp(fun, W, X)[1])
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))

    assert saved(jnp.float8_e4m3fn) <= saved(jnp.bfloat16)


@pytest.mark.several_devices
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_scales_its_own_part(check_vma):
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P(), P("d")), "out_specs": P("d"), "check_vma": check_vma}
    fun = jax.shard_map(dot_in_float8, mesh=mesh, **specs)
    x = jnp.concatenate([X, 1000 * X])
    expected = np.concatenate([product(X, W), product(1000 * X, W)])
    np.testing.assert_array_equal(jax.jit(fun)(W, x), expected)


@pytest.mark.several_devices
def test_devices_sum_gradients_in_float32():
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, P("d"))
    w, x = jnp.ones((64, 128)), jnp.ones((64, 64))
    w, x = jax.device_put((w, x), split)
    gradient = jax.jit(jax.grad(to_float8(loss)), out_shardings=split)
    compiled = gradient.lower(w, x).compile()
    sent = list(sent_arrays(compiled.as_text()))
    gradients = [x.dtype for x in sent if not x.is_gather and x.elements == w.size]
    assert gradients == ["f32"]
    on_one_device = jax.jit(jax.grad(to_float8(loss)))(*map(np.asarray, (w, x)))
    np.testing.assert_allclose(compiled(w, x), on_one_device)
