"""Kinds of leaves: what counts as an array, and how it is widened and copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.nodes import Foreign, Wrapped
from optax_lossscale._ground.tree import copy_wide, is_floating, strengthen, widen

OTHERS = {
    "dtype class": jnp.float16,
    "dtype class of NumPy": np.float32,
    "dtype": np.dtype("float32"),
    "module": nn.Dense(2, dtype=jnp.float32),
    "text": "x",
    "function": jnp.sum,
    "integer": 1,
    "integers": jnp.arange(3),
    "bool": True,
    "objects": np.asarray([1.5, None], object),
    "texts": np.asarray(["a"]),
    "times": np.asarray(["2020-01-01"], np.datetime64),
    "float0": np.zeros(3, jax.dtypes.float0),
    "key": jax.random.key(0),
    "none": None,
}
STATE = ols.static_loss_scale(2.0).init()


@pytest.mark.several_devices
def test_an_abstract_parameter_keeps_its_sharding_when_widened_and_its_copy_is_zero():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    param = jax.ShapeDtypeStruct((2, 3), jnp.float16, sharding=sharding)
    wide = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
    assert widen(param) == wide
    assert_same_bits(copy_wide(param), jnp.zeros((2, 3)))
    assert copy_wide(jnp.sum) is jnp.sum


@pytest.mark.slow
def test_what_is_no_floating_array_is_left_alone():
    tree = {"array": jnp.ones(1), "empty": jnp.zeros((0, 2)), **OTHERS}
    assert ols.all_finite(tree)
    assert ols.max_magnitude(tree) == 1
    for function in (ols.scale, ols.unscale):
        result = function(tree, STATE)
        assert [name for name in OTHERS if result[name] is not OTHERS[name]] == []
    assert list(ols.diagnostics.nonfinite_report(tree)) == ["array", "empty"]
    assert ols.diagnostics.headroom_bits(tree, dtype=jnp.float32) > 127
    assert ols.diagnostics.exponent_histogram(tree).counts.sum() == 1
    assert ols.diagnostics.underflow_fraction(tree) == 0


@pytest.mark.parametrize(
    "leaf",
    [1.0, 1j, np.float16(1), np.ones(2), jnp.ones(2, jnp.bfloat16), np.complex64(1)],
)
def test_floating_arrays_and_numbers_count_as_floating(leaf):
    assert is_floating(leaf)
    assert not ols.all_finite([leaf * np.nan])


def test_an_array_that_is_wrapped_counts_as_the_array():
    tree = {"w": Wrapped(jnp.asarray([1.0, -4.0])), "n": Wrapped(jnp.arange(2))}
    assert ols.max_magnitude(tree) == 4
    assert_same_bits(ols.scale(tree, STATE)["w"], jnp.asarray([2.0, -8.0]))
    assert ols.scale(tree, STATE)["n"] is tree["n"]
    assert not ols.all_finite({"w": Wrapped(jnp.asarray([jnp.nan]))})
    assert ols.diagnostics.headroom_bits(tree, dtype=jnp.float32) == 126


@pytest.mark.parametrize(
    "function",
    [
        ols.all_finite,
        ols.max_magnitude,
        lambda tree: ols.scale(tree, STATE),
        lambda tree: ols.unscale(tree, STATE),
        ols.diagnostics.nonfinite_report,
        ols.diagnostics.headroom_bits,
    ],
)
def test_an_array_of_another_library_is_refused_and_not_taken_for_finite(function):
    with pytest.raises(TypeError, match="one of JAX or NumPy, got one of type Foreign"):
        function({"w": Foreign()})


@pytest.mark.parametrize(
    "param", [jnp.ones(2), np.ones(2, np.float32), jnp.arange(2), 1.5, 3]
)
def test_a_wide_copy_has_a_buffer_of_its_own_and_a_strong_type(param):
    copy = copy_wide(param)
    assert isinstance(copy, jax.Array)
    assert copy is not param
    if isinstance(param, jax.Array):
        assert copy.unsafe_buffer_pointer() != param.unsafe_buffer_pointer()
    if isinstance(param, float):
        assert not copy.weak_type


def test_only_a_weakly_typed_array_is_strengthened():
    for strong in (strengthen(jnp.asarray(1.0)), widen(jnp.asarray(1.0)), widen(1.0)):
        assert not strong.weak_type
    for leaf in (jnp.ones(2), jax.random.key(0), np.ones(2), 1.0, "x"):
        assert strengthen(leaf) is leaf
    abstract = jax.eval_shape(lambda: jnp.asarray(1.0))
    assert strengthen(abstract) is abstract
