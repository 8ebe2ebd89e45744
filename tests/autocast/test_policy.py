"""Every name in the lists and the table of operations is that of a JAX primitive.

The table is that of the operations that hold programs. A name that JAX does not have
would silently match nothing.
"""

import gc

import pytest
from jax.extend import core

from helpers.compat import IS_JAX_0_7
from optax_lossscale._autocast import policy
from optax_lossscale._autocast.nesting import NESTED_NAMES

LISTS = {
    "low": policy.LOW,
    "sensitive": policy.SENSITIVE,
    "sums": policy.SUMS,
    "widest": policy.WIDEST,
    "nested": NESTED_NAMES,
}


def primitive_names():
    """The names of all primitives of the running JAX, exported or not."""
    objects = (x for x in gc.get_objects() if isinstance(x, core.Primitive))
    return {primitive.name for primitive in objects}


@pytest.mark.parametrize("name", LISTS)
def test_every_entry_is_the_name_of_a_primitive_of_the_running_jax(name):
    newer = {"stack", "tile", "unstack"} if IS_JAX_0_7 else set()
    assert LISTS[name] - primitive_names() - newer == set()


def test_no_operation_is_on_two_lists():
    lists = list(LISTS.values())
    assert sum(map(len, lists)) == len(frozenset.union(*lists))


def test_powers_and_moves_are_parts_of_their_lists():
    assert policy.POWERS < policy.SENSITIVE
    assert policy.MOVES < policy.COMMUTES < policy.WIDEST
