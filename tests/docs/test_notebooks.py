"""Every notebook runs, and prints the output that is stored in it."""

import copy
import pathlib

import nbclient
import nbformat
import pytest

from helpers.compat import IS_JAX_0_7

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def printed(notebook):
    """What each code cell printed to stdout."""
    return [
        "".join(
            output.text
            for output in cell.outputs
            if output.output_type == "stream" and output.name == "stdout"
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's packages warn.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_the_output_that_is_stored_in_it(path):
    if IS_JAX_0_7 and path.stem == "04_many_devices":
        pytest.skip("JAX 0.7 has no jax.lax.pcast")
    stored = read(path)
    executed = copy.deepcopy(stored)
    nbclient.NotebookClient(executed, timeout=300, kernel_name="python3").execute()
    assert printed(executed) == printed(stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_begins_with_its_question(path):
    cells = read(path).cells
    assert len(cells) <= 15
    assert cells[0].cell_type == "markdown"
    assert "?" in cells[0].source
