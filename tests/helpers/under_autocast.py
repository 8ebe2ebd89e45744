"""Small programs, and checks of what autocast makes of them."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import optax_lossscale as ols
from helpers.programs import equations_of

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32)


def integers(*shape, largest=60):
    """Numbers that float16 holds; it does not hold the sums of their products."""
    numbers = np.random.default_rng(shape).integers(-largest, largest + 1, shape)
    return jnp.asarray(numbers, jnp.float32)


def dot_loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def with_scan(w, x):
    def body(carry, row):
        carry = jnp.tanh(row @ w + carry @ w)
        return carry, jnp.sum(carry)

    carry, sums = jax.lax.scan(body, jnp.zeros(4), x)
    return jnp.mean(carry**2) + jnp.mean(sums)


@jax.custom_vjp
def own_layer(w, x):
    return x @ w


own_layer.defvjp(
    lambda w, x: (own_layer(w, x), (w, x)),
    lambda saved, ct: (saved[1].T @ ct, ct @ saved[0].T),
)


@jax.custom_jvp
def own_tangent(w, x):
    return x @ w


own_tangent.defjvp(lambda p, t: (p[1] @ p[0], t[1] @ p[0] + p[1] @ t[0]))


def with_branches(w, x):
    y = lax.cond(x[0, 0] > 9, lambda: x * 2, lambda: x @ w)
    return lax.switch(jnp.int32(1), [jnp.sin, lambda y: y @ w], y)


PROGRAMS = {
    "jit": jax.jit(lambda w, x: x @ w),
    "checkpoint": jax.checkpoint(lambda w, x: x @ w),
    "a scan": with_scan,
    "branches": with_branches,
    "a rule for tangents": own_tangent,
    "a rule for cotangents": own_layer,
    "vmap": jax.vmap(own_tangent, (None, 0)),
    "a gradient": jax.grad(dot_loss),
    "linearize": lambda w, x: jax.linearize(lambda w: dot_loss(w, x), w)[1](w),
    "an associative scan": lambda w, x: lax.associative_scan(
        jnp.matmul, jnp.stack([w, w, w])
    ),
}


def products_of(fun, *args):
    """The products of a traced function, low or not, at every depth."""
    names = {"low_product", *PRODUCTS}
    program = jax.make_jaxpr(fun)(*args)
    return [e for e in equations_of(program) if e.primitive.name in names]


def dtypes_of(fun, *args):
    """The dtype in which each product of a traced function multiplies."""
    return [_dtype_of(equation) for equation in products_of(fun, *args)]


def _dtype_of(equation):
    product = equation.params.get("product")
    dtypes = [product.low] if product else [x.aval.dtype for x in equation.invars[:2]]
    return " * ".join(dict.fromkeys(map(str, dtypes)))


def assert_close(actual, expected, rtol=1e-2):
    """Values agree up to the rounding of float16; dtypes agree exactly."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(e), initial=0.0)) or 1.0
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * scale)


def assert_autocast(fun, *args, grad=True):
    """Every product is in float16, forward and backward, and the values are right."""
    cast = ols.autocast(fun)
    if grad:
        scaled = jax.grad(lambda *args: cast(*args) * 2.0**8)
        grads = jax.tree.map(lambda g: g / 2.0**8, jax.jit(scaled)(*args))
        assert_close(grads, jax.jit(jax.grad(fun))(*args))
        assert set(dtypes_of(scaled, *args)) == {"float16"}
    expected = jax.jit(fun)(*args)
    assert_close(cast(*args), expected)
    assert_close(jax.jit(cast)(*args), expected)
    assert set(dtypes_of(cast, *args)) == {"float16"}


def gradients(fun, *args, cotangent):
    return jax.vjp(fun, *args)[1](cotangent)


def assert_exact(fun, *args, wrap=ols.autocast, run=gradients):
    """All gradients are those of float32, and float16 could not hold them."""
    with jax.numpy_dtype_promotion("standard"):
        cotangent = integers(*jax.eval_shape(fun, *args).shape)
        actual, expected = (
            jax.jit(lambda *args, fun=fun: run(fun, *args, cotangent=cotangent))(*args)
            for fun in (wrap(fun), fun)
        )
    actual, expected = (jax.tree.map(np.asarray, x) for x in (actual, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(actual, expected)
    with np.errstate(over="ignore"):
        rounded = jax.tree.map(lambda e: e.astype(np.float16).astype(e.dtype), expected)
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (rounded, expected))))


def reports(capsys, fun, *args, **kwargs):
    """The cells of each row of the report, by title."""
    ols.autocast_report(fun, *args, **kwargs)
    titles, *rows, last = capsys.readouterr().out.splitlines()
    assert last == "Everything else runs as it is written."
    names = titles.split()
    # A title begins where its column does; only `times` is aligned to the right.
    places = itertools.pairwise([0, *map(titles.index, names[1:]), None])
    columns = dict(zip(names, places, strict=True))
    return [{k: row[i:j].strip() for k, (i, j) in columns.items()} for row in rows]
