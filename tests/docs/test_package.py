"""The package as a whole: its files, their order of imports, README, CONTRIBUTING."""

import ast
import importlib.metadata
import importlib.util
import operator
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import optax_lossscale as ols
from helpers.files import project_files
from helpers.inner import standard_promotion

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "optax_lossscale"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_version_equals_that_of_the_installed_package():
    assert importlib.metadata.version("optax-lossscale") == ols.__version__


def drawn_paths():
    """The paths in CONTRIBUTING's drawing, from top to bottom; folders end in `/`."""
    (drawing,) = re.findall(r"```\n(optax_lossscale/\n.*?)```", CONTRIBUTING, re.DOTALL)
    folders = []
    for line in drawing.splitlines():
        indent, name, what = re.match(r"( *)(\S+) *(.*)", line).groups()
        del folders[len(indent) // 2 :]
        yield "".join([*folders, name])
        assert what or name in ("optax_lossscale/", "tests/")
        if name.endswith("/"):
            folders.append(name)


DRAWN = list(drawn_paths())
FILES = [path for path in DRAWN if path.endswith(".py")]
FOLDERS = [path for path in DRAWN if path.endswith("/")]


def module_of(path):
    return path.removesuffix(".py").removesuffix("/").replace("/", ".")


def modules_above(path):
    """The modules of the files above, and the folders of which every file is above."""
    above = FILES[: FILES.index(path)]
    complete = [
        folder
        for folder in FOLDERS
        if {file for file in FILES if file.startswith(folder)} <= set(above)
    ]
    return {module_of(other) for other in above + complete}


def imports_of(path):
    """The modules of this package from which a file imports names."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("optax_loss") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            if node.module.startswith("optax_lossscale"):
                yield node.module


def test_the_drawing_in_contributing_shows_every_file_and_folder():
    paths = project_files("optax_lossscale/**/*.py")
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    # The line of a folder stands for the file that makes it a package.
    packages = {f"{folder}__init__.py" for folder in FOLDERS} & files
    packages.discard("optax_lossscale/__init__.py")
    assert set(FILES) == files - packages
    drawn = {folder for folder in FOLDERS if not folder.startswith("optax_lossscale/")}
    for top in ("tests", "docs", "notebooks", "examples", "benchmarks"):
        inside = [path.relative_to(ROOT) for path in project_files(f"{top}/*/**")]
        names = {f"{top}/{path.parts[1]}/" for path in inside}
        assert {folder for folder in drawn if folder.startswith(top)} == {
            f"{top}/",
            *names,
        }


@pytest.mark.parametrize("path", FILES[: FILES.index("optax_lossscale/__init__.py")])
def test_a_file_imports_only_from_those_above_it(path):
    assert set(imports_of(path)) <= modules_above(path)


WITH_INIT = [
    folder
    for folder in FOLDERS
    if folder != "optax_lossscale/" and (ROOT / folder / "__init__.py").exists()
]


@pytest.mark.parametrize("folder", WITH_INIT)
def test_the_init_of_a_folder_imports_only_from_its_own_files(folder):
    for module in imports_of(f"{folder}__init__.py"):
        assert module.startswith(module_of(folder))


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


def test_importing_the_package_loads_neither_flax_nor_matplotlib():
    code = (
        "import sys, optax_lossscale; "
        "assert not {'flax', 'matplotlib', 'sklearn', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def anchors(path):
    """The anchors that GitHub gives to the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")
        for text in headings
    }


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
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
TEXTS += ("benchmarks/*.md", "optax_lossscale/**/*.py")


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
