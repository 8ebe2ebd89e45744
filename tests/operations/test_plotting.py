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
    assert ax.yaxis.get_transform().base == 2
    assert labels_of(ax) == ["loss scale", "skipped: 1 of 4 steps"]


def test_an_initial_scale_shows_where_the_first_step_was_skipped():
    history, scale = history_of([False, False, True]), jnp.asarray(2.0**10)
    line, skipped = plotting.plot_loss_scale(history, init_scale=scale).lines
    assert np.log2(line.get_ydata()).tolist() == [10, 9, 8, 8]
    assert np.log2(skipped.get_ydata()).tolist() == [10, 9]


def test_a_list_of_metrics_in_python_numbers_is_drawn_as_the_metrics_stacked():
    history = history_of([True, True, False, True])
    dicts = [jax.tree.map(lambda x, t=t: float(x[t]), history) for t in range(4)]
    of_arrays, of_list = map(plotting.plot_loss_scale, (history, dicts))
    for stacked, listed in zip(of_arrays.lines, of_list.lines, strict=True):
        np.testing.assert_array_equal(stacked.get_xydata(), listed.get_xydata())


def metrics(loss_scale, last_finite=(True, True)):
    return {"loss_scale": loss_scale, "last_finite": last_finite}


HISTOGRAM = diagnostics.exponent_histogram(jnp.ones(1))
STATE = ols.dynamic_loss_scale().init()
NO_NUMBERS = r"`history\['loss_scale'\]` must hold numbers or bools, .*, got \["
REFUSED_HISTORIES = [
    ({"scale": jnp.ones(2)}, ValueError, "must be one dict with"),
    ([{"loss_scale": 1.0}], ValueError, "or a list of a dict for each step, got"),
    ([], ValueError, "or a list of a dict for each step, got"),
    (3, ValueError, "must be one dict with"),
    (ols.loss_scale_metrics(STATE), ValueError, "must be stacked over"),
    (metrics([], []), ValueError, r"got shapes \(0,\) and \(0,\)\.$"),
    (metrics(8.0, True), ValueError, "Pass a list of the dicts, one for"),
    # Text read back from a CSV file was drawn as categories, and "False" as True.
    (metrics(["512.0", "256.0"]), TypeError, NO_NUMBERS),
    (metrics([jnp.ones(2), 256.0]), TypeError, NO_NUMBERS),
    ([metrics(None, True)], TypeError, NO_NUMBERS),
    (metrics([8.0, 4.0], ["True", "False"]), TypeError, "_finite.*text == 'True'` for"),
]


@pytest.mark.parametrize(("history", "error", "message"), REFUSED_HISTORIES)
def test_an_argument_that_is_not_a_history_is_refused(history, error, message):
    with pytest.raises(error, match=message):
        plotting.plot_loss_scale(history)


def from_scale(scale):
    return plotting.plot_loss_scale(history_of([True]), init_scale=scale)


in_float64 = functools.partial(plotting.plot_operations, dtype=np.float64)
WRONG_VALUES = [
    (from_scale, (0.0,), "`init_scale` must be positive, finite"),
    (from_scale, (float("nan"),), "`init_scale` must be positive, finite"),
    (plotting.plot_underflow_by_leaf, ({"n": jnp.arange(2)},), "have a floating leaf"),
    (plotting.plot_operations, ([],), "at least one operation"),
    (in_float64, ([],), "`dtype` must have 32 bits or less"),
]
WRONG_TYPES = [
    (from_scale, (STATE,), "`init_scale` must be a number, got LossScale"),
    (plotting.plot_training, ([1.0], {}), "`losses` must map labels to losses, go"),
    (plotting.plot_training, ({}, [1.0]), r"mean `{'float16': loss_scales}`\?"),
    (plotting.plot_training, ({"a": ["2.0"]}, {}), r"`losses\['a'\]` must hold num"),
    (plotting.plot_exponent_histogram, (HISTOGRAM,), "map labels to histograms, g"),
]


@pytest.mark.parametrize(
    ("error", "plot", "args", "message"),
    [
        *((ValueError, *case) for case in WRONG_VALUES),
        *((TypeError, *case) for case in WRONG_TYPES),
    ],
)
def test_what_cannot_be_drawn_is_refused(error, plot, args, message):
    with pytest.raises(error, match=message):
        plot(*args)


