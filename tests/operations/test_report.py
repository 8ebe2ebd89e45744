"""docs/guides/debugging_a_skipped_step.md: what is printed about operations."""

import io
import math

import numpy as np
import pytest

from optax_lossscale.diagnostics import Operation, print_operation_report

FINE = Operation(
    primitive="mul",
    where="net.py:7 (Net.__call__)",
    scope="Net/layer",
    is_backward=False,
    dtype=np.dtype(np.float16),
    shape=(2, 3),
    largest=2.0,
    float32_largest=2.0,
    nonfinite=0,
    made_nonfinite=0,
    cause="",
    underflow=0.0,
    headroom_bits=14.0,
    unscaled_headroom_bits=14.0,
    error=0.0,
    iteration=None,
    order=(),
)
OVERFLOW = FINE._replace(
    largest=math.inf,
    float32_largest=131008.0,
    nonfinite=5,
    made_nonfinite=4,
    cause="The cause.",
    headroom_bits=-1.0,
    unscaled_headroom_bits=-1.0,
    error=math.inf,
)
RECEIVED = FINE._replace(nonfinite=6, largest=math.inf, where="later.py:1 (f)")
NOTHING = "No operation loses more than a few roundings do."


def printed(operations, **settings):
    file = io.StringIO()
    print_operation_report(operations, file=file, **settings)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("count", [0, 2])
def test_a_program_without_faults_has_no_table(count):
    finite = f"{count} operations ran, and all their results are finite."
    assert printed([FINE] * count) == [finite, NOTHING]


def test_the_first_operation_is_described_and_stands_in_a_table():
    lines = printed([FINE, OVERFLOW, RECEIVED, RECEIVED])
    assert lines[:3] == [
        "4 operations ran, 1 of them made NaN or infinity, and 2 received some.",
        "The first: mul at net.py:7 (Net.__call__) in Net/layer, forward pass: "
        "4 of 6 entries. The cause.",
        "",
    ]
    titles, row = (line.split() for line in lines[3:])
    assert row == [
        *("mul", "forward", "float16", "inf", "5", "0.0%", "inf", "-1.0"),
        *("net.py:7", "(Net.__call__)", "Net/layer"),
    ]
    numbers = "largest", "nonfinite", "underflow", "error", "headroom"
    assert titles == ["operation", "pass", "dtype", *numbers, "where", "scope"]


def test_nonfinite_arguments_are_pointed_at():
    assert printed([RECEIVED]) == [
        "1 operations ran. None made NaN or infinity; 1 received some from an "
        "argument, or from a constant such as a mask of -infinity. (If the loss is "
        "NaN, look at the arguments.)",
        NOTHING,
    ]


def test_an_overflow_of_the_loss_scale_says_by_how_much_it_is_too_large():
    bits = {"headroom_bits": -2.5, "unscaled_headroom_bits": 12.5}
    line = printed([OVERFLOW._replace(**bits, is_backward=True, iteration=17)])[1]
    assert line.endswith(
        "Net/layer, backward pass: 4 of 6 entries, first after 17 runs. The cause. "
        "Only the loss scale makes it overflow: with a scale lower by 2**3 it fits."
    )


def test_operations_that_made_infinities_come_first_and_then_the_largest_errors():
    half, bfloat = (np.dtype(name) for name in ("float16", "bfloat16"))
    operations = [
        FINE._replace(where="a.py:1", underflow=0.1),
        FINE._replace(where="b.py:1", error=0.9),
        FINE._replace(where="c.py:1", underflow=0.5, error=0.2),
        OVERFLOW._replace(where="one.py:1"),
        OVERFLOW._replace(where="two.py:1"),
        FINE._replace(where="d.py:1", dtype=half, error=0.02),
        FINE._replace(where="rounded.py:1", dtype=bfloat, error=0.02),
    ]
    lines = printed(operations)[4:]
    assert [line.split()[-2] for line in lines] == [
        f"{name}.py:1" for name in ("one", "two", "b", "c", "a", "d")
    ]
    assert printed(operations, limit=4)[4:] == [*lines[:4], "... and 2 more"]
