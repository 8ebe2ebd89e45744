"""What the tests of other systems share."""

import pytest

from helpers import inner


@pytest.fixture
def standard_promotion():
    """Users have JAX's standard promotion, which Optax and other libraries need."""
    with inner.standard_promotion():
        yield
