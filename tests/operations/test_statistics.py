"""The numbers of single operations, compared with NumPy."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
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


def cast_to(dtype, numbers):
    """The cast of some numbers to a dtype, as an operation."""
    numbers = jnp.asarray(numbers, jnp.float32)
    return only(lambda x: x.astype(dtype), numbers, "convert_element_type")


def assert_numbers(operation, expected):
    """Numbers agree up to the rounding of float32."""
    for name, number in expected.items():
        actual = getattr(operation, name)
        np.testing.assert_allclose(actual, number, 1e-5, 1e-7, err_msg=name)


def expected_of_cast(dtype, numbers):
    """The numbers of a cast by their definitions, in NumPy."""
    exact = np.asarray(numbers, np.float32)
    with np.errstate(over="ignore"):
        cast = exact.astype(dtype).astype(np.float32)
    top = float(ml_dtypes.finfo(dtype).max)

    def largest(x):
        return float(np.max(np.where(np.isfinite(x), np.abs(x), np.inf), initial=0.0))

    numbers = {
        "largest": largest(cast),
        "float32_largest": largest(exact),
        "nonfinite": int(np.sum(~np.isfinite(cast))),
    }
    if largest(exact) == math.inf:  # What was lost before does not count.
        return numbers | {"underflow": 0, "error": 0, "headroom_bits": -math.inf}
    norm = np.linalg.norm(exact.astype(np.float64))
    error = np.linalg.norm((cast - exact).astype(np.float64))
    flushed = np.sum((cast == 0) & (exact != 0))
    return numbers | {
        "underflow": flushed / max(np.count_nonzero(exact), 1),
        "error": error / norm if norm else 0.0,
        "headroom_bits": math.log2(top / largest(exact)) if norm else math.inf,
    }


NUMBERS = [
    [1.0, -3.0, 0.1],
    [0.0, 0.0, 0.0],
    [1e-9, 1e-10, 2e-8],  # All of them are flushed to zero in float16.
    [3e-8, 4e-8, 6e-8],  # These round up to the smallest subnormal number.
    [65504.0, -65519.0, 1e-9],
    [-1e30, 1e5, 2.0],
    [NAN, 1e30, 1e-9],
    [INF, -INF, 0.1],
]


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [*((np.float16, x) for x in NUMBERS), (ml_dtypes.bfloat16, [1e5, 0.1, 1e-30])],
    ids=str,
)
def test_the_numbers_of_a_cast_follow_their_definitions(dtype, numbers):
    operation = cast_to(dtype, numbers)
    assert_numbers(operation, expected_of_cast(dtype, numbers))
    assert (operation.dtype, operation.shape) == (dtype, (3,))
    assert isinstance(operation.largest, float)
    assert isinstance(operation.nonfinite, int)


def test_an_empty_array_has_no_numbers():
    operation = only(jnp.negative, jnp.zeros((0, 3)), "neg")
    assert operation.shape == (0, 3)
    assert_numbers(operation, expected_of_cast(np.float32, []))


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
        operations = trace_operations(lambda x: jnp.sum(-x), x)
        half = cast_to(np.float16, [0.1, 1e-9, 1e9])
    negative = operations[0]
    assert (negative.primitive, negative.dtype) == ("neg", jnp.float64)
    assert (negative.nonfinite, negative.underflow, negative.error) == (0, 0, 0)
    bits = math.log2(float(np.finfo(np.float64).max)) - math.log2(1e300)
    np.testing.assert_allclose(negative.headroom_bits, bits, rtol=1e-6)
    assert_numbers(half, expected_of_cast(np.float16, [0.1, 1e-9, 1e9]))


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
        assert before.unscaled_headroom_bits == before.headroom_bits
        factor = 256 if after.is_backward else 1
        np.testing.assert_allclose(after.largest, factor * before.largest, rtol=1e-3)
        bits = after.unscaled_headroom_bits - after.headroom_bits
        if math.isfinite(after.headroom_bits):
            np.testing.assert_allclose(bits, math.log2(factor), atol=1e-6)
    assert {x.is_backward for x in one} == {False, True}
