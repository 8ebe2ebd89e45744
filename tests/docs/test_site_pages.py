"""The documentation's pages: the API reference, the tour, and how it works."""

import re

import pytest

import optax_lossscale as ols
from helpers.files import ROOT, project_files
from public_names import MODULES, public_paths

DOCS = ROOT / "docs"
PUBLIC = sorted(public_paths())
REFERENCE = project_files("docs/reference/*.md")
TOUR = (DOCS / "tour.md").read_text()
LINKED = re.findall(r"\{py:\w+\}`~?(?:[^`<]*<)?([\w.]+)", TOUR)


def test_the_api_reference_has_every_public_name_once_and_no_other():
    text = "\n".join(page.read_text() for page in REFERENCE)
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", text, flags=re.MULTILINE)
    # Modules that are imported by their own path are in no `__all__`.
    modules = {"optax_lossscale.compat", *MODULES[1:]} - {*PUBLIC}
    assert sorted(documented) == sorted([*PUBLIC, *modules])


def test_no_line_of_a_page_is_taken_for_a_comment():
    # The site leaves out lines that begin with a percent sign, as wrapped text may.
    for page in project_files("**/*.md"):
        text = page.read_text()
        assert not re.search(r"^ *%", text, flags=re.MULTILINE), page


@pytest.mark.parametrize("path", PUBLIC)
def test_the_tour_links_to_every_public_name(path):
    assert path in LINKED


@pytest.mark.parametrize("name", ols.__all__)
def test_the_help_of_the_package_names_every_public_name(name):
    assert f"`{name}`" in ols.__doc__


MEASUREMENTS = "".join(x.read_text() for x in project_files("benchmarks/**/*.md"))
FIGURE = r"(?<![\w.])\d+\.\d+(?:e-\d+)?(?![\w.]*\d)"
# Pages, and the headings of the sections that are about measurements; "" is all.
SECTIONS = [
    *[(f"how_it_works/{name}.md", "") for name in ("check", "mask", "rewriting")],
    ("how_it_works/cost.md", ""),
    ("faq.md", "What does it cost?"),
    ("faq.md", "How much faster is float16?"),
    ("troubleshooting.md", "It is slower than before"),
    ("../README.md", "Limits"),
]


@pytest.mark.parametrize(("page", "heading"), SECTIONS)
def test_figures_in_prose_are_those_of_the_benchmarks(page, heading):
    text = (DOCS / page).read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    measured = set(re.findall(FIGURE, MEASUREMENTS)) | {"0.7", "0.10", "0.12"}  # JAX's.
    for figure in re.findall(FIGURE, prose):
        as_ratio = f"1.0{figure.replace('.', '')}"  # 4.6 % more is 1.046.
        assert {figure, as_ratio} & measured, figure
