"""How Sphinx builds the documentation; CONTRIBUTING.md has the command."""

import pathlib
import re
import shutil
import sys
import tomllib

from jupyter_cache import get_cache

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE / "_extensions"))


BADGE = "![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)"


# Where the site has what other pages link to in the folder `benchmarks`.
BENCHMARKS = {
    "README.md": "benchmarks.md",
    "real_models/README.md": "real_models.md",
    "results/": "results/",
    "rl/README.md": "rl.md",
}


def change_links(app: object, name: str, source: list[str]) -> None:
    """Lets the links of a page work on the site as they do in the repository."""
    for old, new in BENCHMARKS.items():
        pattern = rf"\]\(\.\./((?:\.\./)*)benchmarks/{re.escape(old)}"
        source[0] = re.sub(pattern, rf"](\1{new}", source[0])


def copy_pages(
    source: str, pattern: str, target: str, changes: dict[str, str], first: str = ""
) -> None:
    """Copies pages to where Sphinx finds them, with links that work there.

    `first` is put before each text.
    """
    folder = HERE / target
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in (HERE.parent / source).glob(pattern):
        text = path.read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        (folder / path.name).write_text(first + text)


TO_NOTEBOOKS = {
    "](../docs/": "](../",
    "](../benchmarks/README.md": "](../benchmarks.md",
    BADGE: "Open in Colab",  # Other hosts serve the badge.
}
TO_RESULTS = {
    "](../../docs/": "](../",
    "](../README.md": "](../benchmarks.md",
    "](../rules.png": "](../../benchmarks/rules.png",
}
TO_SUMMARY = {  # The page `benchmarks` includes it.
    "](real_models/README.md": "](real_models.md",
    "](rl/README.md": "](rl.md",
}
copy_pages("notebooks", "*.ipynb", "notebooks", TO_NOTEBOOKS)
WIDE = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n"  # For wide tables.
copy_pages("benchmarks/results", "*.md", "results", TO_RESULTS, WIDE)
copy_pages("benchmarks", "README.md", "benchmarks", TO_SUMMARY)

import matplotlib.font_manager  # noqa: E402, F401  # Makes its cache; pages would warn.

import optax_lossscale  # noqa: E402

pyproject = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
repository = pyproject["project"]["urls"]["Repository"]

project = "optax_lossscale"
author = "The optax_lossscale authors"
copyright = f"2026, {author}"
version = release = optax_lossscale.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "markdown_docstrings",
]
exclude_patterns = ["_build", "benchmarks"]
templates_path = ["_templates"]
nitpicky = True
suppress_warnings = ["intersphinx.external"]

# Pages in Markdown. Those with `code-cell` run while the documentation is built, and
# an error or a warning in one stops the build. Notebooks do not run here, but in
# tests/docs/test_notebooks.py.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build/.jupyter_cache")
_ = get_cache(nb_execution_cache_path).db  # Made here, or parallel builds would race.
nb_execution_excludepatterns = ["notebooks/*"]
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "warn"
nb_merge_streams = True
nb_ipywidgets_js = {}

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # `_extensions/markdown_docstrings.py` shows them.
napoleon_attr_annotations = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Each inventory is the project's own if it can be loaded. Offline it is a list, in the
# folder `inventories`, of the names that these pages mention.
intersphinx_timeout = 5
intersphinx_mapping = {
    name: (address, (None, f"inventories/{name}.txt"))
    for name, address in {
        "jax": "https://docs.jax.dev/en/latest/",
        "optax": "https://optax.readthedocs.io/en/latest/",
        "flax": "https://flax.readthedocs.io/en/latest/",
    }.items()
}

html_theme = "sphinx_book_theme"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("search.js", {"priority": 900, "defer": "defer"})]
html_copy_source = False
html_use_index = False  # The search finds its entries.
html_domain_indices = False
html_theme_options = {
    "repository_url": repository,
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_edit_page_button": True,
    "use_download_button": False,
    "show_navbar_depth": 1,
    "max_navbar_depth": 1,  # Pages of names and of results are reached by their index.
    "show_toc_level": 2,
    # The parent theme's bar is left out: the sidebar has a search field too, and on a
    # phone its hidden button would take the clicks of the one that opens the sidebar.
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}
html_context = {
    "default_mode": "auto",
    # Notebooks and results are copies of those in other folders.
    "edit_page_provider_name": "GitHub",
    "edit_page_url_template": repository
    + "/edit/main/{% if file_name.startswith('results/') %}benchmarks/"
    "{% elif not file_name.startswith('notebooks/') %}docs/{% endif %}"
    "{{ file_name }}",
}


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("source-read", change_links)
