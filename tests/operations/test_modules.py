"""Modules of Flax are named, and no trace changes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from helpers.compare import assert_same_bits
from helpers.modules import ROWS, Net, arrays_of, mean_square
from optax_lossscale.diagnostics import trace_operations


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dropout(0.5, deterministic=False)(x)


def test_linen_modules_take_dropout_keys_and_return_batch_statistics():
    model, x = Dropped(), np.asarray(ROWS)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = jax.jit(model.init)(keys, x)

        def loss_fn(params, rest, x, key):
            y, updates = model.apply(
                {"params": params, **rest},
                x,
                rngs={"dropout": key},
                mutable="batch_stats",
            )
            return jnp.mean(y**2), updates

        rest = {"batch_stats": variables["batch_stats"]}
        operations = trace_operations(
            loss_fn, variables["params"], rest, x, jax.random.key(2)
        )
    scopes = {x.scope for x in operations}
    assert {"Dropped/Dense_0", "Dropped/BatchNorm_0", "Dropped/Dropout_0"} <= scopes
    # Batch statistics are results too.
    moving = [x for x in operations if x.scope == "Dropped/BatchNorm_0"]
    assert any(x.shape == (4,) and not x.is_backward for x in moving)


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


def test_modules_keep_their_own_call_after_a_trace_that_fails():
    def fail(model, x):
        model(x)
        raise RuntimeError("on purpose")

    before = Net.__call__
    with pytest.raises(RuntimeError, match="on purpose"):
        trace_operations(fail, Net(), ROWS)
    assert Net.__call__ is before
