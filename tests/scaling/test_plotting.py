"""Plots show the data they were given; only drawing one needs matplotlib."""

import subprocess
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


def test_the_loss_scale_is_drawn_on_powers_of_two():
    ax = plotting.plot_loss_scale(history_of([True, True, False, True]))
    assert ax.yaxis.get_transform().base == 2
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["loss scale", "skipped: 1 of 4 steps"]


def test_each_step_is_drawn_at_the_scale_that_it_used_counted_from_zero():
    # With growth after two finite steps, the steps use 2**10, 2**10, 2**11 and 2**10;
    # a fifth step would use 2**10.
    history = history_of([True, True, False, True])
    for init_scale in (None, 2.0**10):
        ax = plotting.plot_loss_scale(history, init_scale=init_scale)
        line = ax.lines[0]
        assert line.get_xdata().tolist() == [0, 1, 2, 3, 4]
        assert np.log2(line.get_ydata()).tolist() == [10, 10, 11, 10, 10]


def test_a_skip_is_marked_at_the_scale_that_overflowed():
    ax = plotting.plot_loss_scale(
        history_of([False, False, True]), init_scale=jnp.asarray(2.0**10)
    )
    line, skipped = ax.lines
    assert np.log2(line.get_ydata()).tolist() == [10, 9, 8, 8]
    assert skipped.get_xdata().tolist() == [0, 1]
    assert np.log2(skipped.get_ydata()).tolist() == [10, 9]


@pytest.mark.parametrize("init_scale", [0.0, float("nan"), -1.0])
def test_a_first_scale_that_no_step_can_have_used_is_refused(init_scale):
    with pytest.raises(ValueError, match="`init_scale` must be positive, finite"):
        plotting.plot_loss_scale(history_of([True]), init_scale=init_scale)


def test_stacked_metrics_of_a_python_loop_are_drawn():
    rule = ols.dynamic_loss_scale(2.0**10)
    state, dicts = rule.init(), []
    for finite in (True, False):
        state = rule.adjust(state, finite)
        dicts.append(ols.loss_scale_metrics(state))
    history = jax.tree.map(lambda *x: jnp.stack(x), *dicts)
    ax = plotting.plot_loss_scale(history)
    assert ax.lines[0].get_ydata().tolist() == [2.0**10, 2.0**10, 2.0**9]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ({"scale": jnp.ones(2)}, "must be one dict with"),
        ([{"loss_scale": 1.0}], "or a list of a dict for each step, got"),
        ([], "or a list of a dict for each step, got"),
        (3, "must be one dict with"),
        (ols.loss_scale_metrics(ols.no_loss_scale().init()), "must be stacked over"),
        ({"loss_scale": [], "last_finite": []}, r"got shapes \(0,\) and \(0,\)\.$"),
        ({"loss_scale": 8.0, "last_finite": True}, "Pass a list of the dicts, one for"),
    ],
)
def test_an_argument_that_is_not_a_history_is_refused(history, message):
    with pytest.raises(ValueError, match=message):
        plotting.plot_loss_scale(history)


@pytest.mark.parametrize("values", [["512.0", "256.0"], [jnp.ones(2), 256.0], [None]])
def test_a_history_that_does_not_hold_numbers_is_refused_and_not_drawn(values):
    # Text read back from a CSV file was drawn as categories, and "False" as True.
    history = {"loss_scale": values, "last_finite": [True] * len(values)}
    message = r"`history\['loss_scale'\]` must hold numbers or bools, .*, got \["
    with pytest.raises(TypeError, match=message):
        plotting.plot_loss_scale(history)
    dicts = [{"loss_scale": x, "last_finite": True} for x in values]
    with pytest.raises(TypeError, match=message):
        plotting.plot_loss_scale(dicts)


def test_verdicts_as_text_are_refused_with_how_to_convert_them():
    history = {"loss_scale": [8.0, 4.0], "last_finite": ["True", "False"]}
    with pytest.raises(TypeError, match=r"`history\['last_finite.*text == 'True'` for"):
        plotting.plot_loss_scale(history)


def test_the_hint_for_several_devices_selects_one_device_and_not_one_step():
    scales = jnp.asarray([8.0, 4.0, 4.0])
    finite = jnp.asarray([True, False, True])
    stacked = {"loss_scale": scales, "last_finite": finite}
    history = jax.tree.map(lambda x: jnp.stack([x] * 4, axis=1), stacked)
    listed = [jax.tree.map(lambda x, t=t: x[t], history) for t in range(3)]
    hint = r"x\[:, 0\], history\)`, with `x\[0\]` instead if `history` is a list or"
    for several in (history, listed):
        with pytest.raises(ValueError, match=hint):
            plotting.plot_loss_scale(several)
    for one in (
        jax.tree.map(lambda x: x[:, 0], history),
        jax.tree.map(lambda x: x[0], listed),
    ):
        line, skipped = plotting.plot_loss_scale(one).lines
        assert line.get_ydata().tolist() == [8.0, 8.0, 4.0, 4.0]
        assert skipped.get_xdata().tolist() == [1]


