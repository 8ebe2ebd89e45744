"""The checks of settings by themselves; each setting is tested with its rule."""

import functools
import shutil
import sys
from argparse import ArgumentTypeError

import jax.numpy as jnp
import matplotlib.pyplot as plt
import pytest

import optax_lossscale as ols
from optax_lossscale._ground.checks import check_number
from optax_lossscale.plotting._files import check_output_file, check_picture_file


def test_the_error_for_a_setting_without_an_upper_limit_names_no_upper_limit():
    with pytest.raises(
        ValueError, match=r"^`x` must be finite, at least 0, got -1.0.$"
    ):
        check_number("x", -1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "is_inverted"),
    [
        ("growth_factor", 0.5, True),
        ("growth_factor", 1.0, False),
        ("growth_factor", 0.0, False),
        ("growth_factor", 1e-320, False),
        ("growth_factor", -2.0, False),
        ("growth_factor", float("nan"), False),
        ("backoff_factor", 2.0, True),
        ("backoff_factor", 1.0, False),
    ],
)
def test_only_a_factor_whose_reciprocal_would_do_is_called_inverted(
    name, value, is_inverted
):
    with pytest.raises(ValueError, match=f"`{name}` must be strictly") as error:
        ols.dynamic_loss_scale(**{name: value})
    assert ("Did you pass its reciprocal?" in str(error.value)) is is_inverted


def test_a_state_is_refused_as_a_setting():
    # NumPy's own error was a ValueError on an inhomogeneous shape.
    state = ols.dynamic_loss_scale().init()
    with pytest.raises(TypeError, match=r"`init_scale` must be a number, .*type Loss"):
        ols.dynamic_loss_scale(state)


ONE = jnp.ones(1)
DTYPE_SETTINGS = {
    "headroom_loss_scale": lambda dtype: ols.headroom_loss_scale(dtype=dtype),
    "underflow_fraction": functools.partial(ols.diagnostics.underflow_fraction, ONE),
    "headroom_bits": functools.partial(ols.diagnostics.headroom_bits, ONE),
    "suggest_init_scale": functools.partial(ols.diagnostics.suggest_init_scale, ONE),
    "exponent_histogram": functools.partial(ols.plotting.plot_exponent_histogram, {}),
    "underflow_by_leaf": functools.partial(ols.plotting.plot_underflow_by_leaf, ONE),
}


@pytest.mark.parametrize("dtype", [None, jnp.int8, "fp16"])
@pytest.mark.parametrize("name", DTYPE_SETTINGS)
def test_only_a_floating_dtype_is_taken_and_none_is_not_read_as_float64(name, dtype):
    with pytest.raises(TypeError, match="`dtype` must be a floating dtype, got "):
        DTYPE_SETTINGS[name](dtype=dtype)
    assert not plt.get_fignums()


def test_an_output_file_that_can_be_written_is_neither_made_nor_changed(tmp_path):
    old, new, link = (tmp_path / name for name in ("old", "new", "link"))
    old.write_text("results")
    link.symlink_to(new)
    for path in (old, new, link):
        assert check_output_file(str(path)) == path
    assert old.read_text() == "results"
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link"}
    assert link.is_symlink()


# An empty picture is drawn without LaTeX.
NEEDS_LATEX = pytest.mark.skipif(
    shutil.which("xelatex") is not None, reason="LaTeX is installed"
)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("picture", "Format .. is not supported"),
        pytest.param("picture.pgf", "xelatex", marks=NEEDS_LATEX),
    ],
)
def test_a_picture_that_matplotlib_cannot_draw_is_refused(tmp_path, name, reason):
    with pytest.raises(ArgumentTypeError, match=f"cannot draw .*: .*{reason}"):
        check_picture_file(str(tmp_path / name))
    assert check_picture_file(str(tmp_path / "picture.svg"))
    assert not list(tmp_path.iterdir())
    assert not plt.get_fignums()


def test_a_picture_is_refused_if_matplotlib_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ArgumentTypeError, match=r"cannot draw .*matplotlib"):
        check_picture_file(str(tmp_path / "picture.png"))
