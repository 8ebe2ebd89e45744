"""Diagnostics of overflow and underflow against NumPy, over the range of each dtype."""

import functools
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compat import enable_x64
from helpers.float_values import DTYPES, as_float64, float32_values, values_of
from optax_lossscale import diagnostics


def expected_histogram(values, low, high):
    values = np.abs(as_float64(values))
    finite = values[np.isfinite(values)]
    exponents = np.frexp(finite[finite > 0])[1] - 1
    counts = np.bincount(np.clip(exponents, low, high) - low, minlength=high - low + 1)
    return counts, int(np.sum(finite == 0)), int(np.sum(~np.isfinite(values)))


def assert_histogram(values, histogram, low, high):
    counts, zeros, nonfinite = expected_histogram(values, low, high)
    np.testing.assert_array_equal(histogram.counts, counts)
    assert (histogram.zero_count, histogram.nonfinite_count) == (zeros, nonfinite)
    np.testing.assert_array_equal(histogram.exponents, np.arange(low, high + 1))
    assert all(leaf.dtype == jnp.int32 for leaf in histogram)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), [(-40, 20), (-149, 127)])
def test_the_histogram_is_exact_over_the_whole_range(dtype, low, high):
    values = values_of(dtype)
    histogram = jax.jit(
        lambda x: diagnostics.exponent_histogram(x, min_exponent=low, max_exponent=high)
    )(values)
    assert_histogram(values, histogram, low, high)


def test_the_histogram_of_float64_is_exact_over_its_whole_range():
    with enable_x64(True):
        bits = np.random.default_rng(0).integers(0, 2**63, 10_000, dtype=np.uint64)
        values = np.concatenate([bits.view("f8"), np.arange(99, dtype="u8").view("f8")])
        histogram = jax.jit(
            lambda x: diagnostics.exponent_histogram(
                x, min_exponent=-1074, max_exponent=1023
            )
        )(values)
        assert_histogram(values, histogram, -1074, 1023)


