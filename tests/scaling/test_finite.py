"""all_finite and max_magnitude, for each way of reading the leaves."""

import itertools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.compat import enable_x64, set_mesh
from helpers.strategies import nonfinite
from optax_lossscale import _finite


@pytest.fixture(params=[True, False], ids=["local", "unknown"], autouse=True)
def are_local(request, monkeypatch):
    """With one device all leaves are local; with eight they may be sharded."""
    if request.param:
        monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_all_finite_sees_nan_and_both_infinities_in_each_dtype(dtype, value):
    tree = [jnp.ones(3), jnp.asarray([1, value, 1], dtype)]
    assert not ols.all_finite(tree)
    assert ols.max_magnitude(tree) == jnp.inf


@pytest.mark.parametrize("where", [0, 15, 16, 59, 60, 69])
def test_each_of_many_leaves_of_a_shape_is_seen(where):
    tree = [jnp.full((2, 3), i, jnp.float32) for i in range(70)] + [jnp.ones(2)]
    assert ols.all_finite(tree)
    assert ols.max_magnitude(tree) == 69
    tree[where] = tree[where].at[1, 2].set(-100)
    assert ols.max_magnitude(tree) == 100
    tree[where] = tree[where].at[0, 1].set(jnp.nan)
    assert not ols.all_finite(tree)
    assert ols.max_magnitude(tree) == jnp.inf


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_all_finite_sees_a_float8_nan(dtype):
    assert not ols.all_finite(jnp.asarray([1, jnp.nan]).astype(dtype))
    assert ols.all_finite(jnp.ones(3, dtype))


@pytest.mark.parametrize("part", ["real", "imag"])
def test_all_finite_sees_either_part_of_a_complex_number(part):
    parts = {"real": jnp.ones(2), "imag": jnp.ones(2)}
    parts[part] = jnp.asarray([1, jnp.nan])
    value = jax.lax.complex(parts["real"], parts["imag"])
    assert not ols.all_finite(value)
    assert ols.max_magnitude(value) == jnp.inf


@pytest.mark.parametrize(
    "tree",
    [
        (),
        None,
        {},
        jnp.zeros((0, 3)),
        jnp.arange(3),
        np.zeros(2, jax.dtypes.float0),
        jax.random.key(0),
        optax.MaskedNode(),
    ],
    ids=["tuple", "none", "dict", "empty", "int", "float0", "key", "masked"],
)
def test_a_tree_without_floating_entries_is_finite_and_its_maximum_is_zero(tree):
    assert ols.all_finite(tree)
    assert ols.max_magnitude(tree) == 0


def test_all_finite_is_not_fooled_by_a_sum_that_overflows():
    assert ols.all_finite(jnp.full(4, jnp.finfo(jnp.float32).max))


def test_max_magnitude_takes_the_largest_over_leaves_signs_and_parts():
    tree = [jnp.asarray([1.0, -3.0]), jax.lax.complex(jnp.zeros(1), -jnp.ones(1) * 5)]
    assert ols.max_magnitude(tree) == 5.0
    assert ols.max_magnitude(tree).dtype == jnp.float32


def test_max_magnitude_of_a_large_finite_float64_is_finite():
    with enable_x64(True):
        largest = jnp.finfo(jnp.float32).max
        assert ols.max_magnitude(jnp.asarray([1e300])) == largest
        assert ols.max_magnitude(jnp.asarray([jnp.nan])) == jnp.inf


@pytest.mark.parametrize("function", [ols.all_finite, ols.max_magnitude])
def test_the_verdict_is_a_strongly_typed_scalar_in_eager_and_jit(function):
    tree = [jnp.ones(3), jnp.asarray([1.0, jnp.inf])]
    eager, jitted = function(tree), jax.jit(lambda tree: function(tree))(tree)
    assert eager.shape == ()
    assert not eager.weak_type
    assert_same_bits(jitted, eager)


