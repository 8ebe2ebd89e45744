"""`full_precision` leaves all of a function alone, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import optax_lossscale as ols
from helpers.programs import dtypes_of
from helpers.under_autocast import HALF, W, X, own_layer

FULL = ("float32", "float32")


def product(x):
    return x @ W


@jax.custom_jvp
def own_product(x):
    return x @ W


own_product.defjvp(lambda primals, tangents: (primals[0] @ W, tangents[0] @ W))

HOLDING_PROGRAMS = {
    "jit": jax.jit(product),
    "checkpoint": jax.checkpoint(product),
    "scan": lambda x: lax.scan(lambda c, _: (c @ W, None), x, length=2)[0],
    "while": lambda x: lax.while_loop(lambda x: x[0, 0] > 9, product, x),
    "cond": lambda x: lax.cond(x[0, 0] > 9, product, lambda x: 2 * (x @ W), x),
    "custom_jvp": own_product,
    "custom_vjp": functools.partial(own_layer, W),
    "jit of scan": jax.jit(lambda x: lax.map(lambda row: row @ W, x)),
}


@pytest.mark.parametrize("name", HOLDING_PROGRAMS)
def test_the_programs_inside_a_function_are_left_alone_too(name):
    fun = ols.full_precision(HOLDING_PROGRAMS[name])
    cast = ols.autocast(fun)
    assert set(dtypes_of(cast, X)) == {FULL}
    inside = ols.autocast(lambda x: jax.jit(jax.checkpoint(fun))(x))
    assert set(dtypes_of(inside, X)) == {FULL}
    if name != "while":  # It has no reverse mode.
        grad = jax.grad(lambda x: jnp.sum(fun(x)))
        assert set(dtypes_of(ols.autocast(grad), X)) == {FULL}
        assert set(dtypes_of(jax.grad(lambda x: jnp.sum(cast(x))), X)) == {FULL}


class Layer:
    def __call__(self, x):
        return x @ W

    def method(self, x):
        return x @ W


class NnxLayer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(W)

    def __call__(self, x):
        return x @ self.w[...]


@pytest.mark.parametrize(
    "fun", [functools.partial(jnp.matmul, X.T), Layer(), Layer().method, NnxLayer()]
)
def test_any_callable_object_can_be_marked(fun):
    assert dtypes_of(ols.autocast(ols.full_precision(fun)), X) == [FULL]
    assert dtypes_of(ols.autocast(fun), X) == [HALF]


@pytest.mark.parametrize("name", ["full_precision_head", "full_precision", "head"])
def test_a_name_that_merely_reads_like_the_mark_is_not_one(name):
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ W

    head = Head(name=name)
    assert dtypes_of(ols.autocast(lambda x: head.apply({}, x)), X) == [HALF]
    scoped = jax.named_scope(name)(product)
    assert dtypes_of(ols.autocast(scoped), X) == [HALF]


def test_full_precision_refuses_what_is_not_a_function():
    with pytest.raises(TypeError, match="`fun` must be a function, got None"):
        ols.full_precision(None)