@pytest.mark.slow
def test_counts_are_exact_above_two_to_the_24():
    # A float32 sum of ones stops growing there.
    size = 2**24 + 3
    tree = {"many": jnp.full(size, 2.0**-30, jnp.float16), "few": jnp.ones(2)}
    assert diagnostics.exponent_histogram(tree).zero_count == size
    tree["many"] = jnp.full(size, jnp.nan, jnp.float16)
    assert diagnostics.nonfinite_report(tree)["many"]["nan"] == size
    tree["many"] = jnp.full(size, 1e-9, jnp.float32)
    share = diagnostics.underflow_fraction(tree)
    assert share == np.float32(size / (size + 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nan_and_infinity_is_counted(dtype):
    values = values_of(dtype)
    wide = as_float64(values)
    report = jax.jit(diagnostics.nonfinite_report)({"x": values})["x"]
    assert report["nan"] == np.sum(np.isnan(wide))
    assert report["inf"] == np.sum(np.isinf(wide))
    assert report["size"] == values.size


@pytest.mark.slow
def test_both_parts_of_a_complex_number_count():
    tree = jnp.asarray([complex(1, 2.0**-3), complex(math.nan, math.inf)])
    histogram = diagnostics.exponent_histogram(tree, min_exponent=-3, max_exponent=0)
    assert histogram.counts.tolist() == [1, 0, 0, 1]
    assert histogram.nonfinite_count == 2
    report = diagnostics.nonfinite_report({"c": tree})["c"]
    assert (report["nan"], report["inf"]) == (1, 0)


TARGETS = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize("dtype", TARGETS)
@pytest.mark.parametrize("exponent", [-30, 0, 100])
def test_the_underflow_fraction_equals_that_of_numpy(dtype, exponent):
    values = float32_values()
    finite = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    # float64 holds the products exactly, so they are rounded once.
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.ldexp(finite, exponent).astype(dtype)
    expected = np.mean(rounded.astype(np.float64) == 0)
    share = jax.jit(
        lambda x, s: diagnostics.underflow_fraction(x, scale=s, dtype=dtype)
    )(values, 2.0**exponent)
    assert share == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_half_the_smallest_subnormal_underflows_and_anything_larger_does_not():
    tie = jnp.asarray([2.0**-25])
    assert diagnostics.underflow_fraction(tie) == 1
    assert diagnostics.underflow_fraction(tie, scale=1.0001) == 0
    assert diagnostics.underflow_fraction(tie / 3, scale=3.0) == 1
    assert diagnostics.underflow_fraction(tie, dtype=jnp.float64) == 0


X = jnp.ones(1)
positive = st.floats(2.0**-120, 2.0**120, width=32)


# A leaf of zeros and a subnormal largest entry; two leaves with one exponent.
@pytest.mark.slow
@example([2.0**-140], 0)
@example([1.25, 1.75], 0)
@example([1.75, 1.25], 0)
@given(st.lists(positive, min_size=1, max_size=5), st.integers(-20, 20))
def test_headroom_is_exact_and_the_suggested_scale_leaves_its_margin(values, exponent):
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


@pytest.mark.slow
def test_for_zeros_headroom_is_infinite_and_the_default_scale_is_suggested():
    for tree in ([jnp.zeros(2), jnp.zeros(0)], {}):
        assert diagnostics.headroom_bits(tree) == math.inf
        assert diagnostics.suggest_init_scale(tree) == 2.0**15
        assert diagnostics.underflow_fraction(tree) == 0
        assert len(diagnostics.nonfinite_report(tree)) == len(jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_for_nonfinite_entries_headroom_is_minus_infinity_and_no_scale_fits(value):
    tree = [jnp.ones(2), jnp.asarray([1.0, value]), jnp.ones(3)]
    assert diagnostics.headroom_bits(tree) == -math.inf
    suggested = float(diagnostics.suggest_init_scale(tree))
    with pytest.raises(ValueError, match="`init_scale` must be positive"):
        ols.dynamic_loss_scale(suggested)


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


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (TREE, REPORT),
        (diagnostics.nonfinite_report(TREE), REPORT),
        (jnp.asarray([math.nan]), ONE_REPORT),
    ],
    ids=["tree", "report", "array"],
)
def test_the_report_is_printed_worst_first(what, expected, capsys):
    diagnostics.print_nonfinite_report(what)
    assert capsys.readouterr().out == expected


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


def test_paths_that_look_the_same_are_told_apart():
    tree = {"a/b": jnp.ones(1), "a": {"b": jnp.asarray([math.nan])}}
    report = diagnostics.nonfinite_report(tree)
    assert len(report) == 2
    assert sum(int(of_leaf["nan"]) for of_leaf in report.values()) == 1


ENSEMBLE = jax.vmap(diagnostics.nonfinite_report)({"x": jnp.ones((3, 2))})
EXPONENTS = {"min_exponent": 3, "max_exponent": 2}


@pytest.mark.parametrize(
    ("function", "tree", "settings", "message"),
    [
        (diagnostics.headroom_bits, X, {"scale": 0.0}, "must be positive"),
        (diagnostics.underflow_fraction, X, {"scale": math.inf}, "must be positive"),
        (diagnostics.headroom_bits, X, {"scale": X}, "one number"),
        (diagnostics.exponent_histogram, X, EXPONENTS, "`min_exponent` must be at mo"),
        (diagnostics.suggest_init_scale, X, {"margin_bits": -1.0}, "finite, at least"),
        (diagnostics.print_nonfinite_report, ENSEMBLE, {}, "report of one member"),
    ],
)
def test_bad_arguments_are_refused(function, tree, settings, message):
    with pytest.raises(ValueError, match=message):
        function(tree, **settings)


def test_a_report_printed_inside_jit_is_refused_with_what_to_do_instead():
    with pytest.raises(
        TypeError, match=r"traced ones, as inside `jit`.*debug.callback"
    ):
        jax.jit(diagnostics.print_nonfinite_report)(jnp.ones(2))
    callback = functools.partial(diagnostics.print_nonfinite_report, file=io.StringIO())
    jax.jit(lambda x: jax.debug.callback(callback, x))(jnp.ones(2))
    jax.effects_barrier()
    assert callback.keywords["file"].getvalue().startswith("0 of 1 floating leaves")
