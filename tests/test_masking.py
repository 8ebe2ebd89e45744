"""What a bad step leaves behind: nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same_bits, types

from optax_lossscale._masking import (
    cast_like,
    mask_inputs,
    mask_state,
    mask_updates,
)

GOOD, BAD = jnp.asarray(True), jnp.asarray(False)
LEAVES = {
    "f32": jnp.asarray([1.5, -0.0, jnp.nan]),
    "f16": jnp.asarray([1.5, jnp.inf], jnp.float16),
    "complex": jnp.asarray([1 + 2j]),
    "int": jnp.arange(3),
    "bool": jnp.asarray([True, False]),
    "float0": np.zeros(2, jax.dtypes.float0),
    "empty": jnp.zeros((0, 2)),
    "none": None,
    "masked": optax.MaskedNode(),
}
KEY = {"key": jax.random.key(0)}


def test_a_good_step_changes_no_bit():
    assert_same_bits(mask_inputs(GOOD, LEAVES), LEAVES)
    assert_same_bits(mask_updates(GOOD, LEAVES), LEAVES)
    old = jax.tree.map(lambda leaf: leaf[::-1], LEAVES)
    assert_same_bits(mask_state(GOOD, LEAVES, old), LEAVES)


def test_a_bad_step_keeps_every_bit_of_the_old_state():
    new = jax.tree.map(lambda leaf: leaf[::-1], LEAVES)
    assert_same_bits(mask_state(BAD, new, LEAVES), LEAVES)
    other_key = {"key": jax.random.key(1)}
    assert_same_bits(mask_state(BAD, other_key, KEY), KEY)


def test_numbers_in_a_state_are_kept_too():
    assert mask_state(BAD, {"count": 2}, {"count": 1})["count"] == 1


def test_a_bad_step_zeroes_what_the_inner_optimizer_sees():
    seen = mask_inputs(BAD, LEAVES)
    for name in ("f32", "f16", "complex"):
        assert not np.any(seen[name])
    assert seen["int"] is LEAVES["int"]


def test_functions_among_extra_arguments_pass_through():
    extra = {"value_fn": jnp.sum, "value": float("nan")}
    seen = mask_inputs(BAD, extra)
    assert seen["value_fn"] is jnp.sum
    assert seen["value"] == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.complex64])
def test_an_update_of_a_bad_step_leaves_both_zeros_of_a_parameter(dtype):
    params = jnp.asarray([0.0, -0.0, 1.0], dtype)
    if dtype == jnp.complex64:
        params = jax.lax.complex(params.real, -params.real)
    updates = mask_updates(BAD, jnp.full_like(params, jnp.nan))
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(jax.jit(optax.apply_updates)(params, updates), params)


def test_types_are_kept_in_eager_and_jit():
    arrays = {k: v for k, v in LEAVES.items() if k not in ("float0", "masked")}
    for function in (mask_inputs, mask_updates):
        assert types(function(BAD, arrays)) == types(arrays)
        assert types(jax.jit(function)(BAD, arrays)) == types(arrays)


def test_cast_like_restores_dtypes_and_leaves_the_rest():
    old = {"f16": jnp.ones(2, jnp.float16), "int": jnp.arange(2), "number": 1, **KEY}
    new = {**old, "f16": jnp.ones(2, jnp.float32), "number": 2}
    cast = cast_like(new, old)
    assert cast["f16"].dtype == jnp.float16
    assert cast["int"] is old["int"]
    assert cast["number"] == 2
