"""At O2 and O3 lookups and sums into indices add up in float32; at O1 as written.

That is what docs/guides/autocast.md says of levels.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.cases import slow_except

HITS = 4096  # In float16 a sum of ones stops at 2048, in bfloat16 at 256.
INDICES = jnp.concatenate([jnp.zeros(HITS, int), jnp.array([1, 1, 3])])
COUNTS = np.array([HITS, 2, 0, 1, 0], np.float32)
TABLE = jnp.arange(10.0).reshape(5, 2) / 8
pytestmark = pytest.mark.usefixtures("standard_promotion")


def along_an_axis(table):
    return jnp.take_along_axis(table, INDICES[:, None] * jnp.ones((1, 2), int), 0)


def by_flax(table):
    layer = nn.Embed(5, 2, dtype=table.dtype)
    return layer.apply({"params": {"embedding": table}}, INDICES)


def one_by_one_in_a_loop(table, i):
    def add(total, _):
        return total + table[i], None

    return jax.lax.scan(add, jnp.zeros(2, table.dtype), None, 2)[0] / 2


def in_a_jitted_branch(table):
    branch = jax.jit(lambda table: table[INDICES])
    return jax.lax.cond(
        table[0, 0] < 9, branch, lambda table: 0 * table[INDICES], table
    )


LOOKUPS = {
    "x[i]": lambda table: table[INDICES],
    "take, filled": lambda table: jnp.take(table, INDICES, axis=0, mode="fill"),
    "take_along_axis": along_an_axis,
    "one by one": lambda table: jax.vmap(lambda i: table[i])(INDICES),
    "flax": by_flax,
    "in a jitted branch": in_a_jitted_branch,
    "in a checkpoint": jax.checkpoint(lambda table: table[INDICES]),
}


# For one index; `vmap` makes lookups of many indices of them.
OF_ONE_INDEX = {
    "x[i]": lambda table, i: table[i],
    "x.at[i].get, filled": lambda table, i: table.at[i].get(mode="fill"),
    "x.at[[i]].get, unique": lambda table, i: table.at[i[None]].get(
        unique_indices=True
    )[0],
    "dynamic_slice": lambda table, i: jax.lax.dynamic_slice(table, (i, 0), (1, 2))[0],
    "in a loop": one_by_one_in_a_loop,
}


def low_loss(lookup):
    """The sum of what was looked up, without a sum in half precision."""
    return lambda table: jnp.sum(lookup(table).astype(jnp.float32))


def assert_counts(lookup, dtype="float16", level="O2"):
    """The result is what the array holds, and the gradient counts the hits."""
    cast = ols.autocast(lookup, dtype, level=level)
    run = jax.jit(lambda table: (cast(table), jax.grad(low_loss(cast))(table)))
    found, grads = run(TABLE)
    np.testing.assert_array_equal(found, lookup(TABLE))
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, np.stack([COUNTS, COUNTS], 1))


@pytest.mark.parametrize("name", slow_except({"x[i]", "take, filled", "flax"}, LOOKUPS))
def test_the_gradient_of_a_lookup_counts_its_hits(name):
    assert_counts(LOOKUPS[name])


def test_the_gradient_of_a_lookup_counts_its_hits_at_o3_in_bfloat16():
    assert_counts(LOOKUPS["x[i]"], "bfloat16", "O3")


@pytest.mark.parametrize("name", OF_ONE_INDEX)
def test_a_lookup_that_is_mapped_outside_of_autocast_counts_its_hits(name):
    mapped = jax.vmap(ols.autocast(OF_ONE_INDEX[name], level="O2"), (None, 0))
    grads = jax.grad(low_loss(lambda table: mapped(table, INDICES)))(TABLE)
    np.testing.assert_array_equal(grads, np.stack([COUNTS, COUNTS], 1))


def in_a_scope(loss):
    def loss_in_a_scope(table):
        with jax.named_scope("embed"):
            return loss(table @ jnp.eye(2, dtype=table.dtype))

    return loss_in_a_scope


WAYS = {
    "full_precision": lambda f, cast: cast(ols.full_precision(jax.jit(f))),
    "low_precision": lambda f, cast: cast(ols.low_precision(jax.checkpoint(f))),
    "high": lambda f, cast: cast(in_a_scope(f), high=["embed"]),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_lookup_that_is_marked_counts_its_hits(name):
    cast = functools.partial(ols.autocast, level="O2")
    grads = jax.grad(WAYS[name](low_loss(LOOKUPS["x[i]"]), cast))(TABLE)
    np.testing.assert_array_equal(grads[:, 0], COUNTS)


def test_the_gradients_that_a_function_itself_computes_count_their_hits():
    per_member = jax.vmap(jax.grad(low_loss(LOOKUPS["x[i]"])))
    grads = ols.autocast(per_member, level="O2")(jnp.stack([TABLE, TABLE]))
    np.testing.assert_array_equal(grads[1, :, 0], COUNTS)


SUMS = {
    "segment_sum": lambda ones: jax.ops.segment_sum(ones, INDICES, 5),
    "add": lambda ones: jnp.zeros(5, ones.dtype).at[INDICES].add(ones),
    "subtract": lambda ones: -jnp.zeros(5, ones.dtype).at[INDICES].subtract(ones),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_into_indices_is_a_float32_sum(name):
    counted = ols.autocast(SUMS[name], level="O2")(jnp.ones(INDICES.shape))
    np.testing.assert_array_equal(counted, COUNTS)


@pytest.mark.parametrize("segments", [jax.ops.segment_max, jax.ops.segment_min])
def test_equal_entries_share_the_gradient_of_a_segment(segments):
    def loss_fn(x):
        return jnp.sum(segments(x, INDICES, 5).astype(jnp.float32))

    grads = jax.grad(ols.autocast(loss_fn, level="O2"))(jnp.ones(INDICES.shape))
    expected = 1 / np.asarray(COUNTS)[np.asarray(INDICES)]
    np.testing.assert_allclose(grads, expected, rtol=1e-3)


def test_a_lookup_reads_only_its_rows():
    table = jax.ShapeDtypeStruct((1000, 128), jnp.float16)
    lookup = ols.autocast(LOOKUPS["x[i]"], level="O2")
    compiled = jax.jit(lookup).lower(table).compile()
    assert "f32[1000,128]" not in compiled.as_text().split("ENTRY")[1]


def test_at_o1_a_lookup_in_an_array_of_float16_is_as_written():
    """The function is jitted, so that both levels find the same program."""
    loss, table = low_loss(jax.jit(LOOKUPS["x[i]"])), TABLE.astype(jnp.float16)
    o1, o2, plain = (
        jax.grad(f)(table)
        for f in (ols.autocast(loss), ols.autocast(loss, level="O2"), loss)
    )
    np.testing.assert_array_equal(o1, plain)
    assert jnp.max(o1) < HITS == jnp.max(o2)
