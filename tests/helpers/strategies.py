"""Strategies for the property tests."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from hypothesis import strategies as st

from helpers.compat import enable_x64

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

DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float64, jnp.complex64]
SHAPES = [(), (3, 3), (0,)]


@st.composite
def similar_trees(draw, count, max_leaves=2):
    """Finite trees of one kind, such as parameters and their gradients in some steps.

    Leaves are arrays of NumPy, of which at least one is not empty, and None. Numbers
    are multiples of 1/8, so that every dtype holds them.
    """
    kinds = st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES))
    leaves = draw(st.lists(kinds, min_size=1, max_size=max_leaves))
    rng = np.random.default_rng(draw(st.integers(0, 999)))

    def array(shape, dtype):
        unit = 1j if dtype == jnp.complex64 else 1
        eighths = rng.integers(-15, 16, (*shape, 2)) @ np.asarray([1, unit])
        return np.asarray(eighths / 8, dtype)

    return [
        {"a": array((), leaves[0][1]), "b": [array(*x) for x in leaves], "c": None}
        for _ in range(count)
    ]


def x64_for(tree):
    """The mode of JAX in which the arrays of a tree keep their dtypes."""
    return enable_x64(any(leaf.dtype == np.float64 for leaf in jax.tree.leaves(tree)))


def poisoned(tree, seed, value):
    """The tree with another number in one place."""
    leaves, structure = jax.tree.flatten(jax.tree.map(np.copy, tree))
    full = [leaf for leaf in leaves if leaf.size]
    leaf = full[seed % len(full)]
    parts = leaf.reshape(-1).view(leaf.real.dtype)  # Of complex numbers both.
    parts[seed % parts.size] = value
    return jax.tree.unflatten(structure, leaves)


_rates = st.sampled_from([0.5, optax.linear_schedule(0.5, 0.25, 2)])
_makers = st.sampled_from(
    [
        functools.partial(optax.sgd, momentum=0.5),
        optax.adam,
        optax.adan,
        optax.lion,
        optax.optimistic_gradient_descent,
    ]
)
# Its state is computed from updates, as masters are, and holds them too.
_FOLLOW = optax.GradientTransformation(
    lambda params: 2 * (optax.tree.zeros_like(params),),
    lambda updates, old, params: (updates, (optax.tree.add(old[0], updates), updates)),
)
_wrappers = st.sampled_from(
    [
        lambda inner: inner,
        lambda inner: optax.chain(optax.ema(0.5), inner),
        lambda inner: optax.chain(inner, optax.ema(0.5, debias=False)),
        lambda inner: optax.chain(inner, _FOLLOW),
        # It accumulates no complex numbers.
        lambda inner: optax.contrib.split_real_and_imaginary(
            optax.MultiSteps(inner, 2).gradient_transformation()
        ),
    ]
)
optimizers = st.builds(
    lambda wrap, make, rate: wrap(make(rate)), _wrappers, _makers, _rates
)
