"""Inner optimizers for the tests."""

import contextlib

import jax
import optax


@contextlib.contextmanager
def standard_promotion():
    """Gives JAX's standard promotion, which users have and other libraries need."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def lenient(tx):
    """An optimizer that runs under JAX's standard promotion, which Optax needs."""
    tx = optax.with_extra_args_support(tx)

    def init(params):
        with standard_promotion():
            return tx.init(params)

    def update(grads, state, params=None, **extra_args):
        with standard_promotion():
            return tx.update(grads, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def adam(learning_rate=0.1):
    return lenient(optax.adam(learning_rate))
