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


# For one index; `vmap` makes lookups of many indices of them.
OF_ONE_INDEX = {
    "x[i]": lambda table, i: table[i],
    "x[i, 1]": lambda table, i: jnp.stack([table[i, 0], table[i, 1]]),
    "x[i, ::1]": lambda table, i: table[i, ::1],
    "x.T[..., i]": lambda table, i: table.T[..., i],
    "x.at[i].get, clipped": lambda table, i: table.at[i].get(mode="clip"),
    "x.at[i].get, filled": lambda table, i: table.at[i].get(mode="fill"),
    "x.at[[i]].get, unique": lambda table, i: table.at[i[None]].get(
        unique_indices=True
    )[0],
    "dynamic_slice": lambda table, i: jax.lax.dynamic_slice(table, (i, 0), (1, 2))[0],
    "roll": lambda table, i: jnp.roll(table, -i, axis=0)[0],
    "equinox": lambda table, i: eqx.nn.Embedding(weight=table)(i),
    "in a loop": one_by_one_in_a_loop,
}


def low_loss(lookup):
    """The sum of what was looked up, without a sum in half precision."""
    return lambda table: jnp.sum(lookup(table).astype(jnp.float32))


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_gradient_of_a_lookup_counts_its_hits(name, dtype, level):
    # At O1 the parameters themselves are in half precision.
    table = TABLE.astype(dtype) if level == "O1" else TABLE
    loss = ols.autocast(low_loss(LOOKUPS[name]), dtype, level=level)
    for run in (lambda f: f, jax.jit):
        grads = run(jax.grad(loss))(table)
        assert grads.dtype == table.dtype
        np.testing.assert_array_equal(grads, np.stack([COUNTS, COUNTS], 1))


@pytest.mark.parametrize("name", OF_ONE_INDEX)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_lookup_that_is_mapped_outside_of_autocast_counts_its_hits(name, level):
    table = TABLE.astype(jnp.float16) if level == "O1" else TABLE
    lookup = ols.autocast(OF_ONE_INDEX[name], level=level)
    mapped = jax.vmap(lookup, (None, 0))
    grads = jax.grad(low_loss(lambda table: mapped(table, INDICES)))(table)
    np.testing.assert_array_equal(grads, np.stack([COUNTS, COUNTS], 1))


@pytest.mark.parametrize("mark", [ols.full_precision, ols.low_precision])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_lookup_in_a_marked_function_counts_its_hits(mark, level, inner):
    table = TABLE.astype(jnp.float16) if level == "O1" else TABLE
    lookup = mark(inner(LOOKUPS["x[i]"]))
    grads = jax.grad(ols.autocast(low_loss(lookup), level=level))(table)
    np.testing.assert_array_equal(grads[:, 0], COUNTS)


def test_a_lookup_in_a_scope_of_high_counts_its_hits():
    def loss_fn(table):
        with jax.named_scope("embed"):
            rows = table[INDICES] @ jnp.eye(2, dtype=table.dtype)
        return jnp.sum(rows.astype(jnp.float32))

    grads = jax.grad(ols.autocast(loss_fn, level="O2", high=["embed"]))(TABLE)
    np.testing.assert_array_equal(grads[:, 0], COUNTS)


@pytest.mark.slow
def test_marks_keep_products_beside_lookups_as_they_are_written():
    table = TABLE.astype(jnp.float16)
    factor = jnp.full((2, 2), 1 + 2.0**-12, jnp.float32)  # In float16 it is 1.

    def product(table):
        return table[jnp.array([0, 1])] @ factor

    low, kept = ols.autocast(product), ols.autocast(ols.full_precision(product))
    np.testing.assert_array_equal(kept(table), product(table))
    assert not np.array_equal(low(table), product(table))


def test_a_rule_in_a_marked_function_may_read_numbers():
    rule = jax.custom_vjp(lambda x: jnp.sum(jnp.sin(x)))
    rule.defvjp(
        lambda x: (jnp.sum(jnp.sin(x)), x),
        lambda x, g: (g * jnp.cos(x) if float(g) > 0 else x,),
    )
    grads = jax.grad(ols.autocast(ols.full_precision(rule)))(TABLE)
    np.testing.assert_array_equal(grads, jax.grad(rule)(TABLE))


@pytest.mark.parametrize("rules", ["jvp", "vjp"])
def test_rules_in_a_scope_of_high_run_low_what_the_function_runs_low(rules):
    product = ols.low_precision(jnp.matmul)
    if rules == "jvp":
        fun = jax.custom_jvp(lambda x, w: product(x, w))
        fun.defjvp(
            lambda p, t: (product(*p), product(t[0], p[1]) + product(p[0], t[1]))
        )
    else:
        fun = jax.custom_vjp(lambda x, w: product(x, w))
        fun.defvjp(
            lambda x, w: (product(x, w), (x, w)),
            lambda xw, g: (g @ xw[1].T, xw[0].T @ g),
        )

    def loss_fn(w):
        with jax.named_scope("scope"):
            return jnp.sum(fun(jnp.eye(2) @ w, w) ** 2)

    low = ols.autocast(loss_fn, high=["scope"])
    w = jnp.full((2, 2), 1 + 2.0**-12)
    assert jax.value_and_grad(low)(w)[0] == low(w) != loss_fn(w)


def test_the_gradient_that_a_function_itself_computes_counts_its_hits_too():
    grads = ols.autocast(jax.grad(low_loss(LOOKUPS["x[i]"])), level="O2")(TABLE)
    np.testing.assert_array_equal(grads[:, 0], COUNTS)


def test_a_gradient_for_each_member_of_a_batch_counts_its_hits():
    loss = ols.autocast(low_loss(LOOKUPS["x[i]"]), level="O2")
    grads = jax.vmap(jax.grad(loss))(jnp.stack([TABLE, TABLE]))
    np.testing.assert_array_equal(grads[1, :, 1], COUNTS)


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


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_is_looked_up_is_what_the_array_holds(name):
    table = TABLE.astype(jnp.float16)
    lookup = LOOKUPS[name]
    low = ols.autocast(lookup)(table)
    assert low.dtype == jnp.float16
    np.testing.assert_array_equal(low, lookup(table))


@pytest.mark.parametrize(
    "lookup", [LOOKUPS["x[i]"], lambda table: table[jnp.argmax(table[0])]]
)
def test_a_lookup_reads_only_its_rows(lookup):
    table = jax.ShapeDtypeStruct((1000, 128), jnp.float16)
    compiled = jax.jit(ols.autocast(lookup)).lower(table).compile()
    assert "f32[1000,128]" not in compiled.as_text().split("ENTRY")[1]
    assert compiled.memory_analysis().temp_size_in_bytes < 1000 * 128


@pytest.mark.parametrize(
    "lookup",
    [
        lambda x: x[1:3],
        lambda x: x[1],
        lambda x: x[jnp.array([0, 1])].astype(jnp.float32),
    ],
)
def test_a_program_without_low_sums_into_indices_is_not_changed(lookup):
    is_wide = lookup(TABLE.astype(jnp.float16)).dtype == jnp.float32
    table = TABLE if is_wide else TABLE.astype(jnp.float16)
    low = jax.make_jaxpr(ols.autocast(lookup))(table)
    assert str(low) == str(jax.make_jaxpr(lookup)(table))
