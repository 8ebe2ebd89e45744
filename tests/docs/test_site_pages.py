"""The documentation's pages: the API reference, the tour, and how it works."""

import importlib
import pathlib
import re

import pytest

import optax_lossscale as ols

DOCS = pathlib.Path(__file__).parents[2] / "docs"
MODULES = [
    "optax_lossscale",
    "optax_lossscale.presets",
    "optax_lossscale.diagnostics",
    "optax_lossscale.plotting",
    "optax_lossscale.compat.flax",
    "optax_lossscale.compat.jmp",
]


PUBLIC = sorted(
    f"{module}.{name}"
    for module in MODULES
    for name in importlib.import_module(module).__all__
)
TOUR = (DOCS / "tour.md").read_text()
LINKED = re.findall(r"\{py:\w+\}`~?(?:[^`<]*<)?([\w.]+)", TOUR)


def test_the_api_reference_has_every_public_name_once_and_no_other():
    text = "\n".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", text, flags=re.MULTILINE)
    # Modules that are imported by their own path are in no `__all__`.
    modules = {"optax_lossscale.compat", *MODULES[1:]} - {*PUBLIC}
    assert sorted(documented) == sorted([*PUBLIC, *modules])


def test_every_page_of_the_api_reference_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text()
    for page in DOCS.glob("reference/*.md"):
        assert f"reference/{page.stem}\n" in index


@pytest.mark.parametrize("path", PUBLIC)
def test_the_tour_links_to_every_public_name(path):
    assert path in LINKED


@pytest.mark.parametrize("name", ols.__all__)
def test_the_help_of_the_package_names_every_public_name(name):
    assert f"`{name}`" in ols.__doc__


@pytest.mark.parametrize("page", ["check", "mask", "evaluator", "cost"])
def test_figures_on_how_it_works_are_those_of_the_measurements(page):
    text = (DOCS / "how_it_works" / f"{page}.md").read_text()
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    figures = set(re.findall(r"\b\d+\.\d+(?:e-\d+)?\b", prose))
    measurements = (DOCS.parent / "benchmarks" / "README.md").read_text()
    versions = {"0.7", "0.12"}  # Of JAX.
    assert [x for x in sorted(figures - versions) if x not in measurements] == []
