"""The files of the project, among whatever else lies in its folder."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def project_files(*patterns):
    """The files that git tracks whose paths match patterns such as `docs/**/*.md`.

    A virtual environment inside the clone, whatever its name, has no such file. An
    unpacked sdist is no clone: there all files count that lie in no environment.
    """
    if not (ROOT / ".git").exists():
        inside = [path.parent for path in ROOT.glob("*/pyvenv.cfg")]
        found = {path for pattern in patterns for path in ROOT.glob(pattern)}
        return sorted(
            path
            for path in found
            if path.is_file() and not any(map(path.is_relative_to, inside))
        )
    globs = [f":(glob){pattern}" for pattern in patterns]
    command = ["git", "ls-files", "-z", "--cached", "--", *globs]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]
