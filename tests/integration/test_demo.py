"""The demo, run as a user runs it."""

import io
import runpy
import subprocess
import sys

import jax.numpy as jnp
import pytest

import optax_lossscale as ols
from helpers.files import ROOT
from helpers.inner import standard_promotion
from optax_lossscale import demo

VARIANTS = {"float32", "float16", "float16_static", "float16_dynamic", "bfloat16"}
TITLES = ["test accuracy", "final loss", "skipped steps", "final scale"]
TITLES += ["flushed to zero"]


def rows_of(text):
    """The cells of the demo's table in a text, by variant and title."""
    lines = [line.strip("| ").split("|") for line in text.splitlines()]
    table = [[cell.strip() for cell in line] for line in lines if len(line) == 6]
    return {
        name: dict(zip(TITLES, cells, strict=True))
        for name, *cells in table
        if name in VARIANTS
    }


def figures_of(text, title):
    return {name: float(row[title].strip("%")) for name, row in rows_of(text).items()}


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """What the demo prints, and its picture. It takes half a minute."""
    picture = tmp_path_factory.mktemp("demo") / "picture.png"
    command = [sys.executable, "-m", "optax_lossscale.demo", "--plot", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"picture: {picture}" in done.stdout
    return done.stdout, picture


@pytest.mark.slow
def test_float16_flushes_gradients_and_learns_nothing_without_a_dynamic_scale(full_run):
    text, picture = full_run
    flushed = figures_of(text, "flushed to zero")
    assert flushed["float32"] == 0
    assert flushed["float16"] > 30
    assert flushed["float16_dynamic"] < 1
    scales = {name: row["final scale"] for name, row in rows_of(text).items()}
    assert scales["float16"] == "`2**0`"
    assert scales["float16_static"] == "`2**3`"
    assert scales["float16_dynamic"] == "`2**20`"  # Five times doubled.
    accuracy = figures_of(text, "test accuracy")
    assert accuracy["float16"] < 0.2
    assert accuracy["float32"] > 0.9
    assert accuracy["float16_dynamic"] == pytest.approx(accuracy["float32"], abs=0.015)
    assert accuracy["float16"] < accuracy["float16_static"]
    assert "always scales by 8" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_readme_shows_what_the_demo_prints(full_run):
    text, _ = full_run
    readme = (ROOT / "README.md").read_text()
    assert rows_of(text).keys() == rows_of(readme).keys() == VARIANTS
    for title in ("skipped steps", "final scale"):
        printed, shown = (
            {name: row[title] for name, row in rows_of(x).items()}
            for x in (text, readme)
        )
        assert printed == shown
    # Other versions of JAX and other machines round differently.
    for title, near in (
        ("test accuracy", {"abs": 0.015}),
        ("final loss", {"rel": 0.1}),
        ("flushed to zero", {"abs": 1}),
    ):
        assert figures_of(readme, title) == pytest.approx(
            figures_of(text, title), **near
        )


# It compiles twice as many programs as a test should: one for each seed and variant.
@pytest.mark.slow
def test_several_seeds_under_autocast_have_a_figure_each(tmp_path, capsys):
    with standard_promotion():
        options = ["--autocast", "--seed", "1", "2", "--steps", "1"]
        demo.main([*options, "--plot", str(tmp_path / "picture.png")])
    rows = rows_of(capsys.readouterr().out)
    assert rows.keys() == VARIANTS
    # In backticks, or `2**15 2**15` would turn bold.
    assert rows["float16_dynamic"]["final scale"] == "`2**15` `2**15`"
    for name, low, high in (("float16", 1, 100), ("float16_dynamic", 0, 0.1)):
        for share in rows[name]["flushed to zero"].split():
            assert low <= float(share.strip("%")) <= high


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("output", [Terminal, io.StringIO])
def test_a_run_has_its_scales_and_in_a_terminal_a_progress_bar(output, monkeypatch):
    monkeypatch.setattr(sys, "stderr", output())
    rule = ols.dynamic_loss_scale(1.0, growth_interval=1)
    with standard_promotion():
        apply = demo.make_apply(jnp.float16, by_autocast=False)
        run = demo.train("short", apply, rule, demo.load_data(), seed=0, steps=3)
    # The scale doubles after each step, and none of these three overflows.
    assert run.loss_scales.tolist() == [1.0, 2.0, 4.0, 8.0]
    assert run.results["final scale"] == "`2**3`"
    assert run.losses.shape == (3,)
    assert ("3/3" in sys.stderr.getvalue()) == sys.stderr.isatty()


@pytest.mark.parametrize("package", ["flax", "matplotlib", "sklearn", "tqdm"])
def test_the_demo_says_what_to_install_if_a_package_is_missing(package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'optax-lossscale\[demo\]'"):
        runpy.run_path(demo.__file__)
