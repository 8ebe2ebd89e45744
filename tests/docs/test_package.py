"""The package as a whole: its files, their order of imports, README, CONTRIBUTING."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "optax_lossscale"
LAYERS = [
    "_checks",
    "_bits",
    "_state",
    "_tree",
    "_finite",
    "_rules",
    "_adaptive",
    "presets._rules",
    "presets._torch",
    "presets._trainers",
    "presets._keras",
    "presets._mindspore",
    "presets._jax",
    "presets",
    "_telemetry",
    "_grad",
    "_masking",
    "_transform",
    "_operations",
    "_precision",
    "_values",
    "_choice",
    "_nested",
    "_custom_rules",
    "_evaluator",
    "_autocast",
    "_keras_parts",
    "_keras",
    "diagnostics",
    "plotting",
    "__init__",
    "demo",
]
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
}
FILES["presets"] = FILES.pop("presets.__init__")
README = (ROOT / "README.md").read_text()


def test_the_version_equals_that_of_the_installed_package():
    assert importlib.metadata.version("optax-lossscale") == ols.__version__


def test_every_file_is_in_a_layer_and_short():
    assert set(FILES) == set(LAYERS)
    for name, path in FILES.items():
        assert len(path.read_text().splitlines()) <= 300, name


@pytest.mark.parametrize("name", LAYERS[: LAYERS.index("__init__")])
def test_a_file_imports_only_from_those_above_it(name):
    above = LAYERS[: LAYERS.index(name)]
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("optax_loss") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            package, _, module = str(node.module).partition(".")
            assert package != "optax_lossscale" or module in above


def test_importing_the_package_loads_neither_flax_nor_matplotlib():
    code = (
        "import sys, optax_lossscale; "
        "assert not {'flax', 'matplotlib', 'sklearn', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_readme_is_short_and_its_first_code_is_early():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert lines.index("```python") < 30


def test_readme_python_blocks_run_one_after_another():
    namespace = {}
    blocks = re.findall(
        r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 3
    for block in blocks:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["finite"]
    assert ols.loss_scale_metrics(namespace["train_state"])["total_notfinite"] == 0
    assert ols.loss_scale_metrics(namespace["optimizer"])["total_notfinite"] == 0


@pytest.mark.parametrize("heading", ["Try it", "Run the tests"])
def test_readme_has_one_command_of_one_line_under_the_heading(heading):
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    assert len(block.splitlines()) == 1
    assert block.startswith("pip install ")


def test_contributing_is_short_and_its_rule_works():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 60
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(block.splitlines()) <= 15
    namespace = {"jnp": jnp, "ols": ols}
    exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)
    rule = namespace["popart_loss_scale"]()
    up = rule.adjust(rule.init(), True, 1e-3)
    down = rule.adjust(up, False, jnp.inf)
    assert (up.loss_scale, down.loss_scale) == (2.0**16, 2.0**15)
    assert down.total_notfinite == 1
