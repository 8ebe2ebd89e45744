"""Where JAX's own error says it best, ours is the same."""

import re

import jax
import jax.numpy as jnp
import pytest

import optax_lossscale as ols

STATE = ols.dynamic_loss_scale().init()
X = jnp.ones((5, 4))
LOSSES = {
    "a vector": lambda w: X @ w,
    "one entry with axes": lambda w: jnp.sum(X @ w, keepdims=True),
    "nothing": lambda w: None,
    "an integer": lambda w: jnp.sum(X @ w).astype(jnp.int32),
    "complex": lambda w: jnp.sum(X @ w).astype(jnp.complex64),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("take", [ols.scaled_value_and_grad, ols.scaled_grad])
def test_a_loss_that_is_no_real_scalar_is_refused_in_the_words_of_jax(take, name):
    w = jnp.ones((4, 3))
    with pytest.raises(TypeError, match=r"scalar|real-valued") as expected:
        jax.grad(LOSSES[name])(w)
    with pytest.raises(TypeError, match=re.escape(str(expected.value))):
        take(LOSSES[name], STATE)(w)
