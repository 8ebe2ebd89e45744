"""all_finite and max_magnitude, for each way of reading the leaves."""

import itertools
import math
from unittest import mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers import strategies
from helpers.compare import assert_same_bits
from helpers.compat import enable_x64
from helpers.nodes import Foreign
from helpers.programs import equations_of
from optax_lossscale._scaling import finite as _finite


@pytest.fixture(params=[True, False], ids=["local", "unknown"], autouse=True)
def are_local(request, monkeypatch):
    """With one device all leaves are local; with eight they may be sharded."""
    if request.param:
        monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.float16, jnp.float8_e5m2, jnp.float8_e4m3fn]
)
def test_all_finite_sees_nan_and_both_infinities_in_each_dtype(dtype, value):
    leaf = jnp.asarray([1, value, 1], dtype)
    part, ones = leaf.astype(jnp.float32), jnp.ones(3)
    for bad in (leaf, jax.lax.complex(part, ones), jax.lax.complex(ones, part)):
        assert not ols.all_finite([ones, bad])
        assert ols.max_magnitude([ones, bad]) == jnp.inf


def test_numbers_whose_sum_overflows_are_finite_and_each_part_has_its_magnitude():
    large = jnp.full(4, jnp.finfo(jnp.float32).max)
    assert ols.all_finite(large)
    tree = [jnp.asarray([1.0, -3.0]), jax.lax.complex(jnp.zeros(1), -jnp.ones(1) * 5)]
    assert_same_bits(ols.max_magnitude(tree), jnp.float32(5.0))
    assert ols.max_magnitude([*tree, large]) == large[0]


def test_each_of_many_leaves_of_a_shape_is_seen():
    tree = [jnp.full((2, 3), i, jnp.float32) for i in range(70)] + [jnp.ones(2)]
    read = jax.jit(lambda tree: (ols.all_finite(tree), ols.max_magnitude(tree)))
    assert read(tree) == (True, 69)
    for where in (0, 15, 16, 59, 60, 69):
        large, bad = list(tree), list(tree)
        large[where] = tree[where].at[1, 2].set(-100)
        bad[where] = tree[where].at[0, 1].set(jnp.nan)
        assert read(large) == (True, 100), where
        assert read(bad) == (False, jnp.inf), where


@pytest.mark.parametrize(
    "tree", [(), None, {}, jnp.zeros((0, 3)), jnp.zeros((3, 0)), optax.MaskedNode()]
)
def test_a_tree_without_floating_entries_is_finite_and_its_maximum_is_zero(tree):
    assert ols.all_finite(tree)
    with enable_x64(True):
        assert_same_bits(ols.max_magnitude(tree), jnp.float32(0))


def test_max_magnitude_of_a_large_finite_float64_is_finite():
    with enable_x64(True):
        largest = jnp.finfo(jnp.float32).max
        assert ols.max_magnitude(jnp.asarray([1e300])) == largest
        assert ols.max_magnitude(jnp.asarray([jnp.nan])) == jnp.inf


@pytest.mark.parametrize("names", [("a", "b"), ["a", "b"]])
def test_all_members_of_several_axes_see_the_same(names):
    def over_all(function):
        def member(x):
            return function(x, axis_name=names)

        return jax.jit(jax.vmap(jax.vmap(member, axis_name="b"), axis_name="a"))

    are_finite, largest = over_all(ols.all_finite), over_all(ols.max_magnitude)
    grid = jnp.asarray([[1.0, -2.0], [3.0, 4.0]])
    assert largest(grid).tolist() == [[4.0] * 2] * 2
    for bad in (jnp.inf, jnp.nan):
        assert are_finite(grid.at[1, 1].set(bad)).tolist() == [[False] * 2] * 2
        assert largest(grid.at[1, 1].set(bad)).tolist() == [[jnp.inf] * 2] * 2


def grouped(*leaves, **options):
    """The fast form, with groups so small that a few leaves fill several of them."""
    with mock.patch.multiple(_finite, _SMALL=4, _GROUP=2):
        return _finite._reduce_groups(*leaves, divisor=None, **options)


