"""Small programs, and checks of what autocast makes of them."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import optax_lossscale as ols
from optax_lossscale._autocast.programs import equations_of

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")
W, X = (
    jnp.asarray(np.random.default_rng(n).normal(size=(n, 4)), jnp.float32)
    for n in (4, 3)
)


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
    y = lax.cond(x[0, 0] > 9, lambda: x * 2, lambda: own_tangent(w, x))
    return lax.switch(jnp.int32(1), [jnp.sin, lambda y: y @ w], y)


PROGRAMS = {
    "branches": with_branches,
    "jit": jax.jit(lambda w, x: x @ w),
    "a scan": with_scan,
    "vmap": jax.vmap(own_tangent, (None, 0)),
    "a gradient": jax.grad(dot_loss),
    "linearize": lambda w, x: jax.linearize(lambda w: dot_loss(w, x), w)[1](w),
    "a rule in a checkpoint": jax.checkpoint(own_layer),
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
    dtypes = []
    for equation in products_of(fun, *args):
        product = equation.params.get("product")
        factors = [x.aval.dtype for x in equation.invars[:2]]
        found = [product.low] if product else factors
        dtypes.append(" * ".join(dict.fromkeys(map(str, found))))
    return dtypes


def assert_close(actual, expected, rtol=1e-2):
    """Values agree up to the rounding of float16; dtypes agree exactly."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(e), initial=0.0)) or 1.0
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * scale)


def assert_autocast(fun, *args):
    """Every product is in float16, forward and backward, and the values are right."""
    cast, plain = (
        jax.jit(jax.value_and_grad(lambda *args, f=f: f(*args) * 2.0**8))
        for f in (ols.autocast(fun), fun)
    )
    assert_close(cast(*args), plain(*args))
    assert set(dtypes_of(cast, *args)) == {"float16"}


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
