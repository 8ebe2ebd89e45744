"""The programs of docs/guides/flax_and_equinox.md train, skip, save and resume."""

import pytest

from helpers.pages import run_program


@pytest.mark.parametrize("name", ["flax_nnx", "flax_linen", "equinox_convnet"])
def test_each_program_prints_what_it_shows(name):
    run_program(name)
