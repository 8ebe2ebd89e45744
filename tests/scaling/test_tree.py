"""Leaves are widened to float32."""

import jax
import jax.numpy as jnp

from optax_lossscale._tree import wide_param, widen


def test_a_widened_leaf_has_a_strong_type():
    assert not widen(jnp.asarray(1.0)).weak_type
    assert not widen(1.0).weak_type


def test_an_abstract_parameter_keeps_its_sharding_when_widened():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    param = jax.ShapeDtypeStruct((2, 3), jnp.float16, sharding=sharding)
    wide = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
    assert wide_param(param) == wide
