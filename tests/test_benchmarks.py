"""The benchmarks run, and what they show holds."""

import json
import pathlib
import subprocess
import sys

import pytest
from compat import IS_JAX_0_7

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.mark.skipif(IS_JAX_0_7, reason="it uses jax.set_mesh")
def test_every_way_of_running_gives_the_same_and_skips_together(tmp_path):
    path = tmp_path / "ways.json"
    command = [sys.executable, BENCHMARKS / "ways_of_running.py", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = json.loads(path.read_text())
    assert len(rows) == 15
    for name, row in rows.items():
        assert row["skipped together"], name
        assert row["largest difference"] < 1e-6, name
        several_axes = name == "jit, sharded over both axes"
        assert row["collectives"] <= (3 if several_axes else 1), name