def test_the_hint_for_several_devices_selects_one_device_and_not_one_step():
    history = metrics(jnp.asarray([8.0, 4.0, 4.0]), jnp.asarray([True, False, True]))
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 4, 1), history)
    listed = [jax.tree.map(lambda x, t=t: x[t], stacked) for t in range(3)]
    hint = r"x\[:, 0\], history\)`, with `x\[0\]` instead if `history` is a list or"
    for of_devices, one in ((stacked, np.s_[:, 0]), (listed, 0)):
        with pytest.raises(ValueError, match=hint):
            plotting.plot_loss_scale(of_devices)
        selected = jax.tree.map(lambda x, one=one: x[one], of_devices)
        line, skipped = plotting.plot_loss_scale(selected).lines
        assert line.get_ydata().tolist() == [8.0, 8.0, 4.0, 4.0]
        assert skipped.get_xdata().tolist() == [1]


@pytest.mark.slow
def test_integers_beyond_64_bits_are_scales_too_and_states_are_not():
    ax = plotting.plot_underflow_by_leaf(jnp.ones(1), scale=[1, 2**70])
    assert labels_of(ax) == ["scale 2**0", "scale 2**70"]
    with pytest.raises(TypeError, match=r"`scale` must hold numbers .* got Loss"):
        plotting.plot_underflow_by_leaf(jnp.ones(1), scale=STATE)


def test_labels_may_be_integers_such_as_seeds_beside_text():
    ax = plotting.plot_exponent_histogram({0: HISTOGRAM, "a": HISTOGRAM})
    above, beneath = plotting.plot_training({0: [1.0], "a": [1.0]}, {0: [8.0]})
    assert labels_of(ax)[2:] == ["0", "a"]
    assert [line.get_label() for line in above.lines] == ["0", "a"]
    assert [line.get_label() for line in beneath.lines] == ["0"]


def test_seven_runs_histograms_and_scales_look_different():
    names = "abcdefg"
    above, _ = plotting.plot_training({name: [2.0, 1.0] for name in names}, {})
    lines = {(line.get_color(), line.get_linestyle()) for line in above.lines}
    histograms = plotting.plot_exponent_histogram(dict.fromkeys(names, HISTOGRAM))
    stairs = {
        (patch.get_edgecolor(), patch.get_linestyle())
        for patch in histograms.patches[2:]
    }
    scales = 2.0 ** np.arange(7)
    bars = plotting.plot_underflow_by_leaf(jnp.ones(1), scale=scales).patches
    assert len(lines) == len(stairs) == len({bar.get_facecolor() for bar in bars}) == 7


def test_every_plot_is_drawn_into_the_axes_it_is_given_which_may_have_their_own_ticks():
    _, axes = plt.subplots(4)
    axes[0].set_xscale("log")
    axes[1].set_xticks([0, 2])
    drawn = [
        plotting.plot_loss_scale(history_of([True, True]), ax=axes[0]),
        plotting.plot_loss_scale(history_of([True, True]), ax=axes[1]),
        plotting.plot_exponent_histogram({"ones": HISTOGRAM}, ax=axes[2]),
        plotting.plot_underflow_by_leaf(jnp.ones(1), ax=axes[3]),
    ]
    assert all(ax is given for ax, given in zip(drawn, axes, strict=True))
    assert axes[0].get_xscale() == "log"
    assert axes[1].get_xticks().tolist() == [0, 2]


def test_losses_are_drawn_above_loss_scales_in_the_same_colors():
    losses = {"float32": [2.0, 1.0], "float16": [2.0, 2.0]}
    above, beneath = plotting.plot_training(losses, {"float16": [8.0, 16.0]})
    assert [line.get_label() for line in above.lines] == ["float32", "float16"]
    (line,) = beneath.lines
    assert (line.get_label(), list(line.get_ydata())) == ("float16", [8.0, 16.0])
    assert line.get_color() == above.lines[1].get_color()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_losses_may_be_a_list_of_arrays_of_any_floating_dtype(dtype):
    above, _ = plotting.plot_training({"run": [dtype(2.0), dtype(1.0)]}, {})
    assert list(above.lines[0].get_ydata()) == [2.0, 1.0]


