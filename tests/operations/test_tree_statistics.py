"""`ols.diagnostics` on any pytree: the numbers beside NumPy."""

import functools
import io
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.cases import slow_except
from helpers.compat import enable_x64
from optax_lossscale import diagnostics


def values_of(dtype):
    """All values of a dtype of 8 or 16 bits, or many of float32, of all magnitudes.

    XLA takes what is subnormal in float32 for zero, so these are left out.
    """
    if dtype == np.float32:
        rng = np.random.default_rng(0)
        values = rng.integers(0, 2**32, 100_000, np.uint32).view(dtype)
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-126]
        values = np.concatenate([values, np.asarray(edges, dtype)])
    else:
        unsigned = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
        values = np.arange(np.iinfo(unsigned).max + 1, dtype=unsigned).view(dtype)
    magnitudes = np.abs(as_float64(values))
    return values[~((magnitudes > 0) & (magnitudes < 2.0**-126))]


def as_float64(values):
    with np.errstate(invalid="ignore"):  # For signalling NaNs.
        return values.astype(np.float64)


@pytest.mark.parametrize(
    "dtype",
    slow_except(
        [np.float16],
        [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32],
    ),
)
def test_each_exponent_zeros_nan_and_infinities_are_counted(dtype):
    values, low, high = values_of(dtype), -40, 20
    histogram = jax.jit(diagnostics.exponent_histogram)(values)
    wide = as_float64(values)
    finite = np.abs(wide[np.isfinite(wide)])
    exponents = np.clip(np.floor(np.log2(finite[finite > 0])), low, high).astype(int)
    counts = np.bincount(exponents - low, minlength=high - low + 1)
    np.testing.assert_array_equal(histogram.exponents, np.arange(low, high + 1))
    np.testing.assert_array_equal(histogram.counts, counts)
    assert histogram.zero_count == np.sum(finite == 0)
    assert histogram.nonfinite_count == np.sum(~np.isfinite(wide))
    assert all(leaf.dtype == jnp.int32 for leaf in histogram)
    report = jax.jit(diagnostics.nonfinite_report)({"x": values})["x"]
    numbers = np.sum(np.isnan(wide)), np.sum(np.isinf(wide)), values.size
    assert (report["nan"], report["inf"], report["size"]) == numbers


def test_the_histogram_of_float64_goes_beyond_float32():
    with enable_x64(True):
        values = jnp.asarray([2.0**600, -(2.0**-600), 3.0], jnp.float64)
        histogram = diagnostics.exponent_histogram(
            values, min_exponent=-600, max_exponent=600
        )
    assert np.flatnonzero(histogram.counts).tolist() == [0, 601, 1200]


@pytest.mark.slow
def test_both_parts_of_a_complex_number_count():
    tree = jnp.asarray([complex(1, 2.0**-3), complex(math.nan, math.inf)])
    histogram = diagnostics.exponent_histogram(tree, min_exponent=-3, max_exponent=0)
    assert histogram.counts.tolist() == [1, 0, 0, 1]
    assert histogram.nonfinite_count == 2
    report = diagnostics.nonfinite_report({"c": tree})["c"]
    assert (report["nan"], report["inf"]) == (1, 0)


@pytest.mark.parametrize("exponent", [0, 30])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_the_underflow_fraction_equals_that_of_numpy(dtype, exponent):
    values = values_of(np.float32)
    finite = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    # float64 holds the products exactly, so they are rounded once.
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.ldexp(finite, exponent).astype(dtype)
    share = jax.jit(
        lambda x, s: diagnostics.underflow_fraction(x, scale=s, dtype=dtype)
    )(values, 2.0**exponent)
    assert share == pytest.approx(np.mean(rounded.astype(np.float64) == 0), rel=1e-6)


def test_half_the_smallest_number_underflows_and_anything_larger_does_not():
    tie = jnp.asarray([2.0**-25])
    assert diagnostics.underflow_fraction(tie) == 1
    assert diagnostics.underflow_fraction(tie, scale=1.0001) == 0
    assert diagnostics.underflow_fraction(tie, dtype=jnp.bfloat16) == 0


positive = st.floats(2.0**-120, 2.0**120, width=32)


