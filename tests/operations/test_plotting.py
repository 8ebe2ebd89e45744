"""Plots show the data that they were given."""

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


def labels_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_each_step_is_drawn_at_the_scale_that_it_used_counted_from_zero():
    # With growth after two finite steps, the steps use 2**10, 2**10, 2**11 and 2**10;
    # a fifth step would use 2**10. A skip is marked at the scale that overflowed.
    stacked = history_of([True, True, False, True])
    listed = [jax.tree.map(lambda x, t=t: x[t], stacked) for t in range(4)]
    for history in (stacked, listed):
        _, given = plt.subplots()
        ax = plotting.plot_loss_scale(history, ax=given)
        assert ax is given
        line, skipped = ax.lines
        assert line.get_xdata().tolist() == [0, 1, 2, 3, 4]
        assert np.log2(line.get_ydata()).tolist() == [10, 10, 11, 10, 10]
        assert skipped.get_xydata().tolist() == [[2, 2.0**11]]
        assert skipped.get_marker() == "x"
        assert ax.yaxis.get_transform().base == 2
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")
        assert labels_of(ax) == ["loss scale", "skipped: 1 of 4 steps"]


def test_an_initial_scale_shows_where_the_first_step_was_skipped():
    history = history_of([False, False, True])
    line, skipped = plotting.plot_loss_scale(history, init_scale=2.0**10).lines
    assert np.log2(line.get_ydata()).tolist() == [10, 9, 8, 8]
    assert np.log2(skipped.get_ydata()).tolist() == [10, 9]


def test_losses_are_drawn_above_loss_scales_in_the_same_colors():
    losses = {"float32": [2.0, 1.0], "float16": [jnp.bfloat16(2.0), jnp.bfloat16(3.0)]}
    axes = plt.subplots(2)[1]
    above, beneath = plotting.plot_training(losses, {"float16": [8.0, 16.0]}, ax=axes)
    assert (above, beneath) == tuple(axes)
    assert [line.get_label() for line in above.lines] == ["float32", "float16"]
    assert [list(line.get_ydata()) for line in above.lines] == [[2.0, 1.0], [2.0, 3.0]]
    (line,) = beneath.lines
    assert (line.get_label(), list(line.get_ydata())) == ("float16", [8.0, 16.0])
    assert line.get_color() == above.lines[1].get_color() != above.lines[0].get_color()
    assert (above.get_yscale(), beneath.yaxis.get_transform().base) == ("log", 2)


@pytest.mark.parametrize(
    ("dtype", "lowest", "normal", "top"),
    [(jnp.bfloat16, -133.5, -126.5, 127.5), (jnp.float16, -24.5, -14.5, 15.5)],
)
def test_histograms_are_drawn_over_the_range_of_the_dtype(dtype, lowest, normal, top):
    histograms = {
        name: diagnostics.exponent_histogram(jnp.float32(entries))
        for name, entries in {
            "before": [2.0**-30, 1.0, 1.0, 0.0],
            "after": [2.0**-15, 2.0**15] * 2,
            "zeros": [0.0] * 4,
        }.items()
    }
    given = plt.subplots()[1]
    ax = plotting.plot_exponent_histogram(histograms, dtype=dtype, ax=given)
    assert ax is given
    *ranges, before, after, _ = ax.patches
    ends = [(x.get_x(), x.get_x() + x.get_width()) for x in ranges]
    assert ends == [(normal, top), (lowest, normal)]
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
    operations, given = operations_of_an_overflow(), plt.subplots()[1]
    ax = plotting.plot_operations(operations, ax=given)
    assert ax is given
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
    # Many are named by their scopes.
    several = 20 * [x for x in operations if x.scope]
    several.sort(key=lambda x: x.scope)
    ax = plotting.plot_operations(several)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["first", "second"]


def test_what_cannot_be_drawn_is_refused():
    of_devices = {"loss_scale": jnp.ones((3, 8)), "last_finite": jnp.ones((3, 8), bool)}
    histogram = diagnostics.exponent_histogram(jnp.ones(1))
    with pytest.raises(ValueError, match="must be a list of the dicts that `loss_scal"):
        plotting.plot_loss_scale([{"loss_scale": 1.0}])
    with pytest.raises(ValueError, match="must hold one scale and one flag for each"):
        plotting.plot_loss_scale(of_devices)
    with pytest.raises(ValueError, match="must hold at least one operation"):
        plotting.plot_operations([])
    with pytest.raises(TypeError, match="`histograms` must map labels to histograms"):
        plotting.plot_exponent_histogram(histogram)
    with pytest.raises(TypeError, match=r"Did you mean .*'float16': loss_scales"):
        plotting.plot_training({}, [1.0])


@pytest.mark.slow
def test_only_drawing_needs_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; import optax_lossscale"
    subprocess.run([sys.executable, "-c", f"{code}.plotting"], check=True)
