"""The files of the project, among whatever else lies in its folder."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def project_files(*patterns):
    """The files that git knows, or would add, whose paths match such as `docs/**/*.md`.

    Packages in a virtual environment inside the clone are none of them. An unpacked
    sdist is no clone, so there all files count that match.
    """
    if not (ROOT / ".git").exists():
        found = [path for pattern in patterns for path in ROOT.glob(pattern)]
        return sorted(path for path in found if path.is_file())
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    command += ["--", *(f":(glob){pattern}" for pattern in patterns)]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]