@pytest.mark.slow
@given(
    trees=strategies.similar_trees(1, max_leaves=4),
    loss_scale=strategies.powers_of_two | st.just(3.0),
    seed=st.integers(0, 99),
    bad=st.none() | strategies.nonfinite,
)
def test_the_grouped_check_and_numpy_agree_with_the_plain_one(
    trees, loss_scale, seed, bad
):
    tree = trees[0] if bad is None else strategies.poisoned(trees[0], seed, bad)
    with enable_x64(True):
        state = ols.static_loss_scale(loss_scale).init()
        unscaled = [x for x in jax.tree.leaves(ols.unscale(tree, state)) if x.size]
        numbers = map(np.asarray, unscaled)
        entries = [part.ravel() for x in numbers for part in (x.real, x.imag)]
        largest = np.float32(np.abs(np.concatenate(entries)).max())
        largest = largest if np.isfinite(largest) else np.float32(np.inf)
        for statistic, read, expected in [
            (_finite._ALL_FINITE, _finite.is_finite, largest < np.inf),
            (_finite._MAX_MAGNITUDE, _finite.largest_magnitude, largest),
        ]:
            assert read(tree, state.loss_scale, None) == expected
            plain = statistic.plain(_finite._unscaled(unscaled, None))
            assert plain == expected
            for cut in (True, False):
                fast = grouped(*unscaled, statistic=statistic, cut=cut)
                assert_same_bits(fast, plain)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(4096,), (129, 128)])