def test_all_finite_agrees_over_a_named_axis():
    grads = jnp.asarray([1.0, jnp.nan, 3.0])
    alone = jax.vmap(ols.all_finite, axis_name="i")(grads)
    together = jax.vmap(lambda g: ols.all_finite(g, axis_name="i"), axis_name="i")(
        grads
    )
    assert alone.tolist() == [True, False, True]
    assert together.tolist() == [False] * 3


@pytest.mark.parametrize("names", [("a", "b"), ["a", "b"]])
def test_all_finite_and_max_magnitude_are_the_same_for_all_members_of_several_axes(
    names,
):
    def over_all(function):
        def member(x):
            return function(x, axis_name=names)

        return jax.vmap(jax.vmap(member, axis_name="b"), axis_name="a")

    grid = jnp.asarray([[1.0, 2.0], [3.0, jnp.inf]])
    assert over_all(ols.all_finite)(grid).tolist() == [[False] * 2] * 2
    assert over_all(ols.max_magnitude)(1 / grid).tolist() == [[1.0] * 2] * 2


def test_max_magnitude_over_a_named_axis_is_the_largest_and_infinity_for_a_nan():
    agree = jax.vmap(lambda g: ols.max_magnitude(g, axis_name="i"), axis_name="i")
    assert agree(jnp.asarray([1.0, -4.0])).tolist() == [4.0, 4.0]
    assert agree(jnp.asarray([1.0, jnp.nan])).tolist() == [jnp.inf, jnp.inf]


# Few sizes, as operations are compiled anew for each.
SIZES = st.lists(st.sampled_from([0, 1, 4, 9]), min_size=1, max_size=4)


@pytest.mark.fast_every(4)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@given(sizes=SIZES, seed=st.integers(0, 99), bad=st.none() | nonfinite)
def test_the_largest_magnitude_equals_that_of_numpy(dtype, sizes, seed, bad):
    rng = np.random.default_rng(seed)
    arrays = [(1e4 * rng.standard_cauchy(size)).clip(-6e4, 6e4) for size in sizes]
    arrays = [array.astype(dtype) for array in arrays]
    if bad is not None and sizes[seed % len(sizes)]:
        arrays[seed % len(sizes)][-1] = bad
    flat = np.abs(np.concatenate(arrays).astype(np.float32))
    expected = np.inf if np.isnan(flat).any() else flat.max(initial=0)
    assert float(ols.max_magnitude(arrays)) == expected
    assert bool(ols.all_finite(arrays)) == (expected < np.inf)


