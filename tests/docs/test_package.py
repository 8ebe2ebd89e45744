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
    "_types",
    "_checks",
    "_bits",
    "_tree",
    "_jaxprs",
    "_normalization",
    "_state",
    "_scaling",
    "_finite",
    "_rules",
    "_smooth",
    "_headroom",
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
    "_master_weights",
    "_keras",
    "_keras.parts",
    "_keras.optimizer",
    "_keras_parts",
    "_autocast",
    "_autocast.policy",
    "_autocast.values",
    "_autocast.choice",
    "_autocast.control_flow",
    "_autocast.custom_derivatives",
    "_autocast.nesting",
    "_autocast.rounding",
    "_autocast.notes",
    "_autocast.interpreter",
    "_autocast.nnx",
    "_autocast.transform",
    "_autocast.report",
    "diagnostics",
    "plotting",
    "__init__",
    "demo",
]
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
}
for package in ("presets", "_keras", "_autocast"):
    FILES[package] = FILES.pop(f"{package}.__init__")
README = (ROOT / "README.md").read_text()


def test_the_version_equals_that_of_the_installed_package():
    assert importlib.metadata.version("optax-lossscale") == ols.__version__


def lines_of_code(source):
    """How many lines are left without docstrings, comments and blank lines."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        can_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if can_have_one and ast.get_docstring(node) is not None:
            docstrings |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return sum(
        number not in docstrings and not line.strip().startswith("#") and bool(line)
        for number, line in enumerate(source.splitlines(), start=1)
    )


def test_every_file_is_in_a_layer_and_has_about_200_lines_of_code_at_most():
    assert set(FILES) == set(LAYERS)
    for name, path in FILES.items():
        assert lines_of_code(path.read_text()) <= 220, name


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