def test_one_bad_entry_of_a_large_leaf_is_seen(shape, dtype):
    # XLA's maximum of 4096 and more entries drops a NaN on a CPU.
    size = math.prod(shape)
    jitted = jax.jit(lambda tree: (ols.all_finite(tree), ols.max_magnitude(tree)))
    for bad, place in itertools.product((jnp.nan, -jnp.inf), (0, size // 2, size - 1)):
        leaf = jnp.ones(size, dtype).at[place].set(bad).reshape(shape)
        for leaves in ([leaf], [jnp.ones(3), leaf], [jnp.zeros(shape), leaf, leaf]):
            assert jitted(leaves) == (False, jnp.inf), place


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
        found = np.unique(np.concatenate([[0], *entries]))
        np.testing.assert_array_equal(found, np.arange(max(1, ends[-1])))


def test_a_group_holds_at_most_sixteen_arrays_of_one_shape():
    large, small = jnp.ones((SMALL, 2)), jnp.ones(3, jnp.float16)
    groups = list(_finite._groups_of([large] * 50 + [large.T] + [small] * 40))
    shapes = [[array.shape for array in group] for group in groups]
    assert shapes[:3] == [[(42,)], [(42,)], [(36,)]]
    assert [len(group) for group in groups[3:]] == [13, 13, 13, 11, 1]
    assert {*shapes[3]} == {(SMALL, 2)}


@pytest.mark.parametrize("function", [ols.all_finite, ols.max_magnitude])
def test_leaves_of_symbolic_shapes_are_read_for_every_platform(function):
    (rows,) = jax.export.symbolic_shape("rows")
    tree = [jax.ShapeDtypeStruct((rows, n), jnp.float32) for n in (3, 20_000)]
    exported = jax.export.export(
        jax.jit(lambda tree: function(tree)), platforms=("cpu", "cuda", "tpu")
    )(tree)
    good, bad = jnp.ones((2, 3)), jnp.full((2, 20_000), jnp.nan)
    assert float(exported.call([good, jnp.ones((2, 20_000))])) == 1
    assert float(exported.call([good, bad])) in (0, jnp.inf)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_leaves_of_one_shape_are_reduced_together_if_they_are_local(platform):
    leaves = [jnp.ones((256, 100))] * 12
    traced = jax.jit(lambda leaves: ols.all_finite(leaves)).trace(leaves)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.reduce(") == 1 + (1 if _finite._are_local() else 12)


@pytest.mark.parametrize("function", [ols.all_finite, ols.max_magnitude])
def test_the_results_of_many_leaves_are_not_combined_one_by_one(function):
    """XLA would take minutes to compile a chain of a thousand operations."""
    leaves = [jnp.ones((n + 1, 2)) for n in range(20)]
    program = jax.make_jaxpr(lambda leaves: function(leaves))(leaves)
    names = [equation.primitive.name for equation in equations_of(program)]
    assert not {"max", "min", "and", "gt"} & {*names}


def test_only_on_a_cpu_a_large_leaf_is_cut():
    leaf = jnp.ones((256, 100))
    traced = jax.jit(lambda leaf: ols.all_finite(leaf)).trace(leaf)
    texts = [traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")]
    are_cut = ["stablehlo.slice" in text for text in texts]
    assert are_cut == [_finite._are_local(), False]


def test_gradients_that_overflow_only_when_unscaled_are_nonfinite():
    loss_scale = jnp.float32(2.0**-24)
    large = jnp.asarray([2.0**120])
    assert ols.all_finite(large)
    assert not _finite.is_finite(large, loss_scale, None)
    with enable_x64(True):
        assert _finite.is_finite(large.astype(jnp.float64), loss_scale, None)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "count", [1, pytest.param(8, marks=pytest.mark.several_devices)]
)
def test_leaves_are_local_only_on_an_automatic_mesh_of_one_device(count, axis_type):
    devices = np.asarray(jax.devices()[:count])
    with jax.set_mesh(Mesh(devices, ("data",), axis_types=(axis_type,))):
        assert _finite._are_local() is (count == 1 and axis_type == AxisType.Auto)
    types = axis_type, AxisType.Auto
    with jax.set_mesh(Mesh(devices[None], ("model", "data"), axis_types=types)):
        assert _finite._are_local() is (count == 1 and axis_type == AxisType.Auto)


@pytest.mark.parametrize("function", [ols.all_finite, ols.max_magnitude])
def test_leaves_on_an_explicit_mesh_are_read_without_set_mesh_too(function):
    mesh = Mesh(jax.devices()[:1], ("data",), axis_types=(AxisType.Explicit,))
    specs = [P("data"), P(None, "data"), P()]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    leaves = [jax.device_put(jnp.ones((400, 200)), each) for each in shardings]
    tree = [*leaves, jax.device_put(jnp.ones((4, 2)), shardings[1]), jnp.ones(3)]
    assert float(jax.jit(lambda tree: function(tree))(tree)) == 1
    tree[1] *= jnp.nan
    assert float(jax.jit(lambda tree: function(tree))(tree)) in (0, jnp.inf)


@pytest.mark.several_devices
def test_leaves_are_not_local_to_one_of_several_processes(are_local, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    assert not _finite._are_local()


@pytest.mark.several_devices
def test_leaves_are_local_where_every_axis_is_manual():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    seen = []

    def look(x):
        seen.append(_finite._are_local())
        return x

    for names in ({"data", "model"}, {"data"}):
        specs = {"in_specs": P("data"), "out_specs": P("data")}
        mapped = jax.shard_map(look, mesh=mesh, axis_names=names, **specs)
        jax.jit(mapped).lower(jnp.ones(8))
        assert seen[-1] is (names == {"data", "model"})


@pytest.mark.parametrize("function", [ols.all_finite, ols.max_magnitude])
def test_an_array_of_another_library_is_refused(function):
    with pytest.raises(TypeError, match=r"of JAX or NumPy, got one of type Foreign"):
        function({"a": jnp.ones(2), "b": Foreign()})


def test_numbers_and_arrays_of_numpy_are_seen():
    tree = [1.5, 3, np.float32(-2.5), np.ones(2, np.float16), np.arange(9)]
    assert ols.all_finite(tree)
    assert ols.max_magnitude(tree) == 2.5
    for bad in (float("nan"), np.float32("inf"), np.full(2, np.nan)):
        assert not ols.all_finite([*tree, bad])
        assert ols.max_magnitude([*tree, bad]) == np.inf


def test_the_largest_magnitude_has_the_derivative_zero_on_any_axis():
    def loss(x):
        return jnp.sum(x**2) + ols.max_magnitude(x, axis_name="i")

    grads = jax.vmap(jax.grad(loss), axis_name="i")(jnp.ones((2, 3)))
    assert grads.tolist() == [[2.0] * 3] * 2
    assert jax.grad(ols.max_magnitude)(jnp.ones(3)).tolist() == [0.0] * 3


def test_a_step_by_the_largest_magnitude_on_an_axis_can_be_differentiated():
    tx = ols.loss_scaled(optax.sgd(1.0), ols.headroom_loss_scale(1.0), axis_name="i")

    def update(grads):
        return tx.update(grads, tx.init(grads))[0].sum()

    slopes = jax.vmap(jax.grad(update), axis_name="i")(jnp.ones((2, 3)))
    assert slopes.tolist() == [[-1.0] * 3] * 2


@pytest.mark.parametrize("size", [2**14, 2**14 + 1, 2**14 + 15, 2**15 - 1])
@pytest.mark.parametrize("bad", [0, 9_000, -1])
def test_a_bad_entry_anywhere_in_a_leaf_of_any_size_is_seen(size, bad):
    array = jnp.ones(size).at[bad].set(7.0)
    assert ols.max_magnitude([array]) == 7.0
    assert ols.max_magnitude([array, -array]) == 7.0
    assert not ols.all_finite([array.at[bad].set(jnp.nan)])
