"""Several processes: if one sees a NaN, all skip; if one dies, a restart continues."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow
SCRIPT = pathlib.Path(__file__).parents[2] / "notebooks" / "many_processes.py"


def run(folder, *arguments, processes, devices, returncode=0):
    """What each process printed, and its final parameters and optimizer state."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), "--nan-step", "5", "--steps", "30"]
    command += ["--processes", str(processes), "--devices", str(devices)]
    command += ["--save-final", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == returncode, done.stderr
    finals = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as final:
            finals.append([final[name].tobytes() for name in final.files])
    # stdout cannot be split into lines, because gloo writes in the middle of them.
    printed = re.findall(r"process \d.*?skipped \d+", done.stdout)
    return sorted(printed), finals


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return run(folder, processes=1, devices=4)


def test_all_processes_skip_together_and_end_with_the_bits_of_one_process(
    one_process, tmp_path
):
    printed, finals = run(tmp_path, processes=4, devices=1)
    # On the same four devices all bits are the same, counters included.
    assert finals == one_process[1] * 4
    for process, line in enumerate(printed):
        assert line.startswith(f"process {process} of 4, 4 devices")
        assert line.endswith("skipped 1")


def test_a_killed_run_continues_from_its_checkpoint_with_the_same_bits(
    one_process, tmp_path
):
    saved = ["--checkpoint", str(tmp_path / "checkpoint")]
    two = {"processes": 2, "devices": 2}
    killed = run(tmp_path / "killed", *saved, "--kill-step", "25", returncode=9, **two)
    assert killed == ([], [])
    printed, finals = run(tmp_path / "restarted", *saved, **two)
    assert all("from step 21" in line for line in printed)
    assert finals == one_process[1] * 2
