"""Values of each floating dtype: every one of 8 or 16 bits, and many of float32."""

import ml_dtypes
import numpy as np

SMALL = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]


def all_values(dtype):
    """Every value of a dtype of 8 or 16 bits, NaN with every payload."""
    unsigned = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
    return np.arange(np.iinfo(unsigned).max + 1, dtype=unsigned).view(dtype)


def float32_values():
    """Random bits, subnormal numbers, and special values."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    subnormal = np.arange(2**12, dtype=np.uint32)
    edges = np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-126, 2.0**-149], "f4")
    values = [bits.view("f4"), subnormal.view("f4"), -subnormal.view("f4"), edges]
    return np.concatenate(values)


def as_float64(values):
    with np.errstate(invalid="ignore"):  # For signalling NaNs.
        return values.astype(np.float64)


def values_of(dtype):
    return float32_values() if dtype == "float32" else all_values(dtype)


DTYPES = ["float32", np.float16, ml_dtypes.bfloat16]
DTYPES += [getattr(ml_dtypes, name) for name in SMALL]
