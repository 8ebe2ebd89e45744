"""The gradient of a float32 weight is a float32 sum of products of low numbers.

All numbers are small integers, which float16 holds exactly, and so does float32 their
sums of products. float16 does not hold these sums. So a gradient equals that of plain
float32 JAX to the bit if it was never in float16, and differs if it was.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import optax_lossscale as ols
from helpers.under_autocast import (
    assert_close,
    assert_exact,
    integers,
    own_tangent,
    products_of,
)


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
    "experts": (lambda w, x: lax.ragged_dot(x, w, SIZES), (3, 8, 5), DATA),
    "jit": (jax.jit(product), WEIGHT, DATA),
    "checkpoint": (jax.checkpoint(product), WEIGHT, DATA),
    "a scan that reads the weight at each step": (with_scan_over_time, WEIGHT, DATA),
    "a scan over layers": (with_scan_over_layers, (3, 8, 4), DATA),
    "a branch": (with_cond, WEIGHT, DATA),
    "a rule for tangents": (own_tangent, WEIGHT, DATA),
    "vmap over data": (jax.vmap(product, (None, 0)), WEIGHT, DATA),
    "vmap over weights": (jax.vmap(product, (0, None)), (2, 8, 5), DATA),
    "a weight that is read twice": (
        lambda w, x: x @ w + 2.0 * (x @ w),
        WEIGHT,
        DATA,
    ),
}


def assert_named_exact(name, **settings):
    fun, *shapes = PRODUCTS[name]
    assert_exact(fun, *(integers(*shape) for shape in shapes), **settings)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradients_of_both_factors_are_exact(name):
    assert_named_exact(name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("a scan over layers", {"recompute": False}),
        ("a batch of batches", {"dtype": jnp.bfloat16}),
    ],
)
def test_gradients_are_exact_with_other_settings(name, settings):
    assert_named_exact(name, wrap=functools.partial(ols.autocast, **settings))


def test_every_product_is_low_and_the_gradient_of_a_weight_is_float32():
    def fun(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T))

    products = products_of(jax.grad(ols.autocast(fun)), W, X)
    assert [e.primitive.name for e in products] == ["low_product"] * 5
    results = [str(e.outvars[0].aval.dtype) for e in products]
    # Two forward; backward one for the activation between, and one for each weight.
    assert results.count("float16") == 3
    assert results.count("float32") == 2
    # What the backward pass saves of the factors is low.
    saved = [str(e.invars[1].aval.dtype) for e in products[2:]]
    assert saved == ["float16"] * 3


def by_vmap_over_both(fun, w, x, cotangent):
    def mapped(w, x):
        return jax.vmap(fun, (0, 1), 1)(w, x)

    w, x = jnp.stack([w, -w]), jnp.stack([x, 2 * x], 1)
    return jax.vjp(mapped, w, x)[1](jnp.stack([cotangent] * 2, 1))


def by_grad_of_grad(fun, w, x, cotangent):
    """The gradient, for the weight, of the gradient for the data."""

    def grad_of_data(w):
        return jax.vjp(lambda x: fun(w, x), x)[1](cotangent)[0]

    return jax.vjp(grad_of_data, w)[1](integers(*x.shape, largest=48))


def by_forward_over_reverse(fun, w, x, cotangent):
    """The tangent of the gradient of the weight, along data."""

    def grad_of_weight(x):
        return jax.vjp(fun, w, x)[1](cotangent)[0]

    return jax.jvp(grad_of_weight, (x,), (integers(*x.shape, largest=48),))[1]


@pytest.mark.parametrize("run", [by_vmap_over_both, by_forward_over_reverse])
@pytest.mark.parametrize("name", ["batch axes inside", "batch groups"])
def test_gradients_are_exact_under_every_transformation(name, run):
    assert_named_exact(name, run=run)


def test_the_hessian_is_that_of_float32():
    def fun(w, x):
        return jnp.sum(jnp.square(x @ w))

    # The loss is a square, so its Hessian is twice the sum of the outer products.
    w, x = integers(4, 1, largest=3), integers(256, 4, largest=20)
    actual = jax.jit(jax.hessian(ols.autocast(fun)))(w, x)
    np.testing.assert_array_equal(actual[:, 0, :, 0], 2 * x.T @ x)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_exported_gradients_are_products_of_float16_with_float32_results(platform):
    grad = jax.jit(jax.grad(ols.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)))))
    exported = export.export(grad, platforms=[platform])(W, X)
    text = exported.mlir_module()
    assert "(tensor<64x5xf16>, tensor<64x8xf16>) -> tensor<5x8xf32>" in text
    if platform == "cpu":
        np.testing.assert_array_equal(exported.call(W, X), grad(W, X))


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", "f32"), ("cuda", "f16")])
def test_the_result_of_a_convolution_is_in_float32_where_hardware_can(platform, dtype):
    """With a float32 result XLA for GPUs would multiply float32 copies."""
    fun, *shapes = PRODUCTS["convolution"]
    args = [integers(*shape) for shape in shapes]
    grad = jax.jit(jax.grad(ols.autocast(lambda w, x: jnp.sum(jnp.tanh(fun(w, x))))))
    text = export.export(grad, platforms=[platform])(*args).mlir_module()
    lines = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    types = [re.findall(r"tensor<[\dx]*(f\d+)>", line) for line in lines]
    assert types == [["f16", "f16", "f16"], ["f16", "f16", dtype]]


@pytest.mark.slow
def test_a_gradient_of_a_gradient_is_right_but_rounded():
    """It is a derivative by the low copy of a factor, which the first one reads."""
    args = W, X, integers(64, 5)
    actual = by_grad_of_grad(ols.autocast(product), *args)
    assert_close(actual, by_grad_of_grad(product, *args), 1e-3)
