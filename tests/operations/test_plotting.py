"""Plots show the data they were given; only drawing one needs matplotlib."""

import functools
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.history import states_after
from optax_lossscale import diagnostics, plotting

matplotlib.use("agg")
import matplotlib.pyplot as plt  # Imported after the backend is chosen.


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def history_of(finite):
    rule = ols.dynamic_loss_scale(2.0**10, growth_interval=2)
    return jax.vmap(ols.loss_scale_metrics)(states_after(rule, finite))


def labels_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("init_scale", [None, 2.0**10])
def test_each_step_is_drawn_at_the_scale_that_it_used_counted_from_zero(init_scale):
    # With growth after two finite steps, the steps use 2**10, 2**10, 2**11 and 2**10;
    # a fifth step would use 2**10. A skip is marked at the scale that overflowed.
    history = history_of([True, True, False, True])
    ax = plotting.plot_loss_scale(history, init_scale=init_scale)
    line, skipped = ax.lines
    assert line.get_xdata().tolist() == [0, 1, 2, 3, 4]
    assert np.log2(line.get_ydata()).tolist() == [10, 10, 11, 10, 10]
    assert skipped.get_xydata().tolist() == [[2, 2.0**11]]
    assert skipped.get_marker() == "x"
    assert ax.yaxis.get_transform().base == 2
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")
    assert labels_of(ax) == ["loss scale", "skipped: 1 of 4 steps"]


def test_an_initial_scale_shows_where_the_first_step_was_skipped():
    history, scale = history_of([False, False, True]), jnp.asarray(2.0**10)
    line, skipped = plotting.plot_loss_scale(history, init_scale=scale).lines
    assert np.log2(line.get_ydata()).tolist() == [10, 9, 8, 8]
    assert np.log2(skipped.get_ydata()).tolist() == [10, 9]


@pytest.mark.parametrize("kind", [float, np.asarray, jnp.asarray])
def test_a_list_of_metrics_is_drawn_as_the_metrics_stacked(kind):
    history = history_of([True, True, False, True])
    dicts = [jax.tree.map(lambda x, t=t: kind(x[t]), history) for t in range(4)]
    of_arrays, of_list = map(plotting.plot_loss_scale, (history, dicts))
    for stacked, listed in zip(of_arrays.lines, of_list.lines, strict=True):
        np.testing.assert_array_equal(stacked.get_xydata(), listed.get_xydata())


HISTOGRAM = diagnostics.exponent_histogram(jnp.ones(1))
ONE_STEP = ols.loss_scale_metrics(ols.dynamic_loss_scale().init())
AT_ZERO = functools.partial(plotting.plot_loss_scale, init_scale=0.0)
OF_DEVICES = {"loss_scale": jnp.ones((3, 8)), "last_finite": jnp.ones((3, 8), bool)}


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ({"scale": jnp.ones(2)}, "must be a list of the dicts that `loss_scale_metri"),
        ([{"loss_scale": 1.0}], "must be a list of the dicts"),
        (3, "must be a list of the dicts"),
        ([], "must hold one scale and one flag for each step"),
        (ONE_STEP, r"got shapes \(\) and \(\)"),
        (OF_DEVICES, r"got shapes \(3, 8\) and \(3, 8\). \(Select one device"),
    ],
)
def test_what_is_no_history_of_one_run_is_refused(history, message):
    with pytest.raises(ValueError, match=f"`history` .*{message}"):
        plotting.plot_loss_scale(history)


@pytest.mark.parametrize(
    ("error", "plot", "args", "message"),
    [
        (ValueError, AT_ZERO, ([ONE_STEP],), "`init_scale` must be positive, finite"),
        (TypeError, plotting.plot_training, ([1.0], {}), "`losses` must map labels to"),
        (TypeError, plotting.plot_training, ({}, [1.0]), "{'float16': loss_scales}"),
        (TypeError, plotting.plot_exponent_histogram, (HISTOGRAM,), "map labels to hi"),
        (ValueError, plotting.plot_operations, ([],), "at least one operation"),
    ],
)
def test_what_cannot_be_drawn_is_refused(error, plot, args, message):
    with pytest.raises(error, match=message):
        plot(*args)


def test_seven_runs_and_histograms_look_different():
    names = "abcdefg"
    above, _ = plotting.plot_training({name: [2.0, 1.0] for name in names}, {})
    lines = {(line.get_color(), line.get_linestyle()) for line in above.lines}
    ax = plotting.plot_exponent_histogram(dict.fromkeys(names, HISTOGRAM))
    stairs = {(x.get_edgecolor(), x.get_linestyle()) for x in ax.patches[2:]}
    assert len(lines) == len(stairs) == 7


