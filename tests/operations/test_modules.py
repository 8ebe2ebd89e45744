"""No trace changes a module, and scopes are told from transformations."""

import jax
import jax.numpy as jnp
import pytest

from helpers.compare import assert_same_bits
from helpers.modules import ROWS, Net, arrays_of, mean_square
from helpers.places import place_of
from optax_lossscale.diagnostics import trace_operations


@pytest.mark.slow
def test_the_state_of_an_nnx_module_is_unchanged_bit_for_bit():
    net = Net()
    before = arrays_of(net)
    trace_operations(lambda net, x: jnp.mean(net.encode(x)), net, ROWS)
    assert_same_bits(arrays_of(net), before)


@pytest.mark.slow
def test_the_products_of_a_module_that_a_function_reads_have_its_line():
    net = Net()
    net.eval()
    operations = trace_operations(lambda x: mean_square(net, x), ROWS)
    products = [x for x in operations if x.primitive == "dot_general"]
    assert {x.where for x in products} == {place_of(Net.__call__, "layers")}


def test_a_scope_called_transpose_does_not_belong_to_the_backward_pass():
    def loss_fn(w, x):
        with jax.named_scope("transpose"):
            return jnp.mean(x @ w)

    operations = trace_operations(loss_fn, jnp.ones((2, 2)), jnp.ones((1, 2)))
    products = [x for x in operations if x.primitive == "dot_general"]
    assert [x.is_backward for x in products] == [False, True]