def test_an_optimizer_state_is_refused_as_a_scale():
    state = ols.dynamic_loss_scale().init()
    with pytest.raises(TypeError, match="`init_scale` must be a number, got LossScale"):
        plotting.plot_loss_scale(history_of([True]), init_scale=state)
    with pytest.raises(TypeError, match=r"`scale` must hold numbers .* got Loss"):
        plotting.plot_underflow_by_leaf(jnp.ones(1), scale=state)


def test_integers_beyond_64_bits_are_scales_too():
    ax = plotting.plot_underflow_by_leaf(jnp.ones(1), scale=[1, 2**70])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["scale 2**0", "scale 2**70"]


def test_runs_without_labels_are_refused():
    with pytest.raises(TypeError, match=r"`losses` must map labels to losses, got an "):
        plotting.plot_training([1.0], {})
    with pytest.raises(TypeError, match=r"mean `{'float16': loss_scales}`\?"):
        plotting.plot_training({}, [1.0])


def test_losses_as_text_are_refused():
    with pytest.raises(TypeError, match=r"`losses\['a'\]` must hold numbers"):
        plotting.plot_training({"a": ["2.0", "10.0"]}, {})


def test_labels_may_be_integers_such_as_seeds_beside_text():
    histogram = diagnostics.exponent_histogram(jnp.ones(1))
    ax = plotting.plot_exponent_histogram({0: histogram, "a": histogram})
    above, beneath = plotting.plot_training({0: [1.0], "a": [1.0]}, {0: [8.0]})
    assert [text.get_text() for text in ax.get_legend().get_texts()[2:]] == ["0", "a"]
    assert [line.get_label() for line in above.lines] == ["0", "a"]
    assert [line.get_label() for line in beneath.lines] == ["0"]


def test_seven_runs_histograms_and_scales_look_different():
    names = "abcdefg"
    histogram = diagnostics.exponent_histogram(jnp.ones(1))
    above, _ = plotting.plot_training({name: [2.0, 1.0] for name in names}, {})
    lines = {(line.get_color(), line.get_linestyle()) for line in above.lines}
    histograms = plotting.plot_exponent_histogram(dict.fromkeys(names, histogram))
    stairs = {
        (patch.get_edgecolor(), patch.get_linestyle())
        for patch in histograms.patches[2:]
    }
    scales = 2.0 ** np.arange(7)
    bars = plotting.plot_underflow_by_leaf(jnp.ones(1), scale=scales).patches
    assert len(lines) == len(stairs) == len({bar.get_facecolor() for bar in bars}) == 7


def test_a_loss_scale_is_drawn_into_axes_with_ticks_of_their_own():
    _, (logarithmic, fixed) = plt.subplots(2)
    logarithmic.set_xscale("log")
    fixed.set_xticks([0, 2])
    for ax in (logarithmic, fixed):
        plotting.plot_loss_scale(history_of([True, True]), ax=ax)
    assert logarithmic.get_xscale() == "log"
    assert fixed.get_xticks().tolist() == [0, 2]


def test_losses_are_drawn_above_loss_scales_in_the_same_colors():
    losses = {"float32": [2.0, 1.0], "float16": [2.0, 2.0]}
    above, beneath = plotting.plot_training(losses, {"float16": [8.0, 16.0]})
    assert [line.get_label() for line in above.lines] == ["float32", "float16"]
    (line,) = beneath.lines
    assert (line.get_label(), list(line.get_ydata())) == ("float16", [8.0, 16.0])
    assert line.get_color() == above.lines[1].get_color()


def test_a_fifth_run_shows_as_rings_where_it_lies_on_the_first():
    above, _ = plotting.plot_training({name: [2.0, 1.0] for name in "abcde"}, {})
    first, *_, last = above.lines
    assert (first.get_marker(), last.get_marker()) == ("None", "o")
    assert last.get_markersize() > last.get_linewidth()
    assert first.get_linewidth() > 2 * last.get_linewidth()  # It is seen behind.