@example([1.25, 1.75], 0)
@example([65504.0], 0)
@given(st.lists(positive, min_size=1, max_size=5), st.integers(-20, 20))
def test_headroom_and_the_suggested_scale_follow_from_the_largest_entry(
    values, exponent
):
    tree = [jnp.zeros(1), *(jnp.asarray([-value], jnp.float32) for value in values)]
    scale = 2.0**exponent
    expected = math.log2(65504) - math.log2(max(values)) - exponent
    bits = diagnostics.headroom_bits(tree, scale=scale)
    assert bits == pytest.approx(expected, abs=1e-4)
    suggested = float(diagnostics.suggest_init_scale(tree, margin_bits=1.0))
    if 2.0**-126 < suggested < 2.0**126:
        assert suggested * max(values) * 2 <= 65504 < suggested * max(values) * 4
    assert math.frexp(suggested)[0] == 0.5
    assert 2.0**-126 <= suggested <= 2.0**126


@pytest.mark.parametrize(
    ("tree", "bits", "scale"),
    [
        ({"a": jnp.zeros(2), "b": jnp.zeros(0)}, math.inf, 2.0**15),
        ({}, math.inf, 2.0**15),
        ([jnp.ones(2), jnp.asarray([1.0, math.nan]), jnp.ones(3)], -math.inf, math.nan),
        ([jnp.ones(2), jnp.asarray([1.0, math.inf])], -math.inf, math.nan),
    ],
)
def test_headroom_and_the_suggested_scale_of_zeros_and_of_nonfinite_entries(
    tree, bits, scale
):
    assert diagnostics.headroom_bits(tree) == bits
    assert diagnostics.underflow_fraction(tree) == 0
    np.testing.assert_equal(float(diagnostics.suggest_init_scale(tree)), scale)


TREE = {
    "good": jnp.ones(3),
    "half": {"b": jnp.asarray([1.0, jnp.inf])},
    "all": jnp.full(2, jnp.nan),
}
REPORT = """2 of 3 floating leaves hold nonfinite entries
all: 2 nan, 0 inf of 2
half/b: 0 nan, 1 inf of 2
"""
ONE_REPORT = """1 of 1 floating leaves hold nonfinite entries
the array: 1 nan, 0 inf of 1
"""


def test_the_report_is_printed_worst_first(capsys):
    for what in (TREE, diagnostics.nonfinite_report(TREE), jnp.asarray([math.nan])):
        diagnostics.print_nonfinite_report(what)
    assert capsys.readouterr().out == REPORT + REPORT + ONE_REPORT


@pytest.mark.slow  # Compiles for eight devices.
@pytest.mark.several_devices
def test_diagnostics_can_read_sharded_leaves():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    values = jnp.ldexp(jnp.ones((8, 2)), jnp.arange(16).reshape(8, 2))
    leaf = jax.device_put(values, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        histogram = jax.jit(diagnostics.exponent_histogram)(leaf)
        assert histogram.counts.tolist() == [0] * 40 + [1] * 16 + [0] * 5
        assert diagnostics.headroom_bits(leaf) == pytest.approx(1, abs=1e-3)
        assert diagnostics.nonfinite_report({"x": leaf})["x"]["inf"] == 0
        assert diagnostics.underflow_fraction(leaf) == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="`scale` must be positive"):
        diagnostics.headroom_bits(jnp.ones(1), scale=0.0)
    with pytest.raises(ValueError, match="`min_exponent` must be at most"):
        diagnostics.exponent_histogram(jnp.ones(1), min_exponent=3, max_exponent=2)
    with pytest.raises(ValueError, match="`margin_bits` must be"):
        diagnostics.suggest_init_scale(jnp.ones(1), margin_bits=-1.0)


def test_a_report_printed_inside_jit_is_refused_with_what_to_do_instead():
    with pytest.raises(
        TypeError, match=r"traced ones, as inside `jit`.*debug.callback"
    ):
        jax.jit(diagnostics.print_nonfinite_report)(jnp.ones(2))
    callback = functools.partial(diagnostics.print_nonfinite_report, file=io.StringIO())
    jax.jit(lambda x: jax.debug.callback(callback, x))(jnp.ones(2))
    jax.effects_barrier()
    assert callback.keywords["file"].getvalue().startswith("0 of 1 floating leaves")
