"""Modules are named, and no trace changes them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from helpers.compare import assert_same_bits
from helpers.modules import ROWS, Net, arrays_of, mean_square
from optax_lossscale.diagnostics import trace_operations


def test_the_state_of_an_nnx_module_is_unchanged_bit_for_bit():
    net, call = Net(), Net.__call__
    before = arrays_of(net)
    operations = trace_operations(lambda net, x: jnp.mean(net.encode(x)), net, ROWS)
    assert_same_bits(arrays_of(net), before)
    assert {"Net/linear", "Net/norm", "Net/dropout"} <= {x.scope for x in operations}
    assert Net.__call__ is call


def test_a_module_that_a_function_reads_is_named():
    net = Net()
    net.eval()
    operations = trace_operations(lambda x: mean_square(net, x), ROWS)
    assert "Net/linear" in {x.scope for x in operations if x.primitive == "dot_general"}


def test_a_scope_called_transpose_does_not_belong_to_the_backward_pass():
    def loss_fn(w, x):
        with jax.named_scope("transpose"):
            return jnp.mean(x @ w)

    operations = trace_operations(loss_fn, jnp.ones((2, 2)), jnp.ones((1, 2)))
    products = [x for x in operations if x.primitive == "dot_general"]
    assert [x.is_backward for x in products] == [False, True]


def test_modules_keep_their_own_call_after_a_trace_that_fails():
    def fail(model, x):
        model(x)
        raise RuntimeError("on purpose")

    before = Net.__call__
    with pytest.raises(RuntimeError, match="on purpose"):
        trace_operations(fail, Net(), ROWS)
    assert Net.__call__ is before


class Exponential(eqx.Module):
    def __call__(self, x):
        return jnp.exp(x)


class Nested(eqx.Module):
    """Holds a layer in containers, and makes another one in its call."""

    blocks: dict

    def __call__(self, x):
        return Exponential()(self.blocks["full"][0](x))


def test_layers_in_containers_are_named_by_their_paths_and_others_by_their_classes():
    layer = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    net = Nested({"empty": [], "full": [layer]})
    operations = trace_operations(lambda net, x: jnp.mean(jax.vmap(net)(x)), net, ROWS)
    scopes = {x.primitive: x.scope for x in operations if not x.is_backward}
    assert scopes["dot_general"] == "Nested/blocks/full/0/eqx.nn.Linear"
    assert scopes["exp"] == "Nested/Exponential"
