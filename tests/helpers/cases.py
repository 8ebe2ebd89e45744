"""Cases of a parametrized test of which the fast command runs only some."""

import pytest


def slow_except(fast, cases):
    """Marks the cases as slow that are not among the fast ones."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in fast else pytest.mark.slow,
        )
        for case in cases
    ]