def test_a_fifth_run_shows_as_rings_where_it_lies_on_the_first():
    above, _ = plotting.plot_training({name: [2.0, 1.0] for name in "abcde"}, {})
    first, *_, last = above.lines
    assert (first.get_marker(), last.get_marker()) == ("None", "o")
    assert last.get_markersize() > last.get_linewidth()
    assert first.get_linewidth() > 2 * last.get_linewidth()  # It is seen behind.


@pytest.mark.slow
def test_histograms_are_drawn_over_the_range_of_the_dtype():
    entries = {
        "before": [2.0**-30, 1.0, 1.0, 0.0],
        "after": [2.0**-15, 2.0**15] * 2,
        "_g": [0.0] * 4,
    }
    histograms = {
        name: diagnostics.exponent_histogram(jnp.asarray(values))
        for name, values in entries.items()
    }
    ax = plotting.plot_exponent_histogram(histograms)
    normal, subnormal, before, after, _ = ax.patches
    assert (normal.get_x(), normal.get_x() + normal.get_width()) == (-14.5, 15.5)
    assert (subnormal.get_x(), subnormal.get_width()) == (-24.5, 10.0)
    assert before.get_data().values[10] == pytest.approx(1 / 3)
    assert after.get_data().values[25] == 0.5
    assert labels_of(ax)[2:] == ["before (25% zero)", "after", " _g (100% zero)"]


def test_without_runs_two_empty_axes_are_drawn():
    axes = plotting.plot_training({}, {})
    assert [(ax.get_legend(), list(ax.lines)) for ax in axes] == [(None, [])] * 2


@pytest.mark.slow
def test_a_bar_is_drawn_for_every_leaf_and_scale():
    grads = {"w": jnp.asarray([1e-9, 1e-3]), "b": jnp.ones(2), "step": jnp.arange(2)}
    ax = plotting.plot_underflow_by_leaf(grads, scale=jnp.asarray([1.0, 2.0**15]))
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [0, 50, 0, 0]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["b", "w"]


def test_the_axis_of_shares_ends_a_little_beyond_the_longest_bar():
    quarter = jnp.asarray([1e-9, 1.0, 1.0, 1.0])
    ax = plotting.plot_underflow_by_leaf([quarter, jnp.ones(2)])
    assert ax.get_xlim() == pytest.approx((0, 25 * 1.05))
    for grads in (jnp.ones(2), jnp.full(2, 1e-9)):
        assert plotting.plot_underflow_by_leaf(grads).get_xlim() == (0, 100)


def operations_of_an_overflow():
    @ols.autocast
    def loss_fn(w, x):
        with jax.named_scope("first"):
            hidden = x @ w  # 3e5 is infinite in float16.
        with jax.named_scope("second"):
            return jnp.sum(jnp.tanh(hidden))

    w, x = jnp.full((3, 2), 1e3), jnp.full((1, 3), 1e2)
    return diagnostics.trace_operations(loss_fn, w, x)


def test_the_operation_that_overflowed_is_named_in_the_plot():
    operations = operations_of_an_overflow()
    ax = plotting.plot_operations(operations)
    (note,) = (text.get_text() for text in ax.texts)
    assert note.startswith("dot_general, test_plotting.py:")
    assert "made NaN or infinity" in labels_of(ax)
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == [operation.primitive for operation in operations]


def test_many_operations_are_named_by_their_scopes_in_the_plot():
    operations = operations_of_an_overflow()
    several = [
        operation
        for scope in ("first", "second")
        for operation in 40 * operations
        if operation.scope == scope
    ]
    ax = plotting.plot_operations(several)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["first", "second"]


def test_without_matplotlib_plotting_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    message = "plotting needs matplotlib: pip install matplotlib"
    with pytest.raises(ImportError, match=message):
        plotting.plot_underflow_by_leaf(jnp.ones(1))


PLOTS = {
    "scale": lambda x: plotting.plot_loss_scale(metrics(x, x > 0)),
    "training": lambda x: plotting.plot_training({"a": x}, {}),
    "histogram": lambda x: plotting.plot_exponent_histogram(
        {"a": diagnostics.exponent_histogram(x)}
    ),
    "underflow": lambda x: plotting.plot_underflow_by_leaf(x),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_inside_jit_is_refused_and_told_where_to_draw(name):
    with pytest.raises(TypeError, match=r"got traced ones, as inside `jit`.*outside"):
        jax.jit(PLOTS[name])(jnp.ones(3))
