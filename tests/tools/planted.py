"""Plants faults that users would meet, one at a time, and says which tests see them.

    python tests/tools/planted.py                          # All; an hour.
    python tests/tools/planted.py test_rules diagnostics   # Of these files of tests.
    python tests/tools/planted.py "floor ignored"          # One, by its name.

`faults.diff` has the faults, each below the file of tests that should see it: texts of
the project, each of which stands in its file exactly once, and what replaces them. A
fault is seen if the fast or else the slow tests of that file fail in a copy of the
project. First all these tests have to pass in a copy without a fault.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAULTS = pathlib.Path(__file__).with_name("faults.diff")
FOLDERS = ("optax_lossscale", "tests", "examples", "benchmarks", "docs", "notebooks")
PARTS = {"fast": "not slow and not frameworks", "slow": "slow or frameworks"}


class Fault(NamedTuple):
    """What is replaced: the path of a file, a text, and what stands there instead."""

    name: str
    tests: str
    edits: list[tuple[str, str, str]]


def read_faults() -> list[Fault]:
    """The faults, in the order of `faults.diff`."""
    faults = []
    for section in re.split(r"^# ", FAULTS.read_text(), flags=re.M)[1:]:
        tests, *rest = re.split(r"^## ", section, flags=re.M)
        for text in rest:
            name, *edits = re.split(r"^--- ", text.rstrip("\n"), flags=re.M)
            faults.append(
                Fault(name.strip(), tests.strip(), list(map(read_edit, edits)))
            )
    return faults


def read_edit(text: str) -> tuple[str, str, str]:
    """The path in the first line, and the texts of its lines with - and with +."""
    path, *lines = text.rstrip("\n").split("\n")
    old, new = (
        "\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+"
    )
    return path, old, new


def plant(fault: Fault, folder: pathlib.Path) -> None:
    """Copies the project into a folder, with a fault."""
    left_out = shutil.ignore_patterns("*.pyc", "_build")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, folder)
    for path, old, new in fault.edits:
        text = (folder / path).read_text()
        if text.count(old) != 1:
            sys.exit(f"{fault.name}: stands {text.count(old)} times in {path}:\n{old}")
        (folder / path).write_text(text.replace(old, new))


def who_sees(fault: Fault) -> tuple[str, str]:
    """Which part of the tests sees a fault, or "none", and the test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        plant(fault, pathlib.Path(folder))
        for part, expression in PARTS.items():
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line"]
            run = subprocess.run(
                [*command, "-p", "no:cacheprovider", "-m", expression, fault.tests],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": folder},
                capture_output=True,
                text=True,
            )
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.M)
            if failed:
                return part, failed[1]
            if run.returncode not in (0, 5):  # 5: this part has no test in the file.
                sys.exit(f"{fault.name}: pytest failed\n{run.stdout}\n{run.stderr}")
    return "none", ""


def main() -> None:
    """Prints a line for each fault, and how many are seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("names", nargs="*", help="of faults, or in paths of tests")
    options = parser.parse_args()
    faults = [
        fault
        for fault in read_faults()
        if not options.names
        or any(name == fault.name or name in fault.tests for name in options.names)
    ]
    counts: collections.Counter[str] = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        files = dict.fromkeys(fault.tests for fault in faults)
        whole = [Fault("no fault", tests, []) for tests in files]
        for copy, (part, test) in zip(whole, pool.map(who_sees, whole), strict=True):
            if part != "none":
                sys.exit(f"{copy.tests} fails without a fault: {test}")
        for fault, (part, test) in zip(faults, pool.map(who_sees, faults), strict=True):
            counts[part] += 1
            print(f"{fault.name}: {part} {test}", flush=True)
    print(
        f"Of {len(faults)} faults {counts['fast']} are seen by fast tests, "
        f"{counts['slow']} by slow tests alone, {counts['none']} by none."
    )


if __name__ == "__main__":
    main()
