"""The numbers of single operations, compared with NumPy."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers.compat import enable_x64
from optax_lossscale.diagnostics import trace_operations

NAN, INF = math.nan, math.inf


def only(fun, *args, name, **settings):
    """The one operation of a function with this primitive."""
    operations = trace_operations(fun, *args, **settings)
    (operation,) = [x for x in operations if x.primitive == name]
    return operation


def cast_to(dtype, numbers):
    """The cast of some numbers to a dtype, as an operation."""
    numbers = jnp.asarray(numbers, jnp.float32)
    return only(lambda x: x.astype(dtype), numbers, name="convert_element_type")


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
    is_finite = np.isfinite(cast) & np.isfinite(exact)
    difference = np.where(is_finite, cast - np.where(is_finite, exact, 0), 0.0)
    difference = np.where(np.isfinite(cast) ^ np.isfinite(exact), np.inf, difference)
    norm = np.linalg.norm(np.where(is_finite, exact, 0.0).astype(np.float64))
    nonzero = np.count_nonzero(exact)
    top = float(ml_dtypes.finfo(dtype).max)

    def largest(x):
        return float(np.max(np.where(np.isfinite(x), np.abs(x), np.inf), initial=0.0))

    bits = math.log2(top) - math.log2(largest(exact)) if largest(exact) else math.inf
    error = np.linalg.norm(difference.astype(np.float64))
    return {
        "largest": largest(cast),
        "float32_largest": largest(exact),
        "nonfinite": int(np.sum(~np.isfinite(cast))),
        "underflow": float(np.sum((cast == 0) & (exact != 0)) / max(nonzero, 1)),
        "headroom_bits": bits,
        "error": float(error / norm) if norm else math.inf if error else 0.0,
    }


@pytest.mark.parametrize(
    "numbers",
    [
        [1.0, -3.0, 0.1],
        [0.0, 0.0, 0.0],
        [-0.0, 1e-9, 1e-3],
        [1e-9, 1e-10, 2e-8],  # All of them are flushed.
        [3e-8, 4e-8, 6e-8],  # These round up to the smallest subnormal number.
        [65504.0, -65519.0, 1.0],
        [65520.0, 1.0, 2.0],
        [-1e30, 1e5, 2.0],
        [1e30, 1e30, 1e30],
        [NAN, 1.0, 0.1],
        [INF, -INF, 0.1],
        [NAN, 1e30, 1e-9],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_numbers_of_a_cast_follow_their_definitions(dtype, numbers):
    assert_numbers(cast_to(dtype, numbers), expected_of_cast(dtype, numbers))


def test_random_numbers_of_all_magnitudes_follow_the_definitions():
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=3) * 2.0 ** rng.integers(-26, 17, size=(50, 3))
    for row in numbers.astype(np.float32):
        assert_numbers(cast_to(np.float16, row), expected_of_cast(np.float16, row))


def test_dtypes_and_shapes_are_those_of_the_result():
    operation = cast_to(jnp.bfloat16, [1.0, 2.0, 3.0])
    assert operation.dtype == jnp.bfloat16
    assert operation.shape == (3,)
    assert isinstance(operation.largest, float)
    assert isinstance(operation.nonfinite, int)


def test_nonfinite_arguments_are_received_and_not_made():
    operation = cast_to(np.float16, [NAN, 1.0, 2.0])
    assert (operation.nonfinite, operation.made_nonfinite) == (1, 0)


def test_an_overflow_is_made_even_if_other_entries_were_received():
    """The NaN is in the argument, and 1e30 overflows."""
    operation = cast_to(np.float16, [NAN, 1e30, 2.0])
    assert operation.nonfinite == 2
    assert operation.made_nonfinite > 0


def test_an_operation_that_passes_infinities_on_makes_none():
    operations = trace_operations(
        lambda x: jnp.negative(x.astype(jnp.float16)), jnp.float32([1e30, 1.0, 2.0])
    )
    assert [x.primitive for x in operations] == ["convert_element_type", "neg"]
    assert [x.nonfinite for x in operations] == [1, 1]
    assert [x.made_nonfinite for x in operations] == [1, 0]


def test_a_difference_of_infinities_makes_nan_in_float32_as_well():
    operation = only(
        lambda x: jnp.exp(x) - 1, jnp.float32([100.0, 1.0, 2.0]), name="exp"
    )
    assert operation.made_nonfinite == 1
    assert operation.float32_largest == INF
    assert operation.headroom_bits == -INF


def test_zero_divided_by_zero_is_made_nonfinite():
    x = jnp.zeros(3)
    operation = only(lambda x: x / x, x, name="div")
    assert operation.made_nonfinite == 3
    assert operation.largest == INF


def test_added_underflow_and_error_exceed_those_of_the_operands():
    """The first product is flushed, and the second is rounded up to 2**-24."""
    x = jnp.float32([1e-4, 2e-4, 1e-3])
    half = np.asarray(x).astype(np.float16)
    operation = only(lambda x: x.astype(jnp.float16) * half, x, name="mul")
    product = (half * half).astype(np.float32)
    assert product[0] == 0
    assert product[1] == 2.0**-24
    exact = np.asarray(x) * half.astype(np.float32)
    error = np.linalg.norm(product - exact) / np.linalg.norm(exact)
    before = np.linalg.norm(half - np.asarray(x)) / np.linalg.norm(x)
    np.testing.assert_allclose(operation.error, error, rtol=1e-3)
    np.testing.assert_allclose(operation.added_error, error - before, rtol=1e-3)
    assert operation.underflow == operation.added_underflow == np.float32(1 / 3)


def test_errors_that_shrink_are_not_added():
    """A sum of zeros and the rounded number has the same error; nothing is added."""
    operation = only(
        lambda x: jnp.negative(x.astype(jnp.float16)),
        jnp.float32([0.1, 0.2, 0.3]),
        name="neg",
    )
    assert operation.error > 0
    assert operation.added_error == 0
    assert operation.added_underflow == 0


def test_the_float32_numbers_of_a_chain_are_never_rounded():
    """In float16 the addition loses 1e-4; in float32 the difference brings it back."""
    operation = only(
        lambda x: (x.astype(jnp.float16) + 1) - 1, jnp.float32([1e-4] * 3), name="sub"
    )
    assert operation.largest == 0
    np.testing.assert_allclose(operation.float32_largest, 1e-4, rtol=1e-3)
    assert operation.underflow == 1.0
    np.testing.assert_allclose(operation.error, 1.0, rtol=1e-6)


def test_an_empty_array_has_no_numbers():
    operation = only(lambda x: jnp.negative(x), jnp.zeros((0, 3)), name="neg")
    assert operation.shape == (0, 3)
    assert (operation.largest, operation.float32_largest) == (0, 0)
    assert (operation.nonfinite, operation.underflow, operation.error) == (0, 0, 0)
    assert operation.headroom_bits == INF


def test_a_scalar_is_an_array_of_one_entry():
    operation = trace_operations(lambda x: x.astype(jnp.float16), jnp.float32(1e9))[0]
    assert operation.primitive == "convert_element_type"
    assert operation.shape == ()
    assert operation.nonfinite == operation.made_nonfinite == 1
    np.testing.assert_allclose(
        operation.headroom_bits, math.log2(65504) - math.log2(1e9), rtol=1e-6
    )


def test_a_complex_result_counts_its_real_and_imaginary_parts():
    """Both parts of the second entry overflow in complex64."""
    x = jnp.asarray([3 - 4j, 1e30 + 1e30j, 0], jnp.complex64)
    operation = only(lambda x: x * np.complex64(1e20), x, name="mul")
    assert operation.dtype == jnp.complex64
    assert operation.largest == INF
    assert operation.nonfinite == 2
    finite = only(lambda x: -x, x[:1], name="neg")
    assert finite.largest == 4.0
    top = float(np.finfo(np.float32).max)
    np.testing.assert_allclose(
        finite.headroom_bits, math.log2(top) - math.log2(4), rtol=1e-6
    )


def test_float32_results_have_the_headroom_of_float32():
    operation = only(jnp.negative, jnp.float32([2.0, 1.0, 0.5]), name="neg")
    assert operation.dtype == jnp.float32
    np.testing.assert_allclose(operation.headroom_bits, 127, rtol=1e-6)
    assert operation.error == 0


def test_integer_results_are_left_out():
    operations = trace_operations(
        lambda x: jnp.argmax(x) + 1, jnp.float32([2.0, 1.0, 0.5])
    )
    assert operations == []


def test_float64_is_measured_in_float64():
    """1e300 is far beyond float32, and 1e-300 far below."""
    with enable_x64(True):
        x = jnp.asarray([1e300, 1e-300, 1.0], jnp.float64)
        operation = only(jnp.negative, x, name="neg")
        assert operation.dtype == jnp.float64
        assert operation.nonfinite == 0
        assert operation.underflow == 0
        assert operation.error == 0
        top = float(np.finfo(np.float64).max)
        np.testing.assert_allclose(
            operation.headroom_bits, math.log2(top) - math.log2(1e300), rtol=1e-6
        )


def test_under_64_bits_float16_is_compared_with_float32():
    with enable_x64(True):
        operation = cast_to(np.float16, [0.1, 1e-9, 1e9])
    assert_numbers(operation, expected_of_cast(np.float16, [0.1, 1e-9, 1e9]))


def test_the_error_of_a_product_is_that_of_numpy():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 4)))
    operation = only(lambda x, w: x @ w, x, w, name="dot_general")
    product = x.astype(np.float16).astype(np.float32) @ w.astype(np.float16).astype(
        np.float32
    )
    product, exact = product.astype(np.float16).astype(np.float32), x @ w
    error = np.linalg.norm(product - exact) / np.linalg.norm(exact)
    np.testing.assert_allclose(operation.error, error, rtol=1e-2)
    np.testing.assert_allclose(operation.largest, np.max(np.abs(product)), rtol=2e-3)
    np.testing.assert_allclose(
        operation.float32_largest, np.max(np.abs(exact)), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_dtype_and_the_level_are_those_of_autocast(dtype, level):
    operations = trace_operations(
        lambda w, x: jnp.exp(x @ w),
        jnp.eye(3),
        jnp.ones((2, 3)),
        dtype=dtype,
        level=level,
    )
    dtypes = {x.primitive: x.dtype for x in operations}
    assert dtypes["dot_general"] == dtype
    assert dtypes["exp"] == (jnp.float32 if level == "O1" else dtype)


def test_at_level_o0_nothing_is_rounded():
    operations = trace_operations(
        lambda w, x: jnp.exp(x @ w), jnp.eye(3), jnp.ones((2, 3)), level="O0"
    )
    assert {x.dtype for x in operations} == {np.dtype(np.float32)}
    assert {x.error for x in operations} == {0.0}


def test_the_loss_scale_multiplies_the_backward_pass_alone():
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    args = jnp.eye(3), jnp.ones((2, 3))
    one = trace_operations(loss_fn, *args)
    other = trace_operations(loss_fn, *args, loss_scale=2.0**8)
    keys = [(x.primitive, x.where, x.is_backward) for x in one]
    assert keys == [(x.primitive, x.where, x.is_backward) for x in other]
    assert any(x.is_backward for x in one)
    assert not all(x.is_backward for x in one)
    for before, after in zip(one, other, strict=True):
        bits = after.unscaled_headroom_bits - after.headroom_bits
        assert before.unscaled_headroom_bits == before.headroom_bits
        if bits:
            assert after.is_backward
            np.testing.assert_allclose(bits, 8, rtol=1e-6)
            np.testing.assert_allclose(
                after.float32_largest, 2.0**8 * before.float32_largest, rtol=1e-6
            )
        else:
            assert after.float32_largest == before.float32_largest
