"""The package as a whole: its names, its layers, its README."""

import ast
import importlib.metadata
import inspect
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

ROOT = pathlib.Path(__file__).parents[1]
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
MODULES = {"diagnostics", "plotting", "presets"}
README = (ROOT / "README.md").read_text()
PUBLIC = {name: getattr(ols, name) for name in ols.__all__}

SIGNATURES = {
    "dynamic_loss_scale": "init_scale, *, growth_factor, backoff_factor, "
    "growth_interval, min_scale, max_scale, hysteresis, hysteresis_refill",
    "static_loss_scale": "scale, *, skip_nonfinite",
    "no_loss_scale": "",
    "smooth_loss_scale": "init_scale, *, growth_bits, backoff_bits, min_scale, "
    "max_scale",
    "headroom_loss_scale": "init_scale, *, history, recent, margin_bits, min_scale, "
    "max_scale, dtype",
    "scale": "tree, state",
    "unscale": "tree, state, *, mask",
    "all_finite": "tree, *, axis_name",
    "max_magnitude": "tree, *, axis_name",
    "scaled_value_and_grad": "fun, state, argnums, has_aux, **jax_kwargs",
    "scaled_grad": "fun, state, argnums, has_aux, **jax_kwargs",
    "loss_scaled": "inner, loss_scale, *, axis_name, unscale_mask, check_updates",
    "adopt_inner_state": "inner_state, loss_scale",
    "loss_scale_optimizer": "inner_optimizer, *, dynamic, initial_scale, "
    "dynamic_growth_steps, weight_decay, learning_rate, clipnorm, clipvalue, "
    "global_clipnorm, use_ema, ema_momentum, ema_overwrite_frequency, "
    "loss_scale_factor, gradient_accumulation_steps, axis_name",
    "ema_params": "opt_state",
    "finalize_params": "params, opt_state",
    "autocast": "fun, dtype, *, level, low, high",
    "full_precision": "fun",
    "autocast_report": "fun, *args, **kwargs",
    "cast_params": "params, dtype, *, keep",
    "master_weights": "inner",
    "get_loss_scale": "tree",
    "find_loss_scale_state": "tree",
    "set_loss_scale": "tree, value",
    "loss_scale_metrics": "tree",
    "raise_if_stalled": "tree, max_consecutive",
}
TUPLES = {
    "LossScale": ("init", "adjust", "skips", "needs_grads_max"),
    "LossScaledState": ("loss_scale_state", "inner_state"),
}


def names_of(signature):
    """A signature's names, with `*` where the keyword-only ones begin."""
    names, starred = [], False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            names.append("*")
            starred = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        names.append(stars.get(parameter.kind, "") + name)
    return ", ".join(names)


def test_all_lists_every_public_name_in_order():
    public = {
        name
        for name, value in vars(ols).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(ols.__all__) == public | MODULES
    assert ols.__all__ == sorted(ols.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_the_documented_one(name):
    assert names_of(inspect.signature(PUBLIC[name])) == SIGNATURES[name]


@pytest.mark.parametrize("name", TUPLES)
def test_the_fields_are_the_documented_ones(name):
    assert PUBLIC[name]._fields == TUPLES[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_a_doctest(name):
    assert ">>> " in inspect.getdoc(PUBLIC[name])


def test_the_version_is_the_installed_one():
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


def test_importing_it_loads_neither_flax_nor_matplotlib():
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
