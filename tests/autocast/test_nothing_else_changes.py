"""Nothing but products changes: programs, dtypes, weak types, contexts, compiling."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

import optax_lossscale as ols
from helpers.programs import equations_of
from helpers.under_autocast import (
    PROGRAMS,
    W,
    X,
    dtypes_of,
    own_layer,
    products_of,
    with_scan,
)

# --- Functions without products ---------------------------------------------------

SQUARE = X[:, :3] @ X[:, :3].T + 3 * jnp.eye(3)


@jax.custom_vjp
def own_sine(x):
    return jnp.sin(x)


own_sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


def gradient_of(fun):
    return jax.grad(lambda x: jnp.sum(fun(x)))


FUNCTIONS = {
    "elementwise": lambda x: jnp.exp(x) * 1e5 - jnp.cos(1000 * x),
    "relu": jax.nn.relu,
    "scan": lambda x: lax.scan(lambda c, r: (c + r, jnp.sin(c)), jnp.zeros(4), x),
    "while": lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: 2 * x + 1, x),
    "switch": lambda x: lax.switch(jnp.int32(1), [jnp.sin, jnp.cos], x),
    "custom_vjp": own_sine,
    "gradient of custom_vjp": gradient_of(own_sine),
    "gradient of softmax": gradient_of(lambda x: jax.nn.softmax(x) * x),
    "gradient of checkpoint": gradient_of(jax.checkpoint(lambda x: jnp.sin(x) * x)),
    "jvp": lambda x: jax.jvp(jnp.tanh, (x,), (x,)),
    "gradient of cholesky": lambda x: gradient_of(jnp.linalg.cholesky)(SQUARE),
    "random numbers": lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
    "numbers": lambda x: (lax.full((), 3.0), jnp.zeros(()), jnp.int32(3), 2.0, None),
    "a weak type": lambda x: lax.full((2,), 3.0) * 2,
    # These have products, which stay as they are written.
    "expm": lambda x: jax.scipy.linalg.expm(2.5 * jnp.eye(4)),
    "solve": lambda x: jnp.linalg.solve(SQUARE, x),
    "resize": lambda x: jax.image.resize(x, (6, 8), "bilinear"),
    "outer product": lambda x: jnp.einsum("i,j->ij", 1e6 * x[0], x[1]),
    "integers": lambda x: jnp.arange(12).reshape(3, 4) @ jnp.arange(4),
    "float16": lambda x: x.astype(jnp.float16) @ W.astype(jnp.float16),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_without_low_products_has_the_same_program(name):
    def program_of(fun):
        closed = jax.make_jaxpr(fun)(X)
        consts = [np.asarray(x).tobytes() for x in closed.consts]
        return re.sub("0x[0-9a-f]+", "", str(closed)), consts

    fun = FUNCTIONS[name]
    assert program_of(ols.autocast(fun)) == program_of(fun)


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


def with_convolution(w, x):
    return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")


WITH_PRODUCTS = {
    **PROGRAMS,
    "a gradient of a scan": jax.grad(with_scan),
    "dtypes": with_mixed_dtypes,
    "a convolution": with_convolution,
    "weak types": lambda w, x: lax.full((3, 4), 2.0) @ lax.full((4, 4), 3.0) + 1.0,
}


def types_of(fun, *args):
    results = jax.tree.leaves(jax.eval_shape(fun, *args))
    return [(x.shape, x.dtype, x.weak_type) for x in results]


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
    fun = WITH_PRODUCTS[name]
    cast = ols.autocast(fun, recompute=False)
    assert outline_of(cast, W, X) == outline_of(fun, W, X)
    assert types_of(cast, W, X) == types_of(fun, W, X)
    with jax.enable_checks(True):
        jax.make_jaxpr(jax.jit(ols.autocast(fun)))(W, X)


def total(fun):
    return lambda *args: sum(
        jnp.sum(x.astype(float)) for x in jax.tree.leaves(fun(*args))
    )


DERIVATIVES = {
    "call": lambda f: f,
    "grad": lambda f: jax.grad(total(f), (0, 1)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "hessian": lambda f: jax.hessian(total(f), (0, 1)),
    "grad of jitted grad": lambda f: jax.grad(
        total(jax.jit(jax.grad(total(f), (0, 1)))), (0, 1)
    ),
}


WEAK, STRONG = jnp.full((4, 4), 0.1), jnp.ones((3, 4))


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_weak_types_are_those_of_plain_jax(name, derivative):
    """If one were weak by mistake, a product with a float16 array would be float16."""
    assert WEAK.weak_type
    if (name, derivative) == ("a rule for cotangents", "hessian"):
        pytest.skip("JAX has no forward mode of it.")
    of_fun, of_cast = (
        DERIVATIVES[derivative](f)
        for f in (WITH_PRODUCTS[name], ols.autocast(WITH_PRODUCTS[name]))
    )
    assert types_of(of_cast, WEAK, STRONG) == types_of(of_fun, WEAK, STRONG)


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


def test_products_keep_the_context_that_they_were_traced_in():
    def fun(x):
        with set_xla_metadata(part="first"):
            y = x @ W
        return y @ W

    plain, low = (products_of(f, X) for f in (fun, ols.autocast(fun)))
    assert [e.ctx.xla_metadata for e in low] == [e.ctx.xla_metadata for e in plain]
    assert low[0].ctx.xla_metadata != low[1].ctx.xla_metadata


def first_row_by_a_kernel(x):
    def kernel(x_ref, row_ref):
        x = x_ref[...].astype(jnp.float16)
        row = lax.dynamic_slice(x, (jnp.int32(jnp.sum(x) * 0), 0), (1, 4))
        row_ref[...] = row.astype(jnp.float32)

    shape = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    return pl.pallas_call(kernel, shape, interpret=True)(x)


def test_a_kernel_with_a_lookup_is_not_rewritten():
    def kernel_of(fun):
        (call,) = (
            e for e in jax.make_jaxpr(fun)(X).eqns if "pallas" in str(e.primitive)
        )
        return str(call.params["jaxpr"])

    cast = ols.autocast(
        lambda x: first_row_by_a_kernel(x.astype(jnp.float32)), level="O2"
    )
    assert kernel_of(cast) == kernel_of(first_row_by_a_kernel)


# --- Programs that are shared -----------------------------------------------------


@jax.jit
def block(w, x):
    return jax.nn.relu(own_layer(w, jnp.tanh(x @ w)))


@pytest.mark.slow
def test_a_function_that_is_called_often_is_compiled_as_often_as_without():
    def deep(w, x):
        for _ in range(20):
            x = block(w, x)
        return jnp.sum(x)

    def blocks(fun):
        text = jax.jit(fun).lower(W, X).as_text()
        return text.count("func.func private @block")

    # The first one has an input that depends on no product.
    assert blocks(ols.autocast(deep)) == 2
    assert blocks(jax.grad(ols.autocast(deep))) == blocks(jax.grad(deep))


def test_outside_jit_a_jitted_function_inside_is_traced_and_compiled_once():
    traced = []

    @jax.jit
    def inner(x):
        traced.append(x.dtype)
        return x @ W

    cast = ols.autocast(lambda x: inner(x) + inner(2 * x))
    for _ in range(3):
        cast(X)
    assert len(traced) == 1


def already_traced(fun):
    program = jax.make_jaxpr(fun)(X)
    return lambda x: core.jaxpr_as_fun(program)(x)[0]


@pytest.mark.parametrize("prepare", [already_traced, jax.jit])
def test_a_function_runs_in_the_dtype_of_each_autocast_around_it(prepare):
    inner = prepare(jax.jit(lambda x: x @ W))
    for dtype in ("float16", "bfloat16", "float16"):
        assert dtypes_of(ols.autocast(lambda x: inner(x), dtype), X) == [dtype]
    assert dtypes_of(inner, X) == ["float32"]
    both = ols.autocast(lambda x: ols.autocast(inner, "bfloat16")(inner(x)))
    assert dtypes_of(both, X) == ["float16", "bfloat16"]


@pytest.mark.slow
def test_programs_are_forgotten_with_the_functions_that_they_belong_to():
    class Data:
        pass

    def call():
        data = Data()
        ols.autocast(jax.jit(lambda x, data=data: x @ W))(X)
        return weakref.ref(data)

    reference = call()
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def test_programs_beside_other_settings_of_a_primitive_are_its_own():
    """Equinox, Lineax and Optimistix compare them with copies that they keep."""
    program = jax.make_jaxpr(lambda x: x @ W)(X)
    primitive = core.Primitive("solve")
    primitive.def_impl(lambda x, settings: core.jaxpr_as_fun(settings[0])(x)[0])
    primitive.def_abstract_eval(lambda x, settings: program.out_avals[0])
    fun = ols.autocast(lambda x: primitive.bind(x, settings=(program, "name")))
    (equation,) = jax.make_jaxpr(fun)(X).eqns
    assert equation.params["settings"][0] is program
    np.testing.assert_array_equal(fun(X), X @ W)