def test_histograms_are_drawn_over_the_range_of_the_dtype():
    histograms = {
        "before": diagnostics.exponent_histogram(
            jnp.asarray([2.0**-30, 1.0, 1.0, 0.0])
        ),
        "after": diagnostics.exponent_histogram(jnp.asarray([2.0**-15, 2.0**15])),
    }
    ax = plotting.plot_exponent_histogram(histograms)
    normal, subnormal, before, after = ax.patches
    assert (normal.get_x(), normal.get_x() + normal.get_width()) == (-14.5, 15.5)
    assert (subnormal.get_x(), subnormal.get_width()) == (-24.5, 10.0)
    assert before.get_data().values[10] == pytest.approx(1 / 3)
    assert after.get_data().values[25] == 0.5
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[2:] == ["before (25% zero)", "after"]


def test_the_label_of_a_histogram_says_that_every_entry_is_zero():
    histogram = diagnostics.exponent_histogram(jnp.zeros(3))
    ax = plotting.plot_exponent_histogram({"_g": histogram})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[2:] == [" _g (100% zero)"]


def test_a_history_of_python_floats_is_drawn_too():
    history = {"loss_scale": [8.0, 8.0, 4.0], "last_finite": [1.0, 1.0, 0.0]}
    ax = plotting.plot_loss_scale(history)
    assert ax.lines[1].get_label() == "skipped: 1 of 3 steps"


def test_without_runs_two_empty_axes_are_drawn():
    axes = plotting.plot_training({}, {})
    assert [(ax.get_legend(), list(ax.lines)) for ax in axes] == [(None, [])] * 2


def test_a_histogram_without_a_label_is_refused():
    histogram = diagnostics.exponent_histogram(jnp.ones(1))
    with pytest.raises(TypeError, match="map labels to histograms, got an object"):
        plotting.plot_exponent_histogram(histogram)


def test_a_bar_is_drawn_for_every_leaf_and_scale():
    grads = {"w": jnp.asarray([1e-9, 1e-3]), "b": jnp.ones(2), "step": jnp.arange(2)}
    ax = plotting.plot_underflow_by_leaf(grads, scale=jnp.asarray([1.0, 2.0**15]))
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [0, 50, 0, 0]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["b", "w"]
    with pytest.raises(ValueError, match="`tree` must have a floating leaf"):
        plotting.plot_underflow_by_leaf({"step": jnp.arange(2)})


def test_the_axis_of_shares_ends_a_little_beyond_the_longest_bar():
    quarter = jnp.asarray([1e-9, 1.0, 1.0, 1.0])
    ax = plotting.plot_underflow_by_leaf([quarter, jnp.ones(2)])
    assert ax.get_xlim() == pytest.approx((0, 25 * 1.05))
    for grads in (jnp.ones(2), jnp.full(2, 1e-9)):
        assert plotting.plot_underflow_by_leaf(grads).get_xlim() == (0, 100)


def test_every_plot_is_drawn_into_the_axes_it_is_given():
    _, axes = plt.subplots(3)
    histogram = diagnostics.exponent_histogram(jnp.ones(1))
    drawn = [
        plotting.plot_loss_scale(history_of([True]), ax=axes[0]),
        plotting.plot_exponent_histogram({"ones": histogram}, ax=axes[1]),
        plotting.plot_underflow_by_leaf(jnp.ones(1), ax=axes[2]),
    ]
    assert all(ax is given for ax, given in zip(drawn, axes, strict=True))


def test_without_matplotlib_plotting_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None; import jax.numpy as jnp; "
        "import optax_lossscale as ols; "
        "ols.plotting.plot_underflow_by_leaf(jnp.ones(1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "ImportError: plotting needs matplotlib" in done.stderr
    assert "pip install 'optax-lossscale[plot]'" in done.stderr


def test_a_list_of_metrics_is_drawn_as_the_same_metrics_stacked():
    history = history_of([True, True, False, True])
    dicts = [jax.tree.map(lambda x, t=t: x[t], history) for t in range(4)]
    of_arrays, of_list = map(plotting.plot_loss_scale, (history, dicts))
    for stacked, listed in zip(of_arrays.lines, of_list.lines, strict=True):
        np.testing.assert_array_equal(stacked.get_xydata(), listed.get_xydata())


@pytest.mark.parametrize("name", ["scale", "training", "histogram", "underflow"])
def test_a_plot_inside_jit_is_refused_and_told_where_to_draw(name):
    histogram = ols.diagnostics.exponent_histogram
    plots = {
        "scale": lambda x: ols.plotting.plot_loss_scale(
            {"loss_scale": x, "last_finite": x > 0}
        ),
        "training": lambda x: ols.plotting.plot_training({"a": x}, {}),
        "histogram": lambda x: ols.plotting.plot_exponent_histogram(
            {"a": histogram(x)}
        ),
        "underflow": lambda x: ols.plotting.plot_underflow_by_leaf(x),
    }
    with pytest.raises(TypeError, match=r"got traced ones, as inside `jit`.*outside"):
        jax.jit(plots[name])(jnp.ones(3))
