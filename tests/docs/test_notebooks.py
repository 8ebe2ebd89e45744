"""Every notebook runs, and prints the output that is stored in it."""

import copy
import pathlib
import re

import nbclient
import nbformat
import numpy as np
import pytest

from helpers.compat import IS_JAX_0_7

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def printed(notebook):
    """What the code cells printed to stdout."""
    return "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's packages warn.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_the_output_that_is_stored_in_it(path):
    if IS_JAX_0_7 and path.stem == "04_many_devices":
        pytest.skip("JAX 0.7 has no jax.lax.pcast")
    stored = read(path)
    executed = copy.deepcopy(stored)
    nbclient.NotebookClient(executed, timeout=300, kernel_name="python3").execute()
    # A share such as an accuracy may differ by one percent from one CPU to another.
    share = re.compile(r" *(\d+)%")
    assert share.sub("%", printed(executed)) == share.sub("%", printed(stored))
    shares = [share.findall(printed(notebook)) for notebook in (executed, stored)]
    np.testing.assert_allclose(*np.asarray(shares, int), atol=1)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_begins_with_its_question(path):
    cells = read(path).cells
    assert len(cells) <= 15
    assert cells[0].cell_type == "markdown"
    assert "?" in cells[0].source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_says_how_to_open_it_in_colab_and_how_to_install(path):
    first = read(path).cells[0].source
    (address,) = re.findall(r"\[!\[Open in Colab\]\([^)]*\)\]\(([^)]*)\)", first)
    assert address.startswith("https://colab.research.google.com/github/")
    assert address.endswith(f"/blob/main/notebooks/{path.name}")
    for command in ("pip install", "%pip install"):
        assert f'`{command} "optax-lossscale[demo]"' in " ".join(first.split())
    assert '`pip install ".[demo]"' in " ".join(first.split())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_headings_of_a_tutorial_are_one_title_and_then_sections(path):
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    levels = re.findall(r"^(#+) ", "\n".join(texts), flags=re.MULTILINE)
    assert texts[0].startswith("# ")
    assert levels[1:] == ["##"] * (len(levels) - 1)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_stores_no_warnings_and_every_link_to_a_notebook_works(path):
    cells = read(path).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert not [o for o in outputs if o.output_type == "error"]
    for cell in cells:
        for target in re.findall(r"\]\((?!https://)([^)]*)\)", cell.source):
            assert (path.parent / target).is_file(), target
