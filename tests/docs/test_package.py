"""The package as a whole: its files, their order of imports, README, CONTRIBUTING."""

import ast
import importlib.metadata
import importlib.util
import operator
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.files import ROOT, project_files
from helpers.inner import standard_promotion

PACKAGE = ROOT / "optax_lossscale"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_version_equals_that_of_the_installed_package():
    assert importlib.metadata.version("optax-lossscale") == ols.__version__


# A room imports only from rooms above it, and from itself.
ROOMS = [
    *("_ground", "_autocast", "_scaling", "presets", "_masters"),
    *("diagnostics", "compat", "plotting", "__init__.py", "demo.py"),
]
STRANGERS = {("_scaling", "_masters"), ("_masters", "_autocast")}


def test_the_drawing_in_contributing_shows_the_rooms_in_their_order():
    (drawing,) = re.findall(r"```\n(optax_lossscale/\n.*?)```", CONTRIBUTING, re.DOTALL)
    names = [line.split()[0].rstrip("/") for line in drawing.splitlines()[1:]]
    assert names == ROOMS
    found = project_files("optax_lossscale/**/*.py")
    assert {path.relative_to(PACKAGE).parts[0] for path in found} == set(ROOMS)


def room_of(module):
    """The room of a module of this package."""
    room = module.partition(".")[2].partition(".")[0] or "__init__"
    return room if room in ROOMS else f"{room}.py"


def imports_of(path, *, when_called=True):
    """The modules of this package from which a file imports names."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if when_called else tree.body:
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.startswith("optax_loss"))
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            if node.module == "optax_lossscale":
                yield from (f"optax_lossscale.{alias.name}" for alias in node.names)
            elif node.module.startswith("optax_lossscale."):
                yield node.module


FILES = project_files("optax_lossscale/**/*.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_file_imports_only_from_its_room_and_those_above(path):
    room = path.relative_to(PACKAGE).parts[0]
    rooms = {room_of(module) for module in imports_of(path, when_called=False)}
    assert rooms <= set(ROOMS[: ROOMS.index(room) + 1])
    for one, other in STRANGERS:
        assert not (room == one and other in rooms)
        assert not (room == other and one in rooms)


def test_one_file_is_imported_late_the_one_that_needs_private_names_of_jax():
    late = set()
    for path in FILES:
        at_once = set(imports_of(path, when_called=False))
        late |= {(path.name, name) for name in {*imports_of(path)} - at_once}
    late = {pair for pair in late if pair[0] != "__init__.py"}  # For type checkers.
    assert late == {("mistakes.py", "optax_lossscale._scaling.dependence")}


# JAX promises to keep none of these.
PRIVATE = re.findall(
    r'= _private\("([\w.]+)", "(\w+)"\)',
    (PACKAGE / "_autocast/jax_internals.py").read_text(),
)
HIDE = """
# JAX's own use of the name is not hidden.
import importlib, jax.experimental.checkify, jax.extend.core
module, name = {pair}
delattr(importlib.import_module(module), name)
import optax, jax.numpy as jnp, optax_lossscale as ols
tx = ols.loss_scaled(optax.sgd(0.5))
@jax.jit
def step(params, state):
    loss, grads = ols.scaled_value_and_grad(lambda x: (x**2).sum(), state)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
params, state = step(jnp.ones(2), tx.init(jnp.ones(2)))
assert params.tolist() == [0.0, 0.0]
for use in ("autocast", "diagnostics"):
    try:
        getattr(ols, use)
    except ImportError as error:
        assert f"need `{{module}}.{{name}}`, which JAX" in str(error), error
    else:
        raise AssertionError(use)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pair", PRIVATE, ids=".".join)
def test_loss_scaling_needs_no_private_name_and_autocast_says_which_is_gone(pair):
    subprocess.run([sys.executable, "-c", HIDE.format(pair=pair)], check=True)


def test_no_other_file_takes_private_names_of_jax():
    assert len(PRIVATE) == len(set(PRIVATE)) > 3
    for path in FILES:
        private = re.findall(r"jax\._src|jax\.experimental\.jet", path.read_text())
        assert not private or path.name == "jax_internals.py", path


def test_public_classes_are_those_of_the_package_whatever_file_they_are_in():
    states = [ols.dynamic_loss_scale().init(), ols.headroom_loss_scale().init()]
    states += [rule().init() for rule in (ols.no_loss_scale, ols.presets.fairseq)]
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    for tx in (
        ols.loss_scaled(optax.adam(1.0)),
        ols.master_weights(optax.adam(1.0)),
        ols.loss_scale_optimizer(
            optax.adam(1.0), use_ema=True, weight_decay=0.1, learning_rate=1.0
        ),
    ):
        states.append(tx.init(params))
    for state in states:
        pickled = pickle.dumps(state)
        assert not re.search(rb"optax_lossscale\.\w", pickled)
        chex.assert_trees_all_equal(pickle.loads(pickled), state)
    for kind in (ols.LossScale, ols.LossScaleStalledError):
        assert kind.__module__ == "optax_lossscale"


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="An sdist holds only files of the project."
)
def test_files_that_git_does_not_track_are_no_files_of_the_project():
    folder = ROOT / "docs" / f"untracked-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "page.md").write_text("% This line would fail a test.")
        assert not [path for path in project_files("**/*.md") if folder in path.parents]
    finally:
        shutil.rmtree(folder)


