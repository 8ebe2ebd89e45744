"""`scale` and `unscale`: every floating leaf, in float32 or wider."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.compat import enable_x64
from helpers.nodes import Foreign


def state_of(scale):
    return ols.static_loss_scale(scale).init()


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("complex64", "complex64"),
    ],
)
def test_a_leaf_is_multiplied_and_divided_in_float32_or_wider(dtype, wide):
    with enable_x64(dtype == "float64"):
        leaf = jnp.asarray([3.0, -0.5], dtype)
        scaled = ols.scale({"x": leaf}, state_of(8.0))["x"]
        unscaled = ols.unscale({"x": leaf}, state_of(8.0))["x"]
        assert (scaled.dtype, unscaled.dtype) == (wide, wide)
        assert scaled.tolist() == [24.0, -4.0]
        assert unscaled.tolist() == [0.375, -0.0625]


def test_scale_does_not_overflow_a_float16_loss():
    assert ols.scale(jnp.float16(3.0), state_of(2.0**15)) == 3 * 2.0**15


def test_unscale_does_not_underflow_in_float16():
    # tf.keras divides in float16, where 1 / 2**25 is zero.
    smallest = jnp.float16(2.0**-24)
    assert ols.unscale(smallest, state_of(2.0**25)) == 2.0**-49


def test_unscale_multiplies_by_the_reciprocal():
    grads = jnp.asarray([1.0, 5.0, 7.0])
    expected = np.asarray(grads) * (np.float32(1) / np.float32(3.0))
    assert_same_bits(ols.unscale(grads, state_of(3.0)), expected)


def test_scaling_by_a_power_of_two_and_back_changes_no_bit():
    leaf = np.random.default_rng(0).normal(size=402).astype(np.float32)
    leaf = np.ldexp(leaf, np.arange(402) % 201 - 100)
    leaf[:3] = 0.0, -0.0, -3.0
    for exponent in (-24, -1, 0, 15, 24):
        state = state_of(2.0**exponent)
        assert_same_bits(ols.unscale(ols.scale(leaf, state), state), leaf)


def test_an_infinite_part_of_a_complex_number_stays_out_of_the_other():
    for function in (ols.scale, ols.unscale):
        result = function(jnp.asarray(complex(np.inf, 2.0)), state_of(2.0))
        assert np.isinf(result.real)
        assert np.isfinite(result.imag)


def test_other_leaves_are_returned_as_they_are():
    tree = {"i": jnp.arange(3), "n": None, "t": "text", "k": jax.random.key(0)}
    for function in (ols.scale, ols.unscale):
        result = function(tree, state_of(8.0))
        assert all(result[name] is tree[name] for name in tree)


@pytest.mark.parametrize(
    "mask",
    [{"w": True, "amax": False}, lambda g: {"w": True, "amax": g["w"].ndim == 3}],
)
def test_unscale_leaves_what_the_mask_excludes_alone(mask):
    grads = {"w": jnp.float16([8.0]), "amax": jnp.float16([8.0])}
    result = ols.unscale(grads, state_of(8.0), mask=mask)
    assert_same_bits(result, {"w": jnp.ones(1), "amax": grads["amax"]})


def test_what_cannot_be_scaled_is_refused_with_a_hint():
    with pytest.raises(TypeError, match=r"mean `scaled_value_and_grad\(loss_fn"):
        ols.scale(jnp.sum, state_of(8.0))
    with pytest.raises(TypeError, match="type Foreign"):
        ols.unscale([Foreign()], state_of(8.0))
    with pytest.raises(ValueError, match="hold a LossScaleState, got none"):
        ols.unscale(jnp.ones(2), {"a": jnp.ones(2)})