@pytest.mark.fast_every(6)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "shape",
    [(4096,), (129, 128), pytest.param((300, 400), marks=pytest.mark.slow)],
)
def test_one_bad_entry_of_a_large_leaf_is_seen(shape, dtype):
    # XLA's maximum of 4096 and more entries drops a NaN on a CPU.
    size = math.prod(shape)
    jitted = jax.jit(lambda tree: ols.all_finite(tree))
    values = (jnp.nan, -jnp.nan, jnp.inf, -jnp.inf)
    for bad, place in itertools.product(values, (0, size // 2, size - 2, size - 1)):
        leaf = np.ones(size, dtype)
        leaf[place] = bad
        leaf = jnp.asarray(leaf.reshape(shape))
        for leaves in ([leaf], [jnp.ones(3), leaf], [jnp.zeros(shape), leaf, leaf]):
            assert not jitted(leaves), (bad, place)
            assert not ols.all_finite(leaves), (bad, place)
            assert ols.max_magnitude(leaves) == jnp.inf, (bad, place)


SMALL = _finite._SMALL


@given(
    st.lists(st.sampled_from([1, 9, SMALL - 1, SMALL, SMALL + 7, 10**5]), max_size=40)
)
def test_groups_and_their_pieces_hold_every_entry_of_every_leaf(sizes):
    ends = np.cumsum([0, *sizes])
    leaves = [np.arange(*pair) for pair in itertools.pairwise(ends)]
    with jax.ensure_compile_time_eval():
        groups = list(_finite._groups_of([jnp.asarray(leaf) for leaf in leaves]))
        pieces = [piece for group in groups for piece in _finite._cut(group)]
    for arrays in ([array for group in groups for array in group], pieces):
        entries = [np.asarray(array).ravel() for array in arrays]
        assert set(np.concatenate([[0], *entries])) == set(range(max(1, ends[-1])))


def test_a_group_holds_at_most_sixteen_arrays_of_one_shape():
    large, small = jnp.ones((SMALL, 2)), jnp.ones(3, jnp.float16)
    groups = list(_finite._groups_of([large] * 50 + [large.T] + [small] * 40))
    shapes = [[array.shape for array in group] for group in groups]
    assert shapes[:3] == [[(42,)], [(42,)], [(36,)]]
    assert [len(group) for group in groups[3:]] == [13, 13, 13, 11, 1]
    assert {*shapes[3]} == {(SMALL, 2)}


@pytest.mark.parametrize("columns", [3, 20_000])
def test_leaves_of_symbolic_shapes_are_read_for_every_platform(columns):
    (rows,) = jax.export.symbolic_shape("rows")
    tree = [jax.ShapeDtypeStruct((rows, columns), jnp.float32)] * 2
    for function in (ols.all_finite, ols.max_magnitude):
        exported = jax.export.export(
            jax.jit(lambda tree, function=function: function(tree)),
            platforms=("cpu", "cuda", "tpu"),
        )(tree)
        good, bad = jnp.ones((2, columns)), jnp.full((2, columns), jnp.nan)
        assert float(exported.call([good, good])) == 1
        assert float(exported.call([good, bad])) in (0, jnp.inf)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "cpu"])
def test_leaves_of_one_shape_are_reduced_together_if_they_are_local(platform):
    leaves = [jnp.ones((256, 100))] * 12
    traced = jax.jit(lambda leaves: ols.all_finite(leaves)).trace(leaves)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.reduce(") == 1 + (1 if _finite._are_local() else 12)


@pytest.mark.parametrize("scale", [2.0**15, 2.0**-15, 3.0])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.complex64])
def test_unscaling_the_largest_magnitude_equals_the_largest_of_the_unscaled(
    scale, dtype
):
    state = ols.static_loss_scale(scale).init()
    parts = np.random.default_rng(0).normal(size=(2, 50)) * 1e3
    leaf = jax.lax.complex(*jnp.asarray(parts, jnp.float32))
    leaf = leaf if dtype == jnp.complex64 else leaf.real.astype(dtype)
    exact = ols.max_magnitude(ols.unscale(leaf, state))
    assert _finite.largest_magnitude(leaf, state.loss_scale, None) == exact


def test_gradients_that_overflow_only_when_unscaled_are_nonfinite():
    loss_scale = jnp.float32(2.0**-24)
    large = jnp.asarray([2.0**120])
    assert ols.all_finite(large)
    assert not _finite.is_finite(large, loss_scale, None)
    with enable_x64(True):
        assert _finite.is_finite(large.astype(jnp.float64), loss_scale, None)


@pytest.mark.parametrize(
    ("shape", "axis_type", "expected"),
    [
        ((1,), AxisType.Auto, True),
        ((8,), AxisType.Auto, False),
        ((1,), AxisType.Explicit, False),
        ((8,), AxisType.Explicit, False),
    ],
)
def test_leaves_are_local_only_on_an_automatic_mesh_of_one_device(
    shape, axis_type, expected
):
    devices = np.asarray(jax.devices()[: shape[0]])
    with set_mesh(Mesh(devices, ("data",), axis_types=(axis_type,))):
        assert _finite._are_local() is expected


def test_leaves_are_local_where_every_axis_is_manual():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    seen = []
    for names in ({"data", "model"}, {"data"}):

        def look(x):
            seen.append(_finite._are_local())
            return x

        jax.jit(
            jax.shard_map(
                look,
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P("data"),
                axis_names=names,
            )
        ).lower(jnp.ones(8))
    assert seen[0] is True
    assert seen[-1] is False
