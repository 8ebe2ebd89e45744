"""Checks of files for pictures and tables, before a program runs that writes them."""

import argparse
import io
import os
from pathlib import Path


def check_output_file(name: str) -> Path:
    """Returns the path of a file that can be written; a `type` for `argparse`.

    Neither changes the file nor leaves one behind.
    """
    target = Path(os.path.realpath(name))  # A link to a new file must survive.
    try:
        is_new = not target.exists()
        target.open("ab").close()
        if is_new:
            target.unlink()
    except OSError as error:
        reason = error.strerror
        raise argparse.ArgumentTypeError(f"cannot write {name}: {reason}") from error
    return Path(name)


def check_picture_file(name: str) -> Path:
    """Returns the path of a picture that matplotlib can draw and write."""
    try:
        import matplotlib.figure
        import matplotlib.pyplot  # Drawing needs it; what is missing is said here.

        figure = matplotlib.figure.Figure(figsize=(1, 1))
        figure.text(0, 0, "1")  # Some formats need LaTeX, but only for text.
        figure.savefig(io.BytesIO(), format=Path(name).suffix[1:])
    # An unknown format, a missing package or LaTeX, and a file system that refuses.
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot draw {name}: {error}") from error
    return check_output_file(name)
