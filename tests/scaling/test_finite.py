"""`all_finite` and `max_magnitude`: every entry of every leaf counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compat import enable_x64
from helpers.nodes import Foreign
from helpers.steps import eager_and_jitted

BAD = [np.nan, np.inf, -np.inf]
DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_both_infinities_are_seen_in_each_dtype(dtype):
    with enable_x64(dtype == "float64"):
        tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2), dtype)}
        assert ols.all_finite(tree)
        assert ols.max_magnitude(tree) == 1.0
        for value in BAD:
            tree["b"] = tree["b"].at[1, 1].set(value)
            assert not ols.all_finite(tree)
            assert ols.max_magnitude(tree) == np.inf


@pytest.mark.parametrize("value", BAD)
def test_each_part_of_a_complex_number_counts(value):
    for bad in (complex(1.0, value), complex(value, 1.0)):
        tree = [jnp.asarray([1 + 1j, bad])]
        assert not ols.all_finite(tree)
        assert ols.max_magnitude(tree) == np.inf
    assert ols.max_magnitude(jnp.asarray([3 - 4j])) == 4.0


@eager_and_jitted
def test_one_bad_entry_is_seen_wherever_it_is(run):
    shapes = [(2, 3)] * 3 + [(), (5,), (1, 4097)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    ends = np.cumsum(sizes)

    def tree_of(flat):
        parts = jnp.split(flat, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    finite = run(lambda flat: ols.all_finite(tree_of(flat)))
    largest = run(lambda flat: ols.max_magnitude(tree_of(flat)))
    good = np.zeros(ends[-1], np.float32)
    assert finite(good)
    for place in [*range(25), 26, 4000, ends[-1] - 1]:
        bad = good.copy()
        bad[place] = np.nan
        assert not finite(bad), place
        assert largest(bad) == np.inf, place


def test_each_of_many_leaves_of_one_shape_is_seen_on_one_device():
    # There leaves of one shape are checked together, in groups of at most sixteen.
    mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec()

    def check(rows):
        return ols.all_finite([*rows, jnp.ones(3)]), ols.max_magnitude([*rows])

    on_one = jax.jit(jax.shard_map(check, mesh=mesh, in_specs=spec, out_specs=spec))
    good = np.ones((40, 2), np.float32)
    assert [*map(float, on_one(good))] == [True, 1.0]
    for place in range(40):
        for value in (np.nan, np.inf):
            bad = good.copy()
            bad[place, place % 2] = value
            assert [*map(float, on_one(bad))] == [False, np.inf], place


def test_leaves_of_other_kinds_are_finite_and_hide_no_others():
    others = {
        "a": jnp.arange(3), "b": np.zeros(2, jax.dtypes.float0), "c": jnp.zeros(0),
        "d": None, "e": "text", "f": jax.random.key(0), "g": True,
    }  # fmt: skip
    assert ols.all_finite(others)
    assert ols.max_magnitude(others) == 0.0
    for name in ("A", "z"):  # Before and behind them.
        assert not ols.all_finite({**others, name: jnp.asarray(jnp.inf)})
        assert ols.max_magnitude({**others, name: jnp.asarray(-2.5)}) == 2.5


def test_numbers_and_arrays_of_numpy_count():
    assert not ols.all_finite([1.0, np.nan])
    assert not ols.all_finite([np.asarray([1.0, np.inf], np.float32)])
    assert ols.max_magnitude([-3.0, np.ones(2, np.float16)]) == 3.0


def test_a_finite_float64_beyond_float32_is_finite():
    with enable_x64(True):
        huge = jnp.asarray([1e300])
        assert ols.all_finite(huge)
        assert ols.max_magnitude(huge) == np.finfo(np.float32).max


def test_numbers_whose_sum_overflows_are_finite():
    # apex and DeepSpeed look at the sum.
    assert ols.all_finite(jnp.full(100, 3e38))
    assert ols.all_finite(jnp.full(100, 6e4, jnp.float16))


def test_the_results_are_scalars_of_a_known_type():
    finite, largest = ols.all_finite([]), ols.max_magnitude([])
    assert (finite.shape, finite.dtype, bool(finite)) == ((), bool, True)
    assert (largest.shape, largest.dtype, float(largest)) == ((), jnp.float32, 0.0)


def test_an_array_of_another_library_is_refused():
    for function in (ols.all_finite, ols.max_magnitude):
        with pytest.raises(TypeError, match=r"got one of type Foreign.*jnp.asarray"):
            function([Foreign()])


@pytest.mark.parametrize("axis_name", ["i", ("i", "j"), ["i", "j"]])
def test_all_members_of_the_named_axes_get_one_answer(axis_name):
    def check(x):
        kwargs = {"axis_name": axis_name}
        return ols.all_finite(x, **kwargs), ols.max_magnitude(x, **kwargs)

    mapped = jax.vmap(jax.vmap(check, axis_name="i"), axis_name="j")
    finite, largest = mapped(jnp.ones((2, 3)).at[1, 1].set(jnp.nan))
    in_other_row = axis_name == "i"
    assert finite.tolist() == [[in_other_row] * 3, [False] * 3]
    assert largest.tolist() == [[1.0 if in_other_row else np.inf] * 3, [np.inf] * 3]
