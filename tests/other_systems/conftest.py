"""What the tests of other systems share."""

import jax
import pytest


@pytest.fixture
def standard_promotion():
    """Users have JAX's standard promotion, which Optax and other libraries need."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
