"""What is printed about operations."""

import io
import math

import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale.diagnostics import Operation, print_operation_report

TITLES = [
    *("operation", "pass", "dtype", "largest", "nonfinite", "underflow", "error"),
    *("headroom", "where", "scope"),
]


def operation(**changes):
    """An operation of float16 without faults, apart from what is given."""
    return Operation(
        **{
            "primitive": "mul",
            "where": "net.py:7 (Net.__call__)",
            "scope": "Net/layer",
            "is_backward": False,
            "dtype": np.dtype(np.float16),
            "shape": (2, 3),
            "largest": 2.0,
            "float32_largest": 2.0,
            "nonfinite": 0,
            "made_nonfinite": 0,
            "cause": "",
            "underflow": 0.0,
            "headroom_bits": 14.0,
            "unscaled_headroom_bits": 14.0,
            "error": 0.0,
            "iteration": None,
            "order": (),
            **changes,
        }
    )


OVERFLOW = {
    "largest": math.inf,
    "float32_largest": 131008.0,
    "nonfinite": 5,
    "made_nonfinite": 4,
    "headroom_bits": -1.0,
    "unscaled_headroom_bits": -1.0,
    "error": math.inf,
    "cause": "The cause.",
}


def printed(operations, **settings):
    file = io.StringIO()
    print_operation_report(operations, file=file, **settings)
    return file.getvalue().splitlines()


NOTHING = "No operation loses more than a few roundings do."


@pytest.mark.parametrize("count", [0, 2])
def test_a_program_without_faults_has_no_table(count):
    finite = f"{count} operations ran, and all their results are finite."
    assert printed([operation()] * count) == [finite, NOTHING]


def test_the_first_operation_is_described_and_stands_in_a_table():
    *lines, titles, row = printed([operation(), operation(**OVERFLOW)])
    assert lines[:2] == [
        "2 operations ran, 1 of them made NaN or infinity, and 0 received some.",
        "The first: mul at net.py:7 (Net.__call__) in Net/layer, forward pass: "
        "4 of 6 entries. The cause.",
    ]
    assert titles.split() == TITLES
    assert row.split() == [
        *("mul", "forward", "float16", "inf", "5", "0.0%", "inf", "-1.0"),
        *("net.py:7", "(Net.__call__)", "Net/layer"),
    ]


def test_operations_that_received_nonfinite_numbers_are_counted_and_left_out():
    received = operation(nonfinite=6, largest=math.inf, where="later.py:1 (f)")
    lines = printed([operation(**OVERFLOW), received, received])
    assert lines[0].endswith("1 of them made NaN or infinity, and 2 received some.")
    assert not any("later.py" in line for line in lines)


def test_nonfinite_arguments_are_pointed_at():
    lines = printed([operation(nonfinite=6, largest=math.inf)])
    assert lines == [
        "1 operations ran. None made NaN or infinity; 1 received some from an "
        "argument, or from a constant such as a mask of -infinity. (If the loss is "
        "NaN, look at the arguments.)",
        NOTHING,
    ]


def test_an_overflow_of_the_loss_scale_says_by_how_much_it_is_too_large():
    changes = {**OVERFLOW, "headroom_bits": -2.5, "unscaled_headroom_bits": 12.5}
    lines = printed([operation(**changes, is_backward=True, scope="")])
    assert "mul at net.py:7 (Net.__call__), backward pass: 4 of 6 entries" in lines[1]
    assert "Only the loss scale makes it overflow" in lines[1]
    assert lines[1].endswith("with a scale lower by 2**3 it fits.")


def test_the_iteration_of_a_loop_is_named():
    text = printed([operation(**OVERFLOW, iteration=17)])[1]
    assert "4 of 6 entries, first after 17 runs." in text


def test_those_that_made_infinities_come_in_order_and_then_those_that_lose_most():
    operations = [
        operation(where="a.py:1 (f)", underflow=0.1),
        operation(where="b.py:1 (f)", error=0.9),
        operation(where="c.py:1 (f)", underflow=0.5, error=0.2),
        operation(**{**OVERFLOW, "where": "one.py:1 (f)"}),
        operation(**{**OVERFLOW, "where": "two.py:1 (f)"}),
        operation(where="exact.py:1 (f)"),
    ]
    lines = printed(operations)[3:]
    files = [word for line in lines for word in line.split() if ".py:" in word]
    assert files == [f"{name}.py:1" for name in ("one", "two", "b", "c", "a")]


def test_how_large_a_few_roundings_are_depends_on_the_dtype_of_each_operation():
    dtypes = [jnp.dtype(name) for name in ("float16", "bfloat16")]
    *_, titles, row = printed([operation(dtype=x, error=0.02) for x in dtypes])
    assert titles.split() == TITLES
    assert "float16" in row.split()


@pytest.mark.parametrize("limit", [0, 2, 5])
def test_no_more_lines_are_printed_than_the_limit(limit):
    operations = [operation(error=0.1 * i) for i in range(1, 4)]
    lines = printed(operations, limit=limit)
    assert len(lines) == 3 + min(limit, 3) + (limit < 3)
    assert limit >= 3 or lines[-1] == f"... and {3 - limit} more"
