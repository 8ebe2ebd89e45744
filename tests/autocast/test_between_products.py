"""The gradient of what depends on the result of a low product is rounded as it was.

Each function returns a value that is a factor of one more product, and depends on `z`
by addition. All numbers are small integers, so the gradient of `z` is a sum that
float32 holds and float16 does not. It equals NumPy's if it was never in float16, and
NumPy's rounded to float16 if it was. Outside `jit` no compiler leaves out a cast.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.programs import equations_of
from helpers.under_autocast import (
    assert_close,
    integers,
    own_layer,
    own_tangent,
    products_of,
)

X, W, Z = integers(6, 4), integers(4, 4), integers(6, 4)
LAST, COTANGENT = integers(4, 64), integers(6, 64)
EXACT = np.asarray(COTANGENT) @ np.asarray(LAST).T
ROUNDED = EXACT.astype(np.float16).astype(np.float32)


def layers(h):
    return lax.scan(lambda h, w: (h @ w, None), h, jnp.stack([W, W]))[0]


def steps(h):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ W), (0, h))[1]


def branches(h):
    return lax.switch(jnp.int32(1), [lambda h: h @ W, lambda h: h], h)


AFTER_A_PRODUCT = {
    "a layer": lambda z: z + X @ W,
    "an activation function": lambda z: z + jax.nn.gelu(X @ W),
    "a stream past a layer": lambda z: (X + z) + X @ W,
    "a part of an array": lambda z: jnp.where(X > 0, z + X @ W, z),
    "jit": lambda z: jax.jit(lambda z: z + X @ W)(z),
    "checkpoint": lambda z: z + jax.checkpoint(lambda w: X @ w)(W),
    "a scan": lambda z: z + layers(X),
    "a loop": lambda z: z + steps(X),
    "one of two branches": lambda z: z + branches(X),
    "a rule for tangents": lambda z: z + own_tangent(W, X),
    "a rule for cotangents": lambda z: z + own_layer(W, X),
    "vmap": lambda z: z + jax.vmap(lambda x: x @ W)(X),
    "a convolution": lambda z: (
        z + lax.conv(X[None], jnp.ones((6, 6, 1)), (1,), "SAME")[0]
    ),
}
NOT_AFTER_A_PRODUCT = {
    "a parameter": lambda z: z,
    "a parameter with a norm": lambda z: z / jnp.linalg.norm(Z) * jnp.linalg.norm(Z),
    "a sum of inputs": lambda z: z + 2 * X,
    "a mask": lambda z: z * jnp.where(X @ W > 1e9, 0.0, 1.0),
    "no derivative": lambda z: z + lax.stop_gradient(X @ W),
    "full precision": lambda z: z + ols.full_precision(lambda: X @ W)(),
    "a precision": lambda z: z + jnp.dot(X, W, precision="highest"),
    "a row of a table that a product chooses": lambda z: z[
        jnp.argsort(jnp.argmax(X @ W, 1) + 10 * jnp.arange(6))
    ],
    "a loop without a product": lambda z: lax.fori_loop(0, 2, lambda i, h: h + X, z),
}


def gradient(fun, **settings):
    cast = ols.autocast(lambda z: fun(z) @ LAST, **settings)
    return np.asarray(jax.vjp(cast, Z)[1](COTANGENT)[0])


def test_float16_does_not_hold_the_sums():
    assert np.sum(EXACT != ROUNDED) >= 12


@pytest.mark.parametrize("name", AFTER_A_PRODUCT)
def test_after_a_product_a_gradient_is_rounded(name):
    np.testing.assert_array_equal(gradient(AFTER_A_PRODUCT[name]), ROUNDED)


@pytest.mark.parametrize("name", NOT_AFTER_A_PRODUCT)
def test_everywhere_else_a_gradient_is_a_float32_sum(name):
    fun = NOT_AFTER_A_PRODUCT[name]
    assert_close(gradient(fun), EXACT, 1e-6)


# --- Around it --------------------------------------------------------------------


def loss(params, x):
    """Two layers; the second product has its factors in the other order."""
    h = jax.nn.relu(x @ params["first"])
    return jnp.mean(jnp.einsum("ho,bh->bo", params["second"], h) ** 2)


PARAMS = {"first": W / 64, "second": integers(4, 64) / 64}
BATCHES = jnp.stack([X, 2 * X, -X])


def by_scan(grad):
    return lambda params, x: lax.scan(lambda _, x: (_, grad(params, x)), 0, x)[1]


def by_shard_map(grad):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P(None, "data")), "out_specs": P()}
    return jax.shard_map(lambda params, x: grad(params, x[0]), **specs)


def by_linearize(cast):
    def grad(params, x):
        value, linear = jax.linearize(lambda params: cast(params, x), params)
        return jax.linear_transpose(linear, params)(jnp.ones_like(value))[0]

    return grad


AROUND = {
    "nothing": lambda cast: jax.vmap(jax.grad(cast), (None, 0)),
    "jit": lambda cast: jax.vmap(jax.jit(jax.grad(jax.jit(cast))), (None, 0)),
    "checkpoint": lambda cast: jax.vmap(jax.grad(jax.checkpoint(cast)), (None, 0)),
    "a scan": lambda cast: by_scan(jax.grad(cast)),
    "vmap inside": lambda cast: jax.grad(
        lambda p, x: jnp.sum(jax.vmap(cast, (None, 0))(p, x))
    ),
    "vmap over parameters": lambda cast: (
        lambda p, x: jax.vmap(jax.grad(cast), (0, None))(
            jax.tree.map(lambda w: jnp.stack([w, -w]), p), x[0]
        )
    ),
    "vmap over everything": lambda cast: (
        lambda p, x: jax.vmap(jax.grad(cast))(
            jax.tree.map(lambda w: jnp.stack([w, -w, w]), p), x
        )
    ),
    "linearize": lambda cast: jax.vmap(by_linearize(cast), (None, 0)),
    "vjp": lambda cast: lambda p, x: jax.vjp(lambda p: cast(p, x[0]), p)[1](1.0)[0],
    "shard_map": lambda cast: by_shard_map(jax.grad(cast)),
    "pmap": lambda cast: jax.pmap(jax.grad(cast), in_axes=(None, 0)),
}


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize("name", AROUND)
def test_around_it_every_transformation_of_jax_works(name):
    around = AROUND[name]
    grad = around(ols.autocast(loss))
    assert_close(grad(PARAMS, BATCHES), around(loss)(PARAMS, BATCHES))
    results = [each.outvars[0].aval for each in products_of(grad, PARAMS, BATCHES)]
    # The gradients of the two parameters, and no other results, are float32.
    wide = {"float32": 0, "float16": 0}
    for result in results:
        wide[result.dtype.name] += 1
    assert wide == {"float32": 2, "float16": 5 if name == "checkpoint" else 3}


@pytest.mark.slow
def test_a_derivative_of_any_order_is_right():
    """Of a sum of squares of products, whose derivatives a polynomial has exactly."""
    x, w = integers(3, 2, largest=3), integers(2, 2, largest=3)

    def fun(t):
        return jnp.sum(((x + t) @ w @ w) ** 2)

    second = jax.hessian(fun)
    for by in (
        jax.hessian,
        lambda f: jax.jacrev(jax.jacrev(f)),
        lambda f: jax.jacrev(jax.jacfwd(f)),
        lambda f: jax.jacfwd(jax.jacfwd(f)),
    ):
        np.testing.assert_array_equal(by(ols.autocast(fun))(1.0), second(1.0))


# --- In a loop --------------------------------------------------------------------


def recurrent(w, x):
    return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(x + h @ (2 * w)), None), x[0], x)[0])


def casts_of(program):
    """The shapes that are cast to float16 in the bodies of scans."""
    scans = [each for each in program.eqns if each.primitive.name == "scan"]
    return [
        each.invars[0].aval.shape
        for scan in scans
        for each in equations_of(scan.params["jaxpr"])
        if each.params.get("new_dtype") == jnp.float16
    ]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_the_low_copy_of_a_constant_weight_is_made_before_the_loop(recompute):
    x = integers(8, 6, 4) / 64
    cast = ols.autocast(recurrent, recompute=recompute)
    program = jax.make_jaxpr(jax.grad(cast))(W / 64, x)
    assert (6, 4) in casts_of(program.jaxpr)
    assert (4, 4) not in casts_of(program.jaxpr)
    assert_close(jax.grad(cast)(W / 64, x), jax.grad(recurrent)(W / 64, x))


def test_the_low_copy_of_a_carried_weight_is_made_in_each_iteration():
    def learned(w, x):
        return lax.scan(lambda w, x: (w + x.T @ jnp.tanh(x @ w), None), w, x)[0].sum()

    program = jax.make_jaxpr(jax.grad(ols.autocast(learned)))(W / 64, X[:, None])
    assert (4, 4) in casts_of(program.jaxpr)
