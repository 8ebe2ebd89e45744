"""Strategies for the property tests."""

import functools

import optax
import optax.contrib
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

# Can be multiplied and divided by 2**24 without leaving the normal range.
exact_float32 = st.floats(
    width=32, min_value=2.0**-100, max_value=2.0**100
) | st.sampled_from([0.0, -0.0, 1.0, -3.0])

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
