"""The demo: README shows what it prints, and its options do what its help says."""

import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.files import ROOT
from helpers.inner import standard_promotion
from optax_lossscale import demo


def rows_of(text):
    """The cells of the demo's table in a text, by variant."""
    lines = [line.strip("| ").split("|") for line in text.splitlines()]
    rows = [[cell.strip(" `%") for cell in line] for line in lines]
    return {name: cells for name, *cells in rows if name in {"variant", *demo.VARIANTS}}


@pytest.mark.slow
def test_readme_shows_what_the_demo_prints(tmp_path):
    """It takes half a minute."""
    picture = tmp_path / "picture.png"
    command = [sys.executable, "-m", "optax_lossscale.demo", "--plot", picture]
    text = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    assert f"picture: {picture}" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "always scales by 8" in text
    printed, shown = rows_of(text), rows_of((ROOT / "README.md").read_text())
    assert printed.keys() == shown.keys() == {"variant", *demo.VARIANTS}
    assert printed.pop("variant") == shown.pop("variant")
    for name, (accuracy, loss, skipped, scale, flushed) in printed.items():
        in_readme = shown[name]
        assert [skipped, scale] == in_readme[2:4]
        # Other versions of JAX and other machines round differently.
        assert float(accuracy) == pytest.approx(float(in_readme[0]), abs=0.015)
        assert float(loss) == pytest.approx(float(in_readme[1]), rel=0.1)
        assert float(flushed) == pytest.approx(float(in_readme[4]), abs=1)
        assert (float(accuracy) > 0.9) == (name != "float16")


@pytest.mark.parametrize("options", [["--autocast"], []])
def test_each_variant_is_trained_with_each_seed(options, monkeypatch, tmp_path, capsys):
    def train(name, apply, rule, data, seed, steps):
        """Trains nothing, and returns what it was asked for."""
        images = data[0].images
        init = demo.MLP(jnp.float32).init
        params = jax.eval_shape(init, jax.random.key(0), images)
        output = jax.eval_shape(apply, params, images).dtype
        results = {"output": str(output), "seed": str(seed), "steps": str(steps)}
        return demo.Run(results, np.ones(7), np.ones(8))

    monkeypatch.setattr(demo, "train", train)
    picture = tmp_path / "picture.png"
    with standard_promotion():
        demo.main(
            [*options, "--seed", "1", "2", "--steps", "7", "--plot", str(picture)]
        )
    rows = rows_of(capsys.readouterr().out)
    assert rows.pop("variant") == ["output", "seed", "steps"]
    assert list(rows) == list(demo.VARIANTS)
    for name, cells in rows.items():
        # Under autocast the results are float32, as the network was written.
        dtype = "float32" if "--autocast" in options else name.split("_")[0]
        assert cells == [f"{dtype} {dtype}", "1 2", "7 7"]
    assert picture.exists()


@pytest.mark.parametrize("package", ["flax", "tqdm"])
def test_the_demo_says_what_to_install_if_a_package_is_missing(package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'optax-lossscale\[demo\]'"):
        runpy.run_path(demo.__file__)
