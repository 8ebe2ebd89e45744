"""Nothing but products changes: programs, bits, dtypes, and what reads a product."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.programs import equations_of
from helpers.under_autocast import PROGRAMS, W, X, with_scan

# --- Functions without products ---------------------------------------------------

SQUARE = X[:, :3] @ X[:, :3].T + 3 * jnp.eye(3)


@jax.custom_vjp
def own_sine(x):
    return jnp.sin(x)


own_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


def batch_norm(x):
    x = x - jnp.mean(x, axis=0, keepdims=True)
    return x * lax.rsqrt(jnp.var(x, axis=0, keepdims=True) + 1e-5)


def first_row_by_a_kernel(x):
    def kernel(x_ref, row_ref):
        x = x_ref[...].astype(jnp.float16)
        row = lax.dynamic_slice(x, (jnp.int32(jnp.sum(x) * 0), 0), (1, 4))
        row_ref[...] = row.astype(jnp.float32)

    shape = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    return pl.pallas_call(kernel, shape, interpret=True)(x)


def gradient_of(fun):
    return jax.grad(lambda x: jnp.sum(fun(x)))


FUNCTIONS = {
    "elementwise": lambda x: jnp.exp(x) * 1e5 - jnp.cos(1000 * x),
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "logsumexp": jax.nn.logsumexp,
    "batch norm": batch_norm,
    "scan": lambda x: lax.scan(lambda c, r: (c + r, jnp.sin(c)), jnp.zeros(4), x),
    "while": lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: 2 * x + 1, x),
    "switch": lambda x: lax.switch(jnp.int32(1), [jnp.sin, jnp.cos], x),
    "custom_vjp": own_sine,
    "gradient of custom_vjp": gradient_of(own_sine),
    "gradient of softmax": gradient_of(lambda x: jax.nn.softmax(x) * x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.exp(x))),
    "gradient of checkpoint": gradient_of(jax.checkpoint(lambda x: jnp.sin(x) * x)),
    "jvp": lambda x: jax.jvp(jnp.tanh, (x,), (x,)),
    "vmap": jax.vmap(jnp.linalg.norm),
    "cholesky": lambda x: jnp.linalg.cholesky(SQUARE),
    "gradient of cholesky": lambda x: gradient_of(jnp.linalg.cholesky)(SQUARE),
    "fft": jnp.fft.fft,
    "random numbers": lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
    "numbers": lambda x: (lax.full((), 3.0), jnp.zeros(()), jnp.int32(3), 2.0, None),
    "a weak type": lambda x: lax.full((2,), 3.0) * 2,
    "a lookup in a kernel": first_row_by_a_kernel,
    # These have products, which stay as they are written.
    "expm": lambda x: jax.scipy.linalg.expm(2.5 * jnp.eye(4)),
    "inv": lambda x: jnp.linalg.inv(SQUARE),
    "solve": lambda x: jnp.linalg.solve(SQUARE, x),
    "resize": lambda x: jax.image.resize(x, (6, 8), "bilinear"),
    "patches": lambda x: lax.conv_general_dilated_patches(
        1e6 * x[None, None], (2, 2), (1, 1), "VALID"
    ),
    "outer product": lambda x: jnp.einsum("i,j->ij", 1e6 * x[0], x[1]),
    "integers": lambda x: jnp.arange(12).reshape(3, 4) @ jnp.arange(4),
    "float16": lambda x: x.astype(jnp.float16) @ W.astype(jnp.float16),
    "float16, a float32 sum": lambda x: lax.dot(
        x.astype(jnp.float16),
        W.astype(jnp.float16),
        preferred_element_type=jnp.float32,
    ),
}


def program_of(fun):
    """The text of a traced function, and the constants that it reads."""
    closed = jax.make_jaxpr(fun)(X)
    return re.sub("0x[0-9a-f]+", "", str(closed)), closed.consts


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_without_low_products_has_the_same_program(name):
    fun = FUNCTIONS[name]
    (actual, constants), (expected, others) = map(program_of, (ols.autocast(fun), fun))
    assert actual == expected
    assert_same_bits(constants, others)


def test_a_call_without_products_holds_the_very_same_program():
    fun = jax.jit(lambda x: jax.jit(jnp.sin)(x))  # JAX traces it once for both.
    both = ols.autocast(fun), ols.autocast(fun, recompute=False)
    one, other = (jax.make_jaxpr(cast)(X).eqns[0].params["jaxpr"] for cast in both)
    assert one is other


@pytest.mark.parametrize("name", ["numbers", "a weak type", "scan", "relu"])
def test_results_outside_jit_are_of_the_same_kinds(name):
    def kinds(fun):
        leaves = jax.tree.leaves(fun(X))
        return [(type(x), getattr(x, "weak_type", None)) for x in leaves]

    fun = FUNCTIONS[name]
    assert kinds(ols.autocast(fun)) == kinds(fun)


# --- Functions with products ------------------------------------------------------


def with_mixed_dtypes(w, x):
    y = (x @ w).astype(jnp.bfloat16)
    y = y + (y @ w.astype(jnp.bfloat16)) * 2
    return y, jnp.argmax(x @ w), (x @ w).astype(jnp.int8), x @ w > 0


def with_weak_types(w, x):
    return lax.full((3, 4), 2.0) @ lax.full((4, 4), 3.0) + 1.0


WITH_PRODUCTS = {
    **PROGRAMS,
    "a gradient of a scan": jax.grad(with_scan),
    "dtypes": with_mixed_dtypes,
    "weak types": with_weak_types,
}


def outline_of(fun, *args):
    """Operation and result types of each equation, with low products as written."""
    lines, low = [], []
    for equation in equations_of(jax.make_jaxpr(fun)(*args)):
        name = equation.primitive.name
        if name == "low_product":
            low.append((equation.outvars[0], equation.params["product"].primitive.name))
            continue
        if low:  # The cast of its result comes next.
            result, product = low.pop()
            assert (name, equation.invars) == ("convert_element_type", [result])
            name = product
        lines.append((name, [str(x.aval) for x in equation.outvars]))
    return lines


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_a_function_with_products_differs_in_its_products_alone(name):
    def result_types(fun):
        avals = jax.tree.leaves(jax.eval_shape(fun, W, X))
        return [(aval.shape, aval.dtype, aval.weak_type) for aval in avals]

    fun = WITH_PRODUCTS[name]
    cast = ols.autocast(fun, recompute=False)
    assert outline_of(cast, W, X) == outline_of(fun, W, X)
    assert result_types(cast) == result_types(fun)


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_programs_with_low_products_are_well_typed(name):
    with jax.enable_checks(True):
        jax.make_jaxpr(jax.jit(ols.autocast(WITH_PRODUCTS[name])))(W, X)


def test_derivative_rules_get_the_dtypes_that_are_written():
    seen = []

    @jax.custom_vjp
    def layer(x):
        return x * 2

    def backward(x, ct):
        seen.append((x.dtype, ct.dtype))
        return (ct * 2,)

    layer.defvjp(lambda x: (layer(x), x), backward)
    jax.grad(ols.autocast(lambda w: jnp.sum(layer(X @ w) @ w)))(W)
    assert seen == [(jnp.float32, jnp.float32)] * len(seen) != []


def test_a_product_is_rounded_to_the_low_dtype_and_nothing_after_it():
    x, w = jnp.full((1, 2), 1000.0), jnp.full((2, 1), 1.0)
    fun = ols.autocast(lambda x, w: ((x + 0.3) @ w, (x @ w) + 0.3))
    rounded, exact = fun(x, w)
    # Between 1024 and 2048 the numbers of float16 are 1 apart, and below it 0.5.
    assert (float(rounded[0, 0]), float(exact[0, 0])) == (2001.0, np.float32(2000.3))
