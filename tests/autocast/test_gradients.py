"""Which gradients are float32 sums, and which are rounded to the low dtype.

All numbers are small integers, which float16 holds exactly, and so does float32 their
sums of products. float16 does not hold these sums. So a gradient equals that of plain
float32 JAX to the bit if it was never in float16, and that one rounded if it was.
Outside `jit` no compiler leaves out a cast.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.under_autocast import (
    assert_close,
    integers,
    own_layer,
    own_tangent,
    products_of,
)

# --- Of a factor that depends on no product, such as a parameter ------------------


def einsum(subscripts):
    return lambda w, x: jnp.einsum(subscripts, w, x)


def convolution(dims="NHWC", kernel="HWIO", strides=(1, 1), padding="SAME", **settings):
    return lambda w, x: lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=(dims, kernel, dims), **settings
    )


SIZES = jnp.array([40, 0, 24])
WEIGHT, DATA = (8, 5), (64, 8)
IMAGE, KERNEL = (8, 6, 6, 4), (3, 3, 4, 6)
W, X = integers(*WEIGHT), integers(*DATA)


def product(w, x):
    return x @ w


def with_scan_over_time(w, x):
    return lax.scan(lambda _, row: (_, row @ w), 0, x.reshape(8, 8, 8))[1]


def with_scan_over_layers(w, x):
    total = lax.scan(lambda y, v: (y + x @ v, None), jnp.zeros((64, 4)), w)
    return total[0]


def with_cond(w, x):
    return lax.cond(jnp.sum(x) < 1e9, lambda w: x @ w, lambda w: x @ -w, w)


# With the shapes of both factors.
PRODUCTS = {
    "matrix": (product, WEIGHT, DATA),
    "vector": (product, (8,), DATA),
    "a batch of batches": (product, WEIGHT, (2, 4, 8, 8)),
    "batch axes inside": (einsum("igo,bgi->bog"), (8, 2, 5), (64, 2, 8)),
    "convolution": (convolution(), KERNEL, IMAGE),
    "channels first, strided and dilated": (
        convolution("NCHW", "OIHW", (2, 1), padding="VALID", rhs_dilation=(1, 2)),
        (6, 4, 3, 3),
        (8, 4, 6, 6),
    ),
    "transposed convolution": (
        lambda w, x: lax.conv_transpose(x, w, (2, 2), "SAME"),
        KERNEL,
        IMAGE,
    ),
    "grouped convolution": (convolution(feature_group_count=2), (3, 3, 2, 6), IMAGE),
    "batch groups": (convolution(batch_group_count=2), (3, 3, 4, 6), IMAGE),
    "tied": (lambda w, x: x @ w + 2.0 * (x @ w), WEIGHT, DATA),
    "an ensemble": (jax.vmap(product, (0, None)), (2, 8, 5), DATA),
    "experts": (lambda w, x: lax.ragged_dot(x, w, SIZES), (3, 8, 5), DATA),
    "a scan that reads the weight at each step": (with_scan_over_time, WEIGHT, DATA),
    "a scan over layers": (with_scan_over_layers, (3, 8, 4), DATA),
    "a branch": (with_cond, WEIGHT, DATA),
    "vmap over data": (jax.vmap(product, (None, 0)), WEIGHT, DATA),
}


def gradients(fun, w, x, cotangent):
    return jax.vjp(fun, w, x)[1](cotangent)


def assert_exact(name, run=gradients, scale=1.0, **settings):
    """All gradients are those of float32, and float16 could not hold them."""
    fun, *shapes = PRODUCTS[name]
    w, x = (integers(*shape) for shape in shapes)
    cotangent = scale * integers(*jax.eval_shape(fun, w, x).shape)
    actual, expected = (
        jax.jit(functools.partial(run, f))(w, x, cotangent=cotangent)
        for f in (ols.autocast(fun, **settings), fun)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(actual, expected)
    rounded = jax.tree.map(lambda e: e.astype(jnp.float16).astype(e.dtype), expected)
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (rounded, expected))))


@pytest.mark.parametrize(
    "name", slow_except({"matrix", "transposed convolution", "a branch"}, PRODUCTS)
)
def test_the_gradients_of_both_factors_are_float32_sums(name):
    assert_exact(name)


@pytest.mark.parametrize(
    "name",
    slow_except({"vector"}, ["a batch of batches", "vector", "convolution", "experts"]),
)
def test_in_bfloat16_the_gradients_of_both_factors_are_float32_sums_too(name):
    """CPUs have such a product for some shapes only. The range is that of float32."""
    assert_exact(name, scale=2.0**20, dtype="bfloat16", recompute=False)


def test_gradients_are_rounded_where_grad_is_inside():
    def fun(w):
        return jnp.sum(jnp.ones((3, 2)) @ w)

    w = jnp.ones((2, 2))
    outside = jax.grad(lambda w: ols.autocast(fun)(w) * 2049.0)(w)
    inside = ols.autocast(jax.grad(lambda w: fun(w) * 2049.0))(w)
    assert jnp.all(outside == 3 * 2048.0)  # The gradient of an activation is rounded.
    assert inside.dtype == jnp.float32
    assert jnp.all(inside == jnp.float32(jnp.float16(3 * 2048.0)))


@pytest.mark.parametrize("name", ["batch axes inside", "batch groups"])
def test_the_tangent_of_a_gradient_is_a_float32_sum(name):
    def run(fun, w, x, cotangent):
        tangent = integers(*x.shape, largest=48)
        return jax.jvp(lambda x: gradients(fun, w, x, cotangent)[0], (x,), (tangent,))

    assert_exact(name, run)


@pytest.mark.parametrize(("platform", "dtype"), [("cuda", "f16"), ("tpu", "f32")])
def test_float32_sums_are_one_product_where_hardware_has_one(platform, dtype):
    """With a float32 result XLA for GPUs would convolve float32 copies."""
    conv, *shapes = PRODUCTS["convolution"]

    def loss(w, x, kernel, image):
        return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(jnp.tanh(conv(kernel, image)))

    args = W, X, *(integers(*shape) for shape in shapes)
    grad = jax.jit(jax.grad(ols.autocast(loss), (0, 2)))
    text = export.export(grad, platforms=[platform])(*args).mlir_module()
    assert "(tensor<64x5xf16>, tensor<64x8xf16>) -> tensor<5x8xf32>" in text
    lines = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    types = [re.findall(r"tensor<[\dx]*(f\d+)>", line) for line in lines]
    assert types == [["f16", "f16", "f16"], ["f16", "f16", dtype]]


# --- Of a factor that depends on the result of a low product ----------------------
# Each function returns a value that is a factor of one more product, and depends on `z`
# by addition, so that the gradient of `z` is that of the factor.

H, V, Z = integers(6, 4), integers(4, 4), integers(6, 4)
LAST, COTANGENT = integers(4, 64), integers(6, 64)
EXACT = np.asarray(COTANGENT) @ np.asarray(LAST).T
ROUNDED = EXACT.astype(np.float16).astype(np.float32)


def layers(h):
    return lax.scan(lambda h, w: (h @ w, None), h, jnp.stack([V, V]))[0]


def steps(h):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ V), (0, h))[1]


def branches(h):
    return lax.switch(jnp.int32(1), [lambda h: h @ V, lambda h: h], h)


AFTER_A_PRODUCT = {
    "a layer": lambda z: z + H @ V,
    "an activation function": lambda z: z + jax.nn.gelu(H @ V),
    "a part of an array": lambda z: jnp.where(H > 0, z + H @ V, z),
    "jit": lambda z: jax.jit(lambda z: z + H @ V)(z),
    "checkpoint": lambda z: z + jax.checkpoint(lambda w: H @ w)(V),
    "a scan": lambda z: z + layers(H),
    "a loop": lambda z: z + steps(H),
    "one of two branches": lambda z: z + branches(H),
    "a rule for tangents": lambda z: z + own_tangent(V, H),
    "a rule for cotangents": lambda z: z + own_layer(V, H),
    "vmap": lambda z: z + jax.vmap(lambda x: x @ V)(H),
    "a convolution": lambda z: (
        z + lax.conv(H[None], jnp.ones((6, 6, 1)), (1,), "SAME")[0]
    ),
}
NOT_AFTER_A_PRODUCT = {
    "no derivative": lambda z: z + lax.stop_gradient(H @ V),
    "a parameter": lambda z: z,
    "a parameter with a norm": lambda z: z / jnp.linalg.norm(Z) * jnp.linalg.norm(Z),
    "a mask": lambda z: z * jnp.where(H @ V > 1e9, 0.0, 1.0),
    "full precision": lambda z: z + ols.full_precision(lambda: H @ V)(),
    "a precision": lambda z: z + jnp.dot(H, V, precision="highest"),
    "a row of a table that a product chooses": lambda z: z[
        jnp.argsort(jnp.argmax(H @ V, 1) + 10 * jnp.arange(6))
    ],
    "a loop without a product": lambda z: lax.fori_loop(0, 2, lambda i, h: h + H, z),
}


def last(factor):
    return factor @ LAST


def gradient(fun, product=last):
    cast = ols.autocast(lambda z: product(fun(z)))
    return np.asarray(jax.vjp(cast, Z)[1](COTANGENT)[0])


@pytest.mark.parametrize("name", AFTER_A_PRODUCT)
def test_after_a_product_a_gradient_is_rounded(name):
    assert np.sum(EXACT != ROUNDED) >= 12
    np.testing.assert_array_equal(gradient(AFTER_A_PRODUCT[name]), ROUNDED)


def test_after_a_product_the_gradient_is_rounded_wherever_the_next_product_stands():
    for product in (
        lambda factor: lax.map(jax.jit(last), factor[None])[0],
        lambda factor: lax.cond(True, last, lambda x: 2.0 * last(x), factor),
    ):
        actual = gradient(AFTER_A_PRODUCT["a layer"], product)
        np.testing.assert_array_equal(actual, ROUNDED)


@pytest.mark.parametrize("name", NOT_AFTER_A_PRODUCT)
def test_everywhere_else_a_gradient_is_a_float32_sum(name):
    assert_close(gradient(NOT_AFTER_A_PRODUCT[name]), EXACT, 1e-6)


# --- Under transformations of JAX -------------------------------------------------


def loss(params, x):
    """Two layers; the second product has its factors in the other order."""
    h = jax.nn.relu(x @ params["first"])
    return jnp.mean(jnp.einsum("ho,bh->bo", params["second"], h) ** 2)


PARAMS = {"first": V / 64, "second": integers(4, 64) / 64}
BATCHES = jnp.stack([H, 2 * H, -H])


AROUND = {
    "vmap": lambda cast: jax.vmap(jax.grad(cast), (None, 0)),
    "jit": lambda cast: jax.vmap(jax.jit(jax.grad(jax.jit(cast))), (None, 0)),
    "checkpoint": lambda cast: jax.vmap(jax.grad(jax.checkpoint(cast)), (None, 0)),
    "a scan": lambda cast: (
        lambda p, x: lax.scan(lambda _, x: (_, jax.grad(cast)(p, x)), 0, x)[1]
    ),
    "vmap inside": lambda cast: jax.grad(
        lambda p, x: jnp.sum(jax.vmap(cast, (None, 0))(p, x))
    ),
}


@pytest.mark.parametrize("name", slow_except({"checkpoint", "a scan"}, AROUND))
def test_gradients_of_parameters_alone_are_float32_products(name):
    around = AROUND[name]
    grad = around(ols.autocast(loss))
    expected = jax.jit(around(loss))(PARAMS, BATCHES)
    assert_close(jax.jit(grad)(PARAMS, BATCHES), expected)
    results = [each.outvars[0].aval for each in products_of(grad, PARAMS, BATCHES)]
    in_float32 = [result for result in results if result.dtype == jnp.float32]
    assert len(in_float32) == 2  # One sum for each of the two parameters.


@pytest.mark.slow
@pytest.mark.parametrize(
    "by",
    [jax.hessian, lambda f: jax.jacrev(jax.jacrev(f))],
)
def test_a_second_derivative_is_right(by):
    """Of a sum of squares of products, whose derivatives a polynomial has exactly."""
    x, w = integers(3, 2, largest=3), integers(2, 2, largest=3)

    def fun(t):
        return jnp.sum(((x + t) @ w @ w) ** 2)

    actual, expected = (jax.jit(by(f))(1.0) for f in (ols.autocast(fun), fun))
    np.testing.assert_array_equal(actual, expected)
