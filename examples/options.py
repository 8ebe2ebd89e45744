"""The options of the command line that the example programs share."""

import argparse
import math
import pathlib
from typing import Any

from precision import PRECISIONS, RULES

# An option's type or its choices, its default, and a line of help.
Option = tuple[Any, Any, str]
PICTURES = [".png", ".pdf", ".svg"]


def natural(text: str) -> int:
    """Reads an option that must be a whole number, at least 0 and below 2**32."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text}")
    return int(text)


def positive(text: str) -> int:
    """Reads an option that must be at least 1."""
    if (number := natural(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def above_zero(text: str) -> float:
    """Reads an option that must be a finite number above 0."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, got {text}")
    return number


def new_file(text: str) -> pathlib.Path:
    """Reads the name of a file to write, and checks that its folder exists."""
    path = pathlib.Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return path


def new_picture(text: str) -> pathlib.Path:
    """Reads the name of a picture to draw."""
    if (path := new_file(text)).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"must end in one of {', '.join(PICTURES)}")
    return path


def existing(text: str) -> pathlib.Path:
    """Reads the name of a file or folder that must be there."""
    if not (path := pathlib.Path(text)).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {text}")
    return path


def parse_options(
    description: str, steps: int, report: int, **own: Option
) -> argparse.Namespace:
    """Reads the options that all programs have, and the program's `own`."""
    precisions = "; ".join(f"{name}: {text}" for name, text in PRECISIONS.items())
    options: dict[str, Option] = {
        "precision": (PRECISIONS, "float16", precisions),
        "rule": (RULES, "dynamic", "how the loss scale changes"),
        "seed": (natural, 0, "of all random numbers"),
        "steps": (positive, steps, "training steps"),
        "report": (positive, report, "steps from one report to the next"),
        **own,
        "devices": (positive, 1, "devices of each process"),
        "mesh": (
            ["data", "fsdp"],
            "data",
            "split only batches over the devices, or parameters and states too",
        ),
        "coordinator": (str, None, "HOST:PORT where several processes meet"),
        "processes": (positive, 1, "number of processes"),
        "process": (natural, 0, "index of this process"),
        "folder": (
            pathlib.Path,
            None,
            "keep logs and checkpoints here, and continue from the last checkpoint",
        ),
        "json": (new_file, None, "write the figures of all reports to this file"),
        "plot": (new_picture, None, "draw the figures of all reports to this picture"),
    }
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, (kind, default, text) in options.items():
        choices = {"type": kind} if callable(kind) else {"choices": list(kind)}
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=default, help=text, **choices)
    return parser.parse_args()
