"""The numbers of an `Operation` are as its docstring defines them, beside NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.compat import enable_x64
from helpers.operations import select
from optax_lossscale.diagnostics import trace_operations

NAN, INF = math.nan, math.inf
HALF, BFLOAT = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)
TOPS = {HALF: 65504.0, BFLOAT: float(jnp.finfo(jnp.bfloat16).max)}
CASTS = [
    # Numbers, their largest magnitude before and after; nonfinite, underflow, error.
    (HALF, [1.0, -3.0, 0.5], 3.0, 3.0, 0, 0.0, 0.0),
    (HALF, [0.0, 0.0], 0.0, 0.0, 0, 0.0, 0.0),
    (HALF, [], 0.0, 0.0, 0, 0.0, 0.0),
    (HALF, [1e-9, 2e-8, 0.0], 2e-8, 0.0, 0, 1.0, 1.0),
    (HALF, [1e-9, 1e-10, 1.0, 0.0], 1.0, 1.0, 0, 2 / 3, 1e-9),
    (HALF, [1.5 * 2.0**-25], 1.5 * 2.0**-25, 2.0**-24, 0, 0.0, 1 / 3),  # Rounded up.
    (HALF, [-65519.0], 65519.0, 65504.0, 0, 0.0, 15 / 65519),
    (HALF, [-1e30, 1e5, 2.0], 1e30, INF, 2, 0.0, INF),
    # What was lost before does not count.
    (HALF, [NAN, 1e30, 1e-9], INF, INF, 2, 0.0, 0.0),
    (HALF, [INF, -INF, 0.1], INF, INF, 2, 0.0, 0.0),
    (BFLOAT, [257.0, 1e-30], 257.0, 256.0, 0, 0.0, 1 / 257),
]


def test_the_numbers_of_casts_follow_their_definitions():
    def loss_fn(arrays):
        casts = [x.astype(row[0]) for x, row in zip(arrays, CASTS, strict=True)]
        return jnp.float32(0), casts

    arrays = [jnp.asarray(numbers, jnp.float32) for _, numbers, *_ in CASTS]
    operations = select(trace_operations(loss_fn, arrays), "convert_element_type")
    for operation, x, (dtype, _, *expected) in zip(
        operations, arrays, CASTS, strict=True
    ):
        assert (operation.dtype, operation.shape) == (dtype, x.shape)
        with np.errstate(divide="ignore"):  # It is infinite for zeros.
            headroom = np.log2(TOPS[dtype]) - np.log2(expected[0])
        actual = operation.float32_largest, operation.largest, operation.nonfinite
        actual += operation.underflow, operation.error, operation.headroom_bits
        assert actual == pytest.approx((*expected, headroom), rel=1e-5, abs=1e-7)


def test_an_entry_of_a_complex_result_counts_once():
    """Both parts of the second entry overflow in complex64."""

    def loss_fn(x):
        return jnp.sum(jnp.real(jax.lax.complex(x, x) * np.complex64(1e20)))

    operations = trace_operations(loss_fn, jnp.float32([3, 1e30, 0]))
    operation = select(operations, "mul")[0]
    assert (operation.dtype, operation.largest) == (jnp.complex64, INF)
    assert operation.nonfinite == 1


def test_float64_is_measured_in_float64():
    """1e300 is far beyond float32, and 1e-300 far below."""
    with enable_x64(True):
        x = jnp.asarray([1e300, 1e-300, 1.0], jnp.float64)
        first, *_ = trace_operations(lambda x: jnp.sum(-x), x)
    assert (first.primitive, first.dtype, first.largest) == ("neg", jnp.float64, 1e300)
    assert (first.nonfinite, first.underflow, first.error) == (0, 0, 0)
    bits = math.log2(float(np.finfo(np.float64).max)) - math.log2(1e300)
    np.testing.assert_allclose(first.headroom_bits, bits, rtol=1e-6)


def rounded(x):
    return np.asarray(x, np.float16).astype(np.float32)


def test_the_numbers_of_a_product_are_those_of_numpy():
    """The gradient of the loss by the product is the loss scale, 2**10, over 12."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 4)))
    operations = trace_operations(
        lambda w, x: jnp.mean(x @ w), w, x, loss_scale=2.0**10
    )
    # NumPy's arrays are rounded where it can be seen.
    casts = select(operations, "convert_element_type")
    assert {x.largest for x in casts} > {np.max(np.abs(rounded(y))) for y in (x, w)}
    (forward,) = select(operations, "dot_general")
    (backward,) = select(operations, "dot_general", is_backward=True)
    cotangent = np.full((3, 4), 2.0**10 / 12, np.float32)
    for operation, low, exact in (
        (forward, rounded(rounded(x) @ rounded(w)), x @ w),
        (backward, rounded(x).T @ rounded(cotangent), x.T @ cotangent),
    ):
        error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
        np.testing.assert_allclose(operation.error, error, rtol=1e-2)
        np.testing.assert_allclose(operation.largest, np.max(np.abs(low)), rtol=2e-3)
        largest = np.max(np.abs(exact))
        np.testing.assert_allclose(operation.float32_largest, largest, rtol=1e-5)
        assert operation.dtype == jnp.float16


def test_the_dtype_and_the_level_are_those_of_autocast():
    def loss_fn(w, x):
        return jnp.sum(jnp.exp(x @ w).astype(jnp.float32))

    args = jnp.eye(3), jnp.ones((2, 3))
    operations = trace_operations(loss_fn, *args, level="O2", dtype=jnp.bfloat16)
    for name in ("dot_general", "exp"):
        assert select(operations, name)[0].dtype == jnp.bfloat16
