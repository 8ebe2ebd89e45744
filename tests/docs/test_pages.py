"""The pages that people read: README, documentation, CONTRIBUTING, CHANGELOG."""

import operator
import re
import tomllib

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.files import ROOT, project_files
from helpers.inner import standard_promotion
from public_names import MODULES, public_paths

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PUBLIC = sorted(public_paths())


@pytest.mark.parametrize(
    "program", re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
)
def test_each_program_of_readme_runs_by_itself_and_prints_what_it_shows(
    program, capsys
):
    names = {}
    with standard_promotion():
        exec(compile(program, "README.md", "exec"), names)
    printed = "".join(f"# {line}\n" for line in capsys.readouterr().out.splitlines())
    if jax.config.jax_threefry_partitionable:  # Else keys give other numbers.
        assert program.endswith(printed)
    state = next(names[x] for x in ("opt_state", "optimizer", "state") if x in names)
    assert ols.find_loss_scale_state(state).step_count > 0
    assert ols.loss_scale_metrics(state)["total_notfinite"] == 0


def test_the_api_reference_has_every_public_name_once_and_no_other():
    text = (DOCS / "reference/index.md").read_text()
    documented = re.findall(r"^   ~(optax_lossscale\S+)$", text, flags=re.MULTILINE)
    # Modules that are imported by their own path are in no `__all__`.
    modules = {"optax_lossscale.compat", *MODULES[1:]} - {*PUBLIC}
    assert sorted(documented) == sorted([*PUBLIC, *modules])


def test_the_help_of_the_package_has_every_public_name():
    assert {*ols.__all__} <= {*re.findall(r"`(\w+)`", ols.__doc__)}


def test_every_name_of_the_package_on_a_page_exists():
    for path in project_files("README.md", "docs/**/*.md"):
        for name in re.findall(r"`ols\.([A-Za-z_][\w.]*)", path.read_text()):
            operator.attrgetter(name.rstrip("."))(ols)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "page", ["index.md", "troubleshooting.md", "guides/logging.md"]
)
def test_each_block_that_continues_a_training_step_runs(page):
    class Logger:
        def __getattr__(self, name):
            return lambda *args, **kwargs: self

    def loss_fn(params, batch):
        return jnp.mean((batch @ params) ** 2)

    params, batch = jnp.ones((3, 1)), jnp.ones((4, 3))
    tx = ols.loss_scaled(optax.adam(1e-3))
    opt_state = tx.init(params)
    loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, batch)
    names = {"ols": ols, "jnp": jnp, "wandb": Logger(), "writer": Logger(), "number": 1}
    names |= {"loss_fn": loss_fn, "params": params, "batch": batch, "tx": tx}
    names |= {"opt_state": opt_state, "loss": loss, "grads": grads}
    names["metrics"] = ols.loss_scale_metrics(opt_state)
    text = (DOCS / page).read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert ols.find_loss_scale_state(names["opt_state"]).total_notfinite == 0


def anchors(path):
    """The anchors that GitHub gives to the headings of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-")
        for text in headings
    }


def test_links_of_pages_outside_of_the_site_lead_somewhere():
    pages = project_files("*.md", "examples/README.md", "benchmarks/**/*.md")
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            if target.startswith("https://"):
                continue
            found = page.parent / path if path else page
            assert found.exists(), (page, target)
            assert not anchor or anchor in anchors(found), (page, target)


def test_every_file_has_the_addresses_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    slug = project["urls"]["Repository"].removeprefix("https://github.com/")
    host = r"(?:github\.com|githubusercontent\.com|google\.com/github)"
    texts = ("*.md", "*.toml", "*.cff", "docs/**/*.md", "docs/*.py")
    texts += ("notebooks/*.ipynb", "benchmarks/**/*.md", "optax_lossscale/**/*.py")
    for path in project_files(*texts):
        text = path.read_text()
        assert {*re.findall(rf"{host}/([\w.-]+/optax_lossscale)\b", text)} <= {slug}
        sites = re.findall(r"https://[\w-]+\.github\.io/optax_lossscale/", text)
        assert {*sites} <= {project["urls"]["Documentation"]}, path
        for page in re.findall(r"\.github\.io/optax_lossscale/([\w/]+)\.html", text):
            assert (DOCS / f"{page}.md").exists(), (path, page)
        for file in re.findall(rf"{slug}/(?:blob|tree)/main/([\w./-]*\w)", text):
            assert (ROOT / file).exists(), (path, file)


def test_citation_and_changelog_name_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    date = re.search(r"^date-released: (.*)$", citation, re.MULTILINE)[1]
    assert f"\nversion: {ols.__version__}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.search(r"^## \[\d.*", changelog, re.MULTILINE)[0]
    assert released == f"## [{ols.__version__}] - {date}"
    assert f"version = {{{ols.__version__}}}" in (DOCS / "faq.md").read_text()


FIGURE = r"(?<![\w.])\d+\.\d+(?:e-\d+)?(?![\w.]*\d)"


# Pages, and the headings of the sections that are about measurements; "" is all.
@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("how_it_works.md", ""),
        ("index.md", "Which way to train?"),
        ("do_i_need_this.md", "What does float16 gain?"),
        ("guides/reinforcement_learning.md", ""),
        ("guides/choosing_a_rule.md", "Evidence"),
        ("troubleshooting.md", "It is slower than before"),
        ("../README.md", "Do I need it?"),
    ],
)
def test_figures_in_prose_stand_on_the_pages_that_it_links_to(page, heading):
    text = (DOCS / page).read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    links = re.findall(r"\]\(([^)#\s]+\.md)", text)
    pages = [(DOCS / page).parent / link for link in links]
    measured = {*re.findall(FIGURE, "".join(x.read_text() for x in pages))}
    measured |= {"0.7", "0.10", "0.12"}  # Versions of JAX.
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    for figure in re.findall(FIGURE, prose):
        as_ratio = f"1.0{figure.replace('.', '')}"  # 4.6 % more is 1.046.
        assert {figure, as_ratio} & measured, figure
