"""Lookups in half-precision arrays add up their gradients in float32."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols

HITS = 16384  # In float16 a sum of ones stops at 2048, in bfloat16 at 256.
INDICES = jnp.concatenate([jnp.zeros(HITS, int), jnp.array([1, 1, 3])])
COUNTS = np.array([HITS, 2, 0, 1, 0], np.float32)
TABLE = jnp.arange(10.0).reshape(5, 2) / 8
pytestmark = pytest.mark.usefixtures("standard_promotion")


def along_an_axis(table):
    return jnp.take_along_axis(table, INDICES[:, None] * jnp.ones((1, 2), int), 0)


def by_flax(table):
    layer = nn.Embed(5, 2, dtype=table.dtype)
    return layer.apply({"params": {"embedding": table}}, INDICES)


def by_equinox(table):
    layer = eqx.nn.Embedding(weight=table)
    return jax.vmap(layer)(INDICES)


def in_a_jitted_branch(table):
    branch = jax.jit(lambda table: table[INDICES])
    return jax.lax.cond(
        table[0, 0] < 9, branch, lambda table: 0 * table[INDICES], table
    )


LOOKUPS = {
    "x[i]": lambda table: table[INDICES],
    "x.at[i].get": lambda table: table.at[INDICES].get(mode="clip"),
    "take": lambda table: jnp.take(table, INDICES, axis=0),
    "take, filled": lambda table: jnp.take(table, INDICES, axis=0, mode="fill"),
    "take_along_axis": along_an_axis,
    "one by one": lambda table: jax.vmap(lambda i: table[i])(INDICES),
    "flax": by_flax,
    "equinox": by_equinox,
    "in a jitted branch": in_a_jitted_branch,
    "in a checkpoint": jax.checkpoint(lambda table: table[INDICES]),
}


def low_loss(lookup):
    """The sum of what was looked up, without a sum in half precision."""
    return lambda table: jnp.sum(lookup(table).astype(jnp.float32))


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.fast_every(3)
def test_the_gradient_of_a_lookup_counts_its_hits(name, dtype, level):
    # At O1 the parameters themselves are in half precision.
    table = TABLE.astype(dtype) if level == "O1" else TABLE
    loss = ols.autocast(low_loss(LOOKUPS[name]), dtype, level=level)
    for run in (lambda f: f, jax.jit):
        grads = run(jax.grad(loss))(table)
        assert grads.dtype == table.dtype
        np.testing.assert_array_equal(grads, np.stack([COUNTS, COUNTS], 1))


def test_the_gradient_that_a_function_itself_computes_counts_its_hits_too():
    grads = ols.autocast(jax.grad(low_loss(LOOKUPS["x[i]"])), level="O2")(TABLE)
    np.testing.assert_array_equal(grads[:, 0], COUNTS)


def test_a_gradient_for_each_member_of_a_batch_counts_its_hits():
    loss = ols.autocast(low_loss(LOOKUPS["x[i]"]), level="O2")
    grads = jax.vmap(jax.grad(loss))(jnp.stack([TABLE, TABLE]))
    np.testing.assert_array_equal(grads[1, :, 1], COUNTS)


def test_a_segment_sum_is_a_float32_sum():
    def count(ones):
        return jax.ops.segment_sum(ones, INDICES, 5)

    counted = ols.autocast(count, level="O2")(jnp.ones(INDICES.shape))
    np.testing.assert_array_equal(counted, COUNTS)


@pytest.mark.parametrize("segments", [jax.ops.segment_max, jax.ops.segment_min])
def test_equal_entries_share_the_gradient_of_a_segment(segments):
    def loss_fn(x):
        return jnp.sum(segments(x, INDICES, 5).astype(jnp.float32))

    grads = jax.grad(ols.autocast(loss_fn, level="O2"))(jnp.ones(INDICES.shape))
    expected = 1 / np.asarray(COUNTS)[np.asarray(INDICES)]
    np.testing.assert_allclose(grads, expected, rtol=1e-3)


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_is_looked_up_is_what_the_array_holds(name):
    table = TABLE.astype(jnp.float16)
    lookup = LOOKUPS[name]
    low = ols.autocast(lookup)(table)
    assert low.dtype == jnp.float16
    np.testing.assert_array_equal(low, lookup(table))


def test_a_lookup_reads_only_its_rows():
    table = jax.ShapeDtypeStruct((1000, 128), jnp.float16)
    compiled = jax.jit(ols.autocast(LOOKUPS["x[i]"])).lower(table).compile()
    assert "f32[1000,128]" not in compiled.as_text().split("ENTRY")[1]
    assert compiled.memory_analysis().temp_size_in_bytes < 1000 * 128


@pytest.mark.parametrize(
    "lookup",
    [
        lambda x: x.at[jnp.array([0, 1])].get(unique_indices=True),
        lambda x: x[1:3],
        lambda x: x[jnp.array([0, 1])].astype(jnp.float32),
    ],
)
def test_a_program_without_low_sums_into_indices_is_not_changed(lookup):
    is_wide = lookup(TABLE.astype(jnp.float16)).dtype == jnp.float32
    table = TABLE if is_wide else TABLE.astype(jnp.float16)
    low = jax.make_jaxpr(ols.autocast(lookup))(table)
    assert str(low) == str(jax.make_jaxpr(lookup)(table))


def test_a_marked_function_is_left_alone():
    lookup = ols.full_precision(LOOKUPS["x[i]"])
    grads = ols.autocast(jax.grad(low_loss(lookup)))(TABLE.astype(jnp.float16))
    assert grads[0, 0] < HITS