def test_losses_are_drawn_above_loss_scales_in_the_same_colors():
    losses = {"float32": [2.0, 1.0], "float16": [jnp.bfloat16(2.0), jnp.bfloat16(3.0)]}
    above, beneath = plotting.plot_training(losses, {"float16": [8.0, 16.0]})
    assert [line.get_label() for line in above.lines] == ["float32", "float16"]
    assert [list(line.get_ydata()) for line in above.lines] == [[2.0, 1.0], [2.0, 3.0]]
    (line,) = beneath.lines
    assert (line.get_label(), list(line.get_ydata())) == ("float16", [8.0, 16.0])
    assert line.get_color() == above.lines[1].get_color()
    assert (above.get_yscale(), beneath.yaxis.get_transform().base) == ("log", 2)


def test_histograms_are_drawn_over_the_range_of_the_dtype():
    entries = {
        "before": [2.0**-30, 1.0, 1.0, 0.0],
        "after": [2.0**-15, 2.0**15] * 2,
        "zeros": [0.0] * 4,
    }
    histograms = {
        name: diagnostics.exponent_histogram(jnp.asarray(values))
        for name, values in entries.items()
    }
    ax = plotting.plot_exponent_histogram(histograms)
    normal, subnormal, before, after, _ = ax.patches
    assert (normal.get_x(), normal.get_x() + normal.get_width()) == (-14.5, 15.5)
    assert (subnormal.get_x(), subnormal.get_width()) == (-24.5, 10.0)
    values, edges, _ = before.get_data()
    assert (values[10], edges[10]) == (pytest.approx(1 / 3), -30.5)
    assert after.get_data().values[25] == 0.5
    assert labels_of(ax)[2:] == ["before (25% zero)", "after", "zeros (100% zero)"]


def operations_of_an_overflow():
    @ols.autocast
    def loss_fn(w, x):
        with jax.named_scope("first"):
            hidden = x @ w  # 3e5 is infinite in float16.
        with jax.named_scope("second"):
            return jnp.sum(jnp.tanh(hidden))

    w, x = jnp.full((3, 2), 1e3), jnp.full((1, 3), 1e2)
    return diagnostics.trace_operations(loss_fn, w, x)


def test_operations_are_drawn_at_their_magnitudes_and_the_overflow_is_named():
    operations = operations_of_an_overflow()
    ax = plotting.plot_operations(operations)
    dots = {x.get_label(): x.get_offsets().tolist() for x in ax.collections}
    for label, is_backward in (("forward", False), ("backward", True)):
        assert dots[label] == [
            [place, x.largest]
            for place, x in enumerate(operations)
            if x.is_backward == is_backward and 0 < x.largest < np.inf
        ]
    product = next(x for x in operations if x.primitive == "dot_general")
    assert dots["made NaN or infinity"] == [[operations.index(product), 3e5]]
    assert dots["received NaN or infinity"]
    assert ax.get_title() == f"First: dot_general, {product.where}"
    assert ax.yaxis.get_transform().base == 2
    normal, subnormal, *_ = ax.patches
    assert (normal.get_y(), normal.get_height()) == (2.0**-14, 65504 - 2.0**-14)
    assert subnormal.get_y() == 2.0**-24
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == [operation.primitive for operation in operations]


def test_many_operations_are_named_by_their_scopes_in_the_plot():
    operations = 20 * operations_of_an_overflow()
    several = sorted((x for x in operations if x.scope), key=lambda x: x.scope)
    ax = plotting.plot_operations(several)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["first", "second"]
    # In the middle of each scope's operations.
    count = sum(x.scope == "first" for x in several)
    middles = [count // 2, count + (len(several) - count) // 2]
    assert ax.get_xticks().tolist() == middles


PLOTS = {
    "scale": lambda x, **ax: plotting.plot_loss_scale(
        {"loss_scale": x, "last_finite": x > 0}, **ax
    ),
    "training": lambda x, **ax: plotting.plot_training({"a": x}, {}, **ax),
    "histogram": lambda x, **ax: plotting.plot_exponent_histogram(
        {"a": diagnostics.exponent_histogram(x)}, **ax
    ),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn_into_given_axes_and_refused_inside_jit(name):
    _, axes = plt.subplots(2)
    given = axes if name == "training" else axes[0]
    drawn = PLOTS[name](jnp.ones(3), ax=given)
    assert np.array_equal(drawn, given)
    with pytest.raises(TypeError, match="traced array"):
        jax.jit(PLOTS[name])(jnp.ones(3))


def test_only_drawing_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"matplotlib\.pyplot"):
        plotting.plot_training({}, {})
