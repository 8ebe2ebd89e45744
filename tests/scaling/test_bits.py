"""Exponents and mantissas, over the range of each dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.compare import assert_same_bits
from helpers.float_values import DTYPES, as_float64, values_of
from optax_lossscale._ground.bits import split, split_number


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponent_and_mantissa_multiply_to_the_number(dtype):
    values = values_of(dtype)
    wide = np.abs(as_float64(values))
    is_counted = np.isfinite(wide) & (wide > 0)
    parts = jax.tree.map(np.asarray, split(jnp.asarray(values)))
    product = np.ldexp(parts.mantissa.astype(np.float64), parts.exponent)
    np.testing.assert_array_equal(product[is_counted], wide[is_counted])


def test_a_number_is_split_as_an_array_is_split():
    assert_same_bits(split_number(0.75), split(jnp.asarray(0.75)))
