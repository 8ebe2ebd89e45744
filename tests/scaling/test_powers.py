"""The power of a scale that a value is proportional to, found by reading its program.

The right one is measured: by how much the value grows if the scale is doubled.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lossscale._programs.follow import follow
from optax_lossscale._programs.powers import (
    CONSTANT,
    UNLIKE,
    ZERO,
    PowersRule,
    first_power,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
X = jnp.array([[1.0, 2.0], [-3.0, 4.0]])


def known_power(fun):
    """The power that is found for the result of a function of a scale."""
    program = jax.make_jaxpr(fun)(jnp.float32(4.0))
    (fact,) = follow(program, [first_power("s")], PowersRule())
    return "zero" if fact.is_zero else dict(fact.of).get("s", "none")


def measured_power(fun):
    """The power that all entries of the result follow; None if there is none."""
    one, two, four = (np.asarray(fun(jnp.float32(s))) for s in (1.0, 2.0, 4.0))
    if not np.any(one) and not np.any(two):
        return "zero"
    one, two, four = (each[one != 0] for each in (one, two, four))
    ratios = np.log2(np.abs(np.stack([two / one, four / two])))
    power = float(np.round(ratios.flat[0], 2))
    return power if np.allclose(ratios, power, atol=1e-3) else None


def loop(s):
    return jax.lax.scan(lambda c, x: (c + s * x.sum(), x * s), s * 0.5, X)[0]


def product_over_loop(s):
    return jax.lax.scan(lambda c, x: (c * s, x), 1.0, X)[0]


POWERS = {
    "product": lambda s: X * s,
    "quotient": lambda s: X / s,
    "cancelled": lambda s: (X * s) / s,
    "matrix product": lambda s: (X * s) @ (X * s),
    "einsum of one": lambda s: jnp.einsum("ij,kj->ik", X, X * s),
    "sum": lambda s: (X * s + s).sum(),
    "difference of zero": lambda s: 0.0 - X * s,
    "square": lambda s: jnp.square(X * s),
    "cube": lambda s: (X * s) ** 3,
    "root": lambda s: jnp.sqrt(jnp.abs(X) * s),
    "inverse root": lambda s: jax.lax.rsqrt(s),
    "norm": lambda s: jnp.linalg.norm(X * s),
    "normalized": lambda s: X * s / jnp.max(jnp.abs(X * s)),
    "sign": lambda s: jnp.sign(X * s),
    "choice": lambda s: jnp.where(X > 0, X * s, 0.0),
    "choice by the scale": lambda s: jnp.where(s > 1e9, X, X) * s,
    "padded": lambda s: jnp.pad(s * X, 1).sum(),
    "gathered": lambda s: (s * X)[jnp.array([0, 1]), jnp.array([1, 1])],
    "scattered": lambda s: jnp.zeros(2).at[jnp.array([0, 1])].add(s * X[0]),
    "sorted": lambda s: jnp.concatenate([s * X, X * s]).T,
    "cast": lambda s: (X * s).astype(jnp.float16).astype(jnp.float32),
    "loop": loop,
    "branch": lambda s: jax.lax.cond(s > 0, lambda s: s * 2, lambda s: s * 3, s),
    "checkpoint": lambda s: jax.checkpoint(lambda s: s * X)(s),
    "jitted, unused": lambda s: jax.jit(lambda x, s: x * 2)(X, s),
    "gradient": lambda s: jax.grad(lambda x: s * jnp.tanh(x).sum())(X),
    "gradient of a softmax": lambda s: jax.grad(
        lambda x: s * jax.nn.softmax(x)[0, 0] + s * jax.nn.relu(x).mean()
    )(X),
    "solved": lambda s: jax.scipy.linalg.solve_triangular(X, s * X[0], lower=True),
    "complex": lambda s: jnp.abs(jax.lax.complex(s * X, -s * X)),
    "zero": lambda s: 0.0 * s * X,
}


@pytest.mark.parametrize("name", POWERS)
def test_the_power_is_the_measured_one(name):
    fun = POWERS[name]
    known = known_power(fun)
    assert known is not None
    assert (0 if known == "none" else known) == measured_power(fun)


SUMS_OF_UNLIKE_POWERS = {
    "mixed sum": lambda s: X * s + X,
    "a constant and no power": lambda s: X - jnp.exp(s),
    "of the sum": lambda s: 2.0 * s * jnp.square(X * s - 3.0 * X),
    "an array": lambda s: jnp.concatenate([X, X * s]),
}
IN_DOUBT = {
    "sums that cancel": lambda s: s * (s + 1.0) / (1.0 + s),
    "a power of two": lambda s: jnp.exp2(s + 15.0),
    "one of two": lambda s: jnp.where(X > 0, X * s, X),
    "as many factors as iterations": lambda s: jax.lax.scan(
        lambda c, x: (c * s, x), 1.0, X
    )[0],
    "mixed branch": lambda s: jax.lax.cond(s > 3, lambda s: s, lambda s: s * s, s),
    "clipped": lambda s: jnp.clip(X * s, -4.0, 4.0),
    "exponential": lambda s: jnp.exp(s),
    "rounded": lambda s: jnp.round(s * 0.3),
    "through integers": lambda s: (s * 3.5).astype(jnp.int32).astype(jnp.float32),
}


@pytest.mark.parametrize("name", SUMS_OF_UNLIKE_POWERS)
def test_a_sum_of_unlike_powers_is_none(name):
    assert known_power(SUMS_OF_UNLIKE_POWERS[name]) == UNLIKE
    assert measured_power(SUMS_OF_UNLIKE_POWERS[name]) is None


@pytest.mark.parametrize("name", IN_DOUBT)
def test_a_value_that_may_follow_a_power_is_in_doubt(name):
    assert known_power(IN_DOUBT[name]) is None


def test_of_several_scales_each_has_its_own_power():
    program = jax.make_jaxpr(lambda s, t: X * s / t + t * s * X / t**2)(4.0, 2.0)
    facts = [first_power("s"), first_power("t")]
    (fact,) = follow(program, facts, PowersRule())
    assert dict(fact.of) == {"s": 1, "t": -1}


def test_zero_is_proportional_to_every_power():
    rule = PowersRule()
    assert rule.join(ZERO, first_power("s")) == first_power("s")
    assert rule.join(CONSTANT, first_power("s")) != first_power("s")


def test_constants_of_every_kind_can_be_in_a_program():
    key, table = jax.random.key(0), jnp.arange(2)

    def fun(s):
        noise = jax.random.normal(key, (2,))
        return s * (noise + table + 0j).real

    assert known_power(fun) == 1
