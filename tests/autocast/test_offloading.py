"""Policies of `jax.checkpoint` that send products to the host, under autocast.

In reverse mode over reverse mode JAX itself refuses some of these programs, because it
"Expected cotangent type float32[3,4] but got float32<host>[3,4]". Under autocast these
are the same programs, and the message names the low dtype.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import optax_lossscale as ols
from helpers.under_autocast import assert_close

POLICIES = jax.checkpoint_policies
OFFLOAD = {
    "dots": POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "names": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["saved"],
        names_which_can_be_offloaded=["sent"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
W = jax.random.normal(jax.random.key(0), (4, 4)) / 4
X = jax.random.normal(jax.random.key(1), (3, 4))


def block(w, x):
    h = checkpoint_name(jax.nn.silu(x @ w), "sent")
    return jnp.tanh(checkpoint_name(h @ w, "saved"))


def alone(w, x, checkpoint):
    return jnp.sum(checkpoint(block)(w, x) ** 2)


def over_layers(w, x, checkpoint):
    layers = jnp.stack([w, w.T])

    def layer(x, w):
        return checkpoint(block)(w, x), None

    return jnp.sum(lax.scan(layer, x, layers)[0] ** 2)


def around_a_loop(w, x, checkpoint):
    def loop(w, x):
        return lax.fori_loop(0, 2, lambda _, x: block(w, x), x)

    return jnp.sum(checkpoint(loop)(w, x) ** 2)


def of_rows(w, x, checkpoint):
    rows = jax.vmap(lambda row: checkpoint(block)(w, row[None])[0])
    return jnp.sum(rows(x) ** 2)


def jitted(w, x, checkpoint):
    return jnp.sum(checkpoint(jax.jit(block))(w, x) ** 2)


def variants(fun, policy):
    """The function in plain JAX, then with autocast around and inside checkpoints."""

    def program(w, x):
        return fun(w, x, functools.partial(jax.checkpoint, policy=policy))

    def low_inside(w, x):
        return fun(w, x, lambda f: jax.checkpoint(ols.autocast(f), policy=policy))

    return program, ols.autocast(program), low_inside


PROGRAMS = [alone, over_layers, around_a_loop, of_rows, jitted]
of_all = pytest.mark.parametrize(
    ("fun", "policy"),
    [*itertools.product(PROGRAMS, OFFLOAD)],
)


@of_all
def test_gradients_of_a_program_that_offloads_are_those_of_plain_jax(fun, policy):
    plain, *casts = variants(fun, OFFLOAD[policy])
    expected = jax.jit(jax.grad(plain, (0, 1)))(W, X)
    for cast in casts:
        assert_close(jax.jit(jax.grad(cast, (0, 1)))(W, X), expected)


def outcome_of(derivative, fun):
    """The shapes of the results, or the error, in which a low dtype reads float32."""
    try:
        return [x.shape for x in jax.tree.leaves(jax.eval_shape(derivative(fun), W, X))]
    except (ValueError, AssertionError) as error:  # The second in JAX 0.7.
        return str(error).replace("float16", "float32")


@of_all
@pytest.mark.parametrize("second", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_raise_only_where_plain_jax_raises(fun, policy, second):
    def derivative(fun):
        return second(jax.grad(fun))

    plain, *casts = variants(fun, OFFLOAD[policy])
    expected = outcome_of(derivative, plain)
    assert [outcome_of(derivative, cast) for cast in casts] == [expected] * 2
