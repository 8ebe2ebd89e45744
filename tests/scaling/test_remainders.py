"""The 16 bits that complete a half-precision parameter to its float32 master."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.float_values import all_values, float32_values
from helpers.programs import equations_of
from optax_lossscale._masters.remainders import (
    REMAINDERS,
    join_master,
    remainder_of,
    round_master,
)
from tools.every_master import BFLOAT16, FLOAT16, check

HALVES = [FLOAT16, BFLOAT16]
RNG = np.random.default_rng(0)


def split(master, dtype):
    """The parameter and the remainder of one number, as Python numbers."""
    params = round_master(jnp.float32(master), dtype)
    remainder = np.asarray(remainder_of(jnp.float32(master), params))
    return float(params), int(remainder.view(np.int16))


def join(param, remainder, dtype):
    remainder = np.asarray(remainder, np.int16).view(REMAINDERS[dtype])
    return np.float32(join_master(jnp.asarray(param, dtype), jnp.asarray(remainder)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_masters_come_back(dtype):
    every_4093rd = np.arange(0, 2**32, 4093, dtype=np.uint64).astype(np.uint32)
    check(every_4093rd, dtype)
    check(float32_values().view(np.uint32), dtype)
    # All masters whose parameter is one of a few, and of the parameters beside it.
    for top in (0x0000, 0x3300, 0x3380, 0x387F, 0x3F7F, 0x477F, 0x7F7F, 0x7FBF, 0x7FFF):
        check((top << 16) + np.arange(2**16, dtype=np.uint32), dtype)
        check(((top | 0x8000) << 16) + np.arange(2**16, dtype=np.uint32), dtype)


@pytest.mark.parametrize(
    ("dtype", "master", "param", "remainder"),
    [
        # 1 + 2**-8 is midway between 1 and the next bfloat16, 1 + 2**-7.
        (BFLOAT16, 1 + 2**-8, 1 + 2**-7, -(2**15)),
        (BFLOAT16, -1 - 2**-8, -1 - 2**-7, -(2**15)),
        (BFLOAT16, 1 + 2**-8 - 2**-23, 1.0, 2**15 - 1),
        (BFLOAT16, 1 + 2**-23, 1.0, 1),
        # Below 1, numbers of float32 are half as far apart.
        (BFLOAT16, 1 - 2**-24, 1.0, -1),
        # 1 + 2**-11 is midway between 1 and the next float16, and 1 is even.
        (FLOAT16, 1 + 2**-11, 1.0, 2**15 - 1),
        (FLOAT16, 1 + 3 * 2**-11, 1 + 2**-9, -(2**15)),
        (FLOAT16, 1 + 2**-23, 1.0, 8),
        # Subnormal numbers of float16 are 2**-24 apart, so 2**-40 is the unit.
        (FLOAT16, 2**-24 + 3 * 2**-40, 2**-24, 3),
        (FLOAT16, 2**-26, 0.0, 2**14),
        (FLOAT16, -(2**-26), -0.0, 2**14 - 2**15),
        # Up to 65520 a number is nearer to 65504 than to 65536, which is infinity.
        (FLOAT16, 65504 + 2**-8, 65504.0, 8),
        (FLOAT16, 65520 - 2**-8, 65504.0, 2**15 - 8),
        (FLOAT16, 65520, np.inf, -(2**15)),
        (FLOAT16, 65536, np.inf, 0),
        (FLOAT16, -np.inf, -np.inf, 0),
        (BFLOAT16, np.inf, np.inf, 0),
        (BFLOAT16, -np.inf, -np.inf, 0),
    ],
)
def test_the_remainder_counts_parts_of_the_last_place(dtype, master, param, remainder):
    assert split(master, dtype) == (param, remainder)
    expected = np.inf if dtype == FLOAT16 and master >= 2**16 else master
    assert join(param, remainder, dtype) == expected


def test_a_small_master_is_rounded_once():
    # Rounded to 2**-40 first, it would be a tie, and become zero.
    master = 2**-25 + 2**-48
    assert split(master, FLOAT16) == (2**-24, -(2**15))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_nan_stays_nan_whatever_its_payload_and_remainder(dtype):
    quiet, largest = np.array([0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    for master in (quiet, -quiet, largest, -largest):
        param, remainder = split(master, dtype)
        assert np.isnan(param)
        assert remainder == 0
    values = all_values(dtype)
    nans = jnp.asarray(values[np.isnan(values.astype(np.float32))])
    for remainder in (-(2**15), -1, 0, 1, 2**15 - 1):
        bits = np.full(nans.shape, remainder, np.int16).view(REMAINDERS[dtype])
        joined = join_master(nans, jnp.asarray(bits))
        assert jnp.isnan(joined).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_zero_takes_the_sign_of_its_master_from_the_remainder(dtype):
    for param in (0.0, -0.0):  # An update may have changed it.
        assert not np.signbit(join(param, 0, dtype))
        assert np.signbit(join(param, -(2**15), dtype))
        assert join(param, -(2**15), dtype) == 0
        assert join(param, -(2**15) + 5, dtype) == -join(param, 5, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_parameter_that_was_changed_elsewhere_has_a_master_that_rounds_to_it(dtype):
    params = np.repeat(all_values(dtype), 16)
    params = params[np.isfinite(params.astype(np.float32))]
    remainders = RNG.integers(-(2**15), 2**15, params.size).astype(np.int16)
    stored = jnp.asarray(remainders.view(REMAINDERS[dtype]))
    joined = np.asarray(join_master(jnp.asarray(params), stored))
    assert not np.isnan(joined).any()
    bits = params.view(np.uint16).astype(np.int64)
    with np.errstate(over="ignore"):
        rounded = joined.astype(dtype).view(np.uint16).astype(np.int64)
    is_zero = (bits | rounded) & 0x7FFF == 0
    # In float32 the remainder may become a tie, which rounds either way.
    is_tie = np.abs(remainders.astype(int)) > 2**15 - 8
    assert (np.abs(rounded - bits)[~is_zero] <= is_tie[~is_zero]).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_parameter_that_is_not_the_rounded_master_is_completed_to_itself(dtype):
    values = all_values(dtype)
    values = values[np.isfinite(values.astype(np.float32))]
    params, others = jnp.asarray(values), jnp.asarray(RNG.permutation(values))
    masters = others.astype(jnp.float32)
    joined = join_master(params, remainder_of(masters, params))
    is_other = np.asarray(params != others)
    expected = params.astype(jnp.float32)
    np.testing.assert_array_equal(joined[is_other], expected[is_other])


@pytest.mark.parametrize("dtype", HALVES)
def test_splitting_and_joining_need_no_cast_to_half_precision(dtype):
    def split_and_join(master):
        param = round_master(master, dtype)
        return join_master(param, remainder_of(master, param))

    program = jax.make_jaxpr(split_and_join)(jnp.float32(1.0))
    casts = {
        equation.outvars[0].aval.dtype
        for equation in equations_of(program)
        if equation.primitive.name == "convert_element_type"
    }
    assert not casts & set(HALVES)
