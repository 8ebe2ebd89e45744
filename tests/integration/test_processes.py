"""`docs/guides/many_devices.md`: several processes skip together.

If one dies, all continue from their checkpoint with the same bits.
"""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "notebooks" / "many_processes.py"


def run(folder, *arguments, processes, devices, returncode=0):
    """What each process printed, and its final parameters and optimizer state."""
    folder.mkdir()
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


@pytest.mark.slow
def test_processes_skip_together_and_a_killed_run_continues_with_the_same_bits(
    tmp_path,
):
    _, expected = run(tmp_path / "one process", processes=1, devices=4)
    saved = ["--checkpoint", str(tmp_path / "checkpoint")]
    two = {"processes": 2, "devices": 2}
    killed = run(tmp_path / "killed", *saved, "--kill-step", "25", returncode=9, **two)
    assert killed == ([], [])
    printed, finals = run(tmp_path / "restarted", *saved, **two)
    # On the same four devices all bits are the same, counters included.
    assert finals == expected * 2
    for process, line in enumerate(printed):
        start = f"process {process} of 2, 4 devices, from step 21: "
        assert re.fullmatch(start + r"scale \d+, skipped 1", line)