def test_no_test_lists_files_but_those_that_git_tracks_or_that_it_made():
    lists = re.compile(r"(\S+)\.(?:r?glob|iterdir|walk|scandir|listdir)\(")
    made = ("tmp_path", "folder", "SITE", "ast")  # Its own, and those of Sphinx.
    for path in project_files("tests/**/test_*.py", "tests/helpers/*.py"):
        if path.name != "files.py":
            listed = [name.strip("(*[") for name in lists.findall(path.read_text())]
            assert not [name for name in listed if not name.endswith(made)], path


@pytest.mark.slow
def test_importing_the_package_loads_neither_flax_nor_matplotlib_nor_autocast():
    code = (
        "import sys, optax_lossscale; "
        "assert not {'flax', 'matplotlib', 'sklearn', 'tqdm', "
        "'optax_lossscale._autocast.jax_internals'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rules_and_functions_can_be_made_before_jax_starts():
    """As at the top of a module, before `jax.distributed.initialize`."""
    code = """
import jax
import optax
import optax_lossscale as ols
from optax_lossscale import presets

names = [name for name in presets.__all__ if "state_dict" not in name]
rules = [getattr(presets, name)() for name in names if name != "mindspore_fixed"]
rules += [ols.dynamic_loss_scale(), ols.headroom_loss_scale(), ols.no_loss_scale()]
rules += [ols.static_loss_scale(8.0), presets.mindspore_fixed(8.0)]
for rule in rules:
    ols.loss_scaled(optax.adam(1e-3), rule)
ols.scaled_backward(lambda x: x**2, 2.0**10)
jax.config.update("jax_num_cpu_devices", 3)  # An error if JAX has started.
assert jax.device_count() == 3
"""
    env = {name: value for name, value in os.environ.items() if "NUM_CPU" not in name}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def anchors(path):
    """The anchors that GitHub gives to the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")
        for text in headings
    }


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"),
        *(str(path.relative_to(ROOT)) for path in project_files("benchmarks/*/*.md")),
    ],
)
def test_links_within_the_repository_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_name_of_the_package_in_readme_and_documentation_exists():
    for path in project_files("README.md", "docs/**/*.md"):
        for name in re.findall(r"`ols\.([A-Za-z_][\w.]*)", path.read_text()):
            operator.attrgetter(name.rstrip("."))(ols)


URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
TEXTS = ("*.md", "*.toml", "*.cff", "docs/**/*.md", "docs/*.py", "notebooks/*.ipynb")
TEXTS += ("benchmarks/**/*.md", "optax_lossscale/**/*.py")


def test_every_file_has_the_addresses_of_pyproject():
    slug = URLS["Repository"].removeprefix("https://github.com/")
    name = re.escape(slug.split("/")[1])
    host = r"(?:github\.com|githubusercontent\.com|google\.com/github)"
    repository = rf"{host}/([\w.-]+/(?:optax_lossscale|{name}))\b"
    site = rf"(https://[\w-]+\.github\.io/(?:optax_lossscale|{name})/)"
    for path in project_files(*TEXTS):
        text = path.read_text()
        assert set(re.findall(repository, text)) <= {slug}, path
        assert set(re.findall(site, text)) <= {URLS["Documentation"]}, path
        for file in re.findall(rf"{slug}/(?:blob|tree)/main/([\w./-]*\w)", text):
            assert (ROOT / file).exists(), (path, file)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"repository-code: {URLS['Repository']}\n" in citation
    assert f"url: {URLS['Documentation']}\n" in citation


def test_the_workflow_publishes_what_contributings_line_builds():
    section = CONTRIBUTING.split("\n## Build the documentation\n")[1]
    (line,) = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1].splitlines()
    assert f"run: {line}\n" in (ROOT / ".github/workflows/docs.yml").read_text()


PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_of_readme_runs_by_itself_and_applies_its_steps(program, capsys):
    namespace = {}
    with standard_promotion():
        exec(compile(program, "README.md", "exec"), namespace)
    names = ("opt_state", "optimizer", "state")
    state = next(namespace[name] for name in names if name in namespace)
    metrics = ols.loss_scale_metrics(state)
    assert metrics["total_notfinite"] == 0
    assert ols.find_loss_scale_state(state).step_count > 0
    assert "ols.raise_if_stalled(" in program
    printed = "".join(f"# {line}\n" for line in capsys.readouterr().out.splitlines())
    if jax.config.jax_threefry_partitionable:  # Else keys give other numbers.
        assert program.endswith(printed)


def test_citation_and_changelog_name_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    date = re.search(r"^date-released: (.*)$", citation, re.MULTILINE)[1]
    assert f"\nversion: {ols.__version__}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[\d.*", changelog, re.MULTILINE)[0] == (
        f"## [{ols.__version__}] - {date}"
    )
    assert f"version = {{{ols.__version__}}}" in (ROOT / "docs/cite.md").read_text()
