"""The demo, run as a user runs it."""

import json
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.files import ROOT
from helpers.inner import standard_promotion
from optax_lossscale import demo

README = ROOT / "README.md"

FIGURES = {"accuracy", "final_loss", "skipped_steps", "final_scale", "flushed_to_zero"}
DEFAULT = "loss_scale_demo.png"
VARIANTS = {"float32", "float16", "float16_static", "float16_dynamic", "bfloat16"}


def table_rows(text):
    """The cells of the demo's table in a text, by variant; of several seeds the first.

    Backticks and percent signs are left out.
    """
    rows = [line.strip("|").split("|") for line in text.splitlines()]
    cells = [
        [cell.split()[0].strip("`%") for cell in row if cell]
        for row in rows
        if len(row) == 6
    ]
    return {name: figures for name, *figures in cells if name in VARIANTS}


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """What the demo prints, its results, and its picture. It takes half a minute."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "optax_lossscale.demo"]
    command += ["--json", folder / "r.json", "--plot", folder / "picture.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "100%" in done.stderr  # Each variant has a progress bar.
    results = json.loads((folder / "r.json").read_text())
    return done.stdout, results, folder / "picture.png"


@pytest.mark.slow
def test_float16_flushes_gradients_and_learns_nothing_without_a_dynamic_scale(full_run):
    _, results, _ = full_run
    flushed = {name: figures["flushed_to_zero"] for name, figures in results.items()}
    assert flushed["float32"] == 0
    assert flushed["float16"] > 0.3
    assert flushed["float16_dynamic"] < 0.01
    assert results["float16_static"]["final_scale"] == 8
    assert results["float16_dynamic"]["final_scale"] > 2**15
    accuracy = {name: figures["accuracy"] for name, figures in results.items()}
    assert accuracy["float16"] < 0.2
    assert accuracy["float32"] > 0.9
    assert accuracy["float16_dynamic"] == pytest.approx(accuracy["float32"], abs=0.015)
    assert accuracy["float16"] < accuracy["float16_static"]


@pytest.mark.slow
def test_readme_shows_what_the_demo_prints(full_run):
    text, results, picture = full_run
    printed, shown = table_rows(text), table_rows(README.read_text())
    assert set(printed) == set(shown) == set(results) == VARIANTS
    for name, (accuracy, loss, skipped, scale, flushed) in printed.items():
        assert shown[name][2:4] == [skipped, scale], name
        # Other versions of JAX and other machines round differently.
        assert float(shown[name][0]) == pytest.approx(float(accuracy), abs=0.015), name
        assert float(shown[name][1]) == pytest.approx(float(loss), rel=0.1), name
        assert float(shown[name][4]) == pytest.approx(float(flushed), abs=1), name
    assert "always scales by 8" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


# It compiles twice as many programs as a test should: one for each seed and variant.
@pytest.mark.slow
def test_several_seeds_under_autocast_give_one_list_of_results_for_each_variant(
    tmp_path, capsys
):
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")]
    with standard_promotion():
        demo.main(["--autocast", "--seed", "1", "2", "--steps", "1", *files])
    results = json.loads((tmp_path / "r.json").read_text())
    assert [len(of_seeds) for of_seeds in results.values()] == [2] * 5
    for figures in results["float16"]:
        assert set(figures) == FIGURES
        assert figures["flushed_to_zero"] > 0.01
    for figures in results["float16_dynamic"]:
        assert figures["flushed_to_zero"] < 0.001
    assert "results:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_scales_of_a_run_are_those_of_its_steps_and_then_the_final_one():
    rule = ols.dynamic_loss_scale(1.0, growth_interval=1)
    with standard_promotion():
        apply = demo.make_apply(jnp.float16, by_autocast=False)
        run = demo.train("short", apply, rule, demo.load_data(), seed=0, steps=3)
    # The scale doubles after each step, and none of these three overflows.
    assert run.loss_scales.tolist() == [1.0, 2.0, 4.0, 8.0]
    assert run.results["final_scale"] == 8.0
    assert run.losses.shape == (3,)


def test_scales_of_the_table_stand_in_backticks():
    figures = dict.fromkeys(FIGURES, 1) | {"final_scale": 2.0**20}
    run = demo.Run(figures, np.ones(1), np.ones(2))
    *_, row = demo.format_table({"float16_dynamic": [run, run]}).splitlines()
    assert "| `2**20` `2**20` |" in row


@pytest.mark.slow
def test_a_rule_is_that_of_the_dynamic_variant_and_no_results_are_written_unasked(
    tmp_path, capsys, monkeypatch
):
    used = {}

    def train(name, apply, rule, *args):
        used[name] = rule
        return demo.Run(dict.fromkeys(FIGURES, 1.0), np.ones(2), np.ones(3))

    monkeypatch.setattr(demo, "train", train)
    demo.main(["--rule", "headroom", "--plot", str(tmp_path / "picture.png")])
    assert {name: repr(rule) for name, rule in used.items()} == {
        "float32": "no_loss_scale()",
        "float16": "no_loss_scale()",
        "float16_static": repr(demo.VARIANTS["float16_static"][1]),
        "float16_dynamic": repr(demo.RULES["headroom"]),
        "bfloat16": "no_loss_scale()",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    assert "results:" not in capsys.readouterr().out


SEED = "--seed: must be an integer from 0 to 2**32 - 1, got"
ONE_FILE = "--json and --plot must be two files, got"
REFUSED = [
    (["--steps", "0"], "--steps must be at least 1, got 0"),
    (["--seed", "0", str(2**32)], f"{SEED} {2**32}"),
    (["--seed", "0", "-1"], f"{SEED} -1"),
    (["--seed", "0", "one"], f"{SEED} one"),
    (["--json", "a.png", "--plot", "./a.png"], f"{ONE_FILE} a.png twice"),
    (["--json", DEFAULT], f"{ONE_FILE} {DEFAULT} twice"),
    (["--json", "missing/r.json"], "argument --json: cannot"),
    (["--json", "missing/r.json"], "No such file or directory"),
    (["--json", "."], "Is a directory"),
    (["--plot", "missing/p.png"], "No such file or directory"),
    (["--plot", "picture.docx"], "Format 'docx' is not supported"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_cannot_work_are_refused_before_the_training(
    options, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "train", None)  # It is never called.
    with pytest.raises(SystemExit, match=r"^2$"):
        demo.main(options)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_largest_seed_makes_a_key():
    seed = demo.parse_arguments(["--seed", str(2**32 - 1)]).seed
    assert seed == [2**32 - 1]
    assert jax.random.key(seed[0]).shape == ()


@pytest.mark.parametrize("package", ["flax", "matplotlib", "sklearn", "tqdm"])
def test_the_demo_says_what_to_install_if_a_package_is_missing(package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'optax-lossscale\[demo\]'"):
        runpy.run_path(demo.__file__)


def test_a_run_that_fails_leaves_the_files_as_they_were(tmp_path, monkeypatch):
    old, new = tmp_path / "old.json", tmp_path / "new.png"
    old.write_text("results")

    def fail(*args):
        raise FloatingPointError("diverged")

    monkeypatch.setattr(demo, "train", fail)
    with pytest.raises(FloatingPointError, match="diverged"):
        demo.main(["--json", str(old), "--plot", str(new)])
    assert old.read_text() == "results"
    assert not new.exists()
