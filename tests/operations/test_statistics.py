"""The numbers of single operations, compared with NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.compat import enable_x64
from helpers.operations import rounded, select
from optax_lossscale.diagnostics import trace_operations

NAN, INF = math.nan, math.inf


def only(fun, x, name, **settings):
    """The one operation with this primitive in the forward pass of a sum."""

    def loss_fn(x):
        result = fun(x)
        return jnp.sum(jnp.real(result).astype(jnp.float32))

    operations = trace_operations(loss_fn, x, **settings)
    return select(operations, name)[0]


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


@pytest.mark.parametrize(
    ("dtype", "numbers", "exact", "largest", "nonfinite", "underflow", "error"), CASTS
)
def test_the_numbers_of_a_cast_follow_their_definitions(
    dtype, numbers, exact, largest, nonfinite, underflow, error
):
    x = jnp.asarray(numbers, jnp.float32)
    operation = only(lambda x: x.astype(dtype), x, "convert_element_type")
    assert (operation.dtype, operation.shape) == (dtype, x.shape)
    with np.errstate(divide="ignore"):  # It is infinite for zeros.
        headroom = np.log2(TOPS[dtype]) - np.log2(exact)
    expected = exact, largest, nonfinite, underflow, error, headroom
    actual = operation.float32_largest, operation.largest, operation.nonfinite
    actual += operation.underflow, operation.error, operation.headroom_bits
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_an_entry_of_a_complex_result_counts_once():
    """Both parts of the second entry overflow in complex64."""
    x = jnp.asarray([3, 1e30, 0], jnp.float32)
    operation = only(lambda x: jax.lax.complex(x, x) * np.complex64(1e20), x, "mul")
    assert operation.dtype == jnp.complex64
    assert operation.largest == INF
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


def mean_product(w, x):
    return jnp.mean(x @ w)


def test_an_overflow_in_the_cast_of_an_array_of_numpy_is_seen():
    x = np.full((3, 4), 1e6, np.float32)
    operations = trace_operations(mean_product, jnp.ones((4, 4)), x)
    first = next(operation for operation in operations if operation.nonfinite)
    assert (first.primitive, first.nonfinite) == ("convert_element_type", 12)


def test_the_numbers_of_a_product_are_those_of_numpy():
    """Forward and backward; the gradient of the loss by the product is 2**10 / 12."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 4)))
    operations = trace_operations(mean_product, w, x, loss_scale=2.0**10)
    forward = select(operations, "dot_general")[0]
    backward = select(operations, "dot_general", is_backward=True)[0]
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


@pytest.mark.parametrize(
    ("settings", "product", "exponential"),
    [
        ({"dtype": jnp.bfloat16}, "bfloat16", "float32"),
        ({"level": "O0"}, "float32", "float32"),
        ({"level": "O2"}, "float16", "float16"),
    ],
)
def test_the_dtype_and_the_level_are_those_of_autocast(settings, product, exponential):
    def loss_fn(w, x):
        return jnp.sum(jnp.exp(x @ w).astype(jnp.float32))

    operations = trace_operations(loss_fn, jnp.eye(3), jnp.ones((2, 3)), **settings)
    found = [select(operations, name)[0].dtype for name in ("dot_general", "exp")]
    assert found == [product, exponential]


def test_the_loss_scale_multiplies_the_backward_pass_alone():
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    args = jnp.eye(3), jnp.ones((2, 3))
    one, other = (trace_operations(loss_fn, *args, loss_scale=s) for s in (1.0, 256.0))
    for before, after in zip(one, other, strict=True):
        assert before[:3] == after[:3]
        factor = 256 if after.is_backward else 1
        np.testing.assert_allclose(after.largest, factor * before.largest, rtol=1e-3)
    assert {x.is_backward for x in one} == {False, True}
