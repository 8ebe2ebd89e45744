"""Results and derivatives under autocast have the dtypes and weak types of plain JAX.

A weakly typed array, such as `jnp.full(shape, 0.1)`, takes the dtype of what it meets.
If a gradient were one by mistake, its product with a float16 array would be float16.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import optax_lossscale as ols


def strong(*shape):
    return jnp.ones(shape)


def weak(*shape):
    array = jnp.full(shape, 0.1)
    assert array.weak_type
    return array


# In each product one factor depends on `x`, which is strongly typed. Between two weakly
# typed factors also a gradient can be weakly typed, and `jax.checkpoint`, which loops
# run under, changes in plain JAX too which are.
def matmul(w, v, x):
    return jnp.tanh(x @ w) @ v


def einsum(w, v, x):
    return jnp.einsum("ij,jk,kl->il", x, w, v) ** 2


def convolution(w, v, x):
    y = lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME")
    return jnp.sum(y[0, 0] ** 2, axis=1) * jnp.sum(v)


def of_vectors(w, v, x):
    return jax.vmap(lambda row: jnp.tanh(row @ w) @ v)(x)


def loop(w, v, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w @ w.T), None), x, length=2)[0] @ w @ v


def loop_over_rows(w, v, x):
    return lax.scan(lambda c, row: (c + jnp.sum(row @ w @ v), row @ w), 0.0, x)[1] ** 2


def branches(w, v, x):
    return lax.cond(x[0, 0] > 0, lambda: x @ w @ v, lambda: (x @ w) @ (2 * v)) ** 2


def checkpointed(w, v, x):
    return jax.checkpoint(matmul)(w, v, x) ** 2


def jitted(w, v, x):
    return jax.jit(matmul)(w, v, x) ** 2


def total(fun):
    return lambda *args: sum(map(jnp.sum, jax.tree.leaves(fun(*args))))


ALL = (0, 1, 2)
TRANSFORMATIONS = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(total(f), ALL),
    "vmap of grad": lambda f: jax.vmap(
        jax.grad(total(lambda w, v, row: f(w, v, row[None])), ALL), (None, None, 0)
    ),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "jacrev": lambda f: jax.jacrev(f, ALL),
    "hessian": lambda f: jax.hessian(total(f), ALL),
    "grad of grad": lambda f: jax.grad(total(jax.grad(total(f), ALL)), ALL),
    "grad of jitted grad": lambda f: jax.grad(
        total(jax.jit(jax.grad(total(f), ALL))), ALL
    ),
}


def kinds(fun, *args):
    results = jax.tree.leaves(jax.eval_shape(fun, *args))
    return [(x.shape, x.dtype, x.weak_type) for x in results]


@pytest.mark.parametrize("makers", [(weak, strong), (strong, weak), (weak, weak)])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize(
    "fun",
    [
        *(matmul, einsum, convolution, of_vectors, loop, loop_over_rows, branches),
        *(checkpointed, jitted),
    ],
)
def test_weak_types_are_those_of_plain_jax(fun, name, makers):
    transform, (of_w, of_v) = TRANSFORMATIONS[name], makers
    args = of_w(4, 3), of_v(3, 2), strong(5, 4)
    expected = kinds(transform(fun), *args)
    assert kinds(transform(ols.autocast(fun)), *args) == expected


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_second_derivative_times_a_half_is_float32(dtype):
    w, x = weak(4, 3), strong(5, 4)

    def second(fun):
        return jax.grad(lambda w: jax.grad(fun)(w).sum())(w)

    def fun(w):
        return jnp.sum((x @ w) ** 2)

    half = jnp.ones((4, 3), dtype)
    with jax.numpy_dtype_promotion("standard"):
        products = [second(f) * half for f in (fun, ols.autocast(fun))]
    assert [x.dtype for x in products] == [jnp.float32] * 2
