"""Splits every float32 number into a half-precision parameter and its remainder.

    python tests/tools/every_master.py

All `2**32` patterns of bits are split and joined again, for bfloat16 and for float16.
NumPy says what the parameters must be. The script prints how many parameters are not
what a cast gives, which are ties in bfloat16, and how many masters do not come back bit
for bit. In float16 those are all smaller than 2**-16, or 2**16 and larger.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from optax_lossscale._masters.remainders import join_master, remainder_of, round_master

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
CHUNK = 2**24


@partial(jax.jit, static_argnames="dtype")
def split_and_join(bits: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of the parameters, and those of the joined masters."""
    masters = jax.lax.bitcast_convert_type(bits, jnp.float32)
    params = round_master(masters, dtype)
    joined = join_master(params, remainder_of(masters, params))
    as_bits = jax.lax.bitcast_convert_type
    return as_bits(params, jnp.uint16), as_bits(joined, jnp.uint32)


def expected_params(masters: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the nearest parameters; bfloat16 ties go away from zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        params = masters.astype(dtype)
    if dtype == BFLOAT16:
        bits = masters.view(np.uint32)
        upper = (bits >> 16).astype(np.uint16)
        is_tie = (bits & 0xFFFF == 0x8000) & ~np.isnan(masters)
        params = np.where(is_tie, upper + np.uint16(1), params.view(np.uint16))
        params = params.view(dtype)
    return params


def check(bits: np.ndarray, dtype: np.dtype) -> tuple[int, int]:
    """Splits the float32 numbers of these bits, and joins them again.

    Returns:
      The number of parameters that are not what a cast gives, and of masters that do
      not come back bit for bit. A NaN that comes back as a NaN does not count.
    """
    masters = bits.view(np.float32)
    params, joined = map(np.asarray, split_and_join(bits, dtype))
    is_nan, back = np.isnan(masters), joined.view(np.float32)
    expected = expected_params(masters, dtype)
    assert (np.isnan(params.view(dtype)) == is_nan).all()
    assert (params == expected.view(np.uint16))[~is_nan].all()
    assert (np.isnan(back) == is_nan).all()
    is_same = (joined == bits) | is_nan
    if dtype == BFLOAT16:
        assert is_same.all()
    else:
        magnitude = np.abs(masters)
        is_small, is_large = magnitude < 2.0**-16, magnitude >= 2.0**16
        assert is_same[~is_small & ~is_large].all()
        error = back[is_small].astype(np.float64) - masters[is_small]
        assert (np.abs(error) <= 2.0**-40).all()
        assert (np.signbit(back) == np.signbit(masters))[~is_nan].all()
        assert np.isinf(back[is_large]).all()
    with np.errstate(over="ignore", invalid="ignore"):
        cast = masters.astype(dtype).view(np.uint16)
    differ = (params != cast) & ~is_nan
    return int(differ.sum()), int((~is_same).sum())


def main() -> None:
    """Checks all patterns, and prints the counts."""
    for dtype in (BFLOAT16, FLOAT16):
        counts = np.zeros(2, int)
        for start in range(0, 2**32, CHUNK):
            bits = np.arange(start, start + CHUNK, dtype=np.uint64).astype(np.uint32)
            counts += check(bits, dtype)
        print(
            f"{dtype}: {counts[0]} parameters are not what a cast gives, "
            f"{counts[1]} masters do not come back bit for bit"
        )


if __name__ == "__main__":
    main()
