"""Fault injection, in short; `python tests/faults.py` does a million steps."""

import jax
import pytest
from faults import OPTIMIZERS, RULES, check, run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_no_fault_gets_through_and_every_count_is_right(rule, optimizer):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        seen = run(RULES[rule], OPTIMIZERS[optimizer], 10_000)
    assert 0.01 < check(seen) < 0.2
