"""Leave most cases of a large table to the slow tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thin(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """The cases for `parametrize`; all but the `fast` ones are marked slow."""
    return [
        case if case in fast else pytest.param(case, marks=pytest.mark.slow)
        for case in cases
    ]
