"""Strategies for the property tests."""

import math

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

HISTORY_LENGTH = 40  # Fixed, so that a scan over it compiles once for each rule.

powers_of_two = st.integers(-24, 24).map(lambda exponent: 2.0**exponent)

histories = st.lists(
    st.booleans(), min_size=HISTORY_LENGTH, max_size=HISTORY_LENGTH
) | st.lists(
    st.integers(0, 9).map(lambda draw: draw > 0),  # Mostly finite, as in training.
    min_size=HISTORY_LENGTH,
    max_size=HISTORY_LENGTH,
)

bounds = st.tuples(powers_of_two, powers_of_two).map(sorted)


@st.composite
def dynamic_settings(draw):
    """Legal settings of `dynamic_loss_scale`; `init_scale` may be out of bounds."""
    low, high = draw(bounds)
    return {
        "init_scale": draw(powers_of_two),
        "growth_factor": draw(st.sampled_from([2.0, 4.0, 1.5, 1.1, 1e30])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.25, 0.7, 0.9, 1e-30])),
        "growth_interval": draw(st.integers(1, 6)),
        "min_scale": low,
        "max_scale": high,
        "hysteresis": draw(st.integers(1, 4)),
        "hysteresis_refill": draw(st.sampled_from(["finite", "growth"])),
    }


# Can be multiplied and divided by 2**24 without leaving the normal range.
exact_float32 = st.floats(
    width=32, min_value=2.0**-100, max_value=2.0**100
) | st.sampled_from([0.0, -0.0, 1.0, -3.0])

float16_arrays = st.lists(
    st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=8
).map(lambda values: jnp.asarray(np.asarray(values, np.float16)))

nonfinite = st.sampled_from([math.nan, math.inf, -math.inf])

float_dtypes = st.sampled_from(
    [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64]
)


@st.composite
def trees(draw):
    """Trees of finite arrays of several dtypes, of which at least one is not empty."""
    leaves = draw(
        st.lists(st.tuples(float_dtypes, st.integers(0, 5)), min_size=1, max_size=5)
    )
    tree = [jnp.ones((size,), dtype) for dtype, size in leaves]
    tree.append(jnp.ones((draw(st.integers(1, 5)),), draw(float_dtypes)))
    return {"floats": tree, "none": None, "ints": jnp.arange(3), "nested": (tree[0],)}
