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
from jax.extend import core

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.under_autocast import (
    PROGRAMS,
    W,
    X,
    dtypes_of,
    own_layer,
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
    "scan": lambda x: lax.scan(lambda c, r: (c + r, jnp.sin(c)), jnp.zeros(4), x),
    "while": lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: 2 * x + 1, x),
    "gradient of a rule": gradient_of(own_sine),
    "gradient of softmax": gradient_of(lambda x: jax.nn.softmax(x) * x),
    "gradient of checkpoint": gradient_of(jax.checkpoint(lambda x: jnp.sin(x) * x)),
    "gradient of cholesky": lambda x: gradient_of(jnp.linalg.cholesky)(SQUARE),
    "random numbers": lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
    "numbers": lambda x: (lax.full((), 3.0), jnp.zeros(()), jnp.int32(3), 2.0, None),
    "a weak type": lambda x: lax.full((2,), 3.0) * 2,
    # These have products, which stay as they are written.
    "expm": lambda x: jax.scipy.linalg.expm(2.5 * jnp.eye(4)),
    "solve": lambda x: jnp.linalg.solve(SQUARE, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_without_low_products_has_the_same_program(name):
    def program_of(fun):
        closed = jax.make_jaxpr(fun)(X)
        consts = [np.asarray(x).tobytes() for x in closed.consts]
        return re.sub("0x[0-9a-f]+", "", str(closed)), consts

    fun = FUNCTIONS[name]
    assert program_of(ols.autocast(fun)) == program_of(fun)


def test_results_outside_jit_are_of_the_same_kinds():
    def kinds(fun):
        leaves = jax.tree.leaves(fun(X))
        return [(type(x), getattr(x, "weak_type", None)) for x in leaves]

    for name in ("numbers", "a weak type", "scan"):
        assert kinds(ols.autocast(FUNCTIONS[name])) == kinds(FUNCTIONS[name])


# --- Functions with products ------------------------------------------------------


def with_all_dtypes(w, x):
    y = x @ w
    half = y.astype(jnp.bfloat16)
    half = half + (half @ w.astype(jnp.bfloat16)) * 2
    weak = lax.full((3, 4), 2.0) @ lax.full((4, 4), 3.0) + 1.0
    return y, half, weak, jnp.argmax(y), y.astype(jnp.int8), y > 0


def with_convolution(w, x):
    return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")


WITH_PRODUCTS = {
    "all dtypes": with_all_dtypes,
    **PROGRAMS,
    "a convolution": with_convolution,
}


def types_of(fun, *args):
    results = jax.tree.leaves(jax.eval_shape(fun, *args))
    return [(x.shape, x.dtype, x.weak_type) for x in results]


def total(fun):
    return lambda *args: sum(
        jnp.sum(x.astype(float)) for x in jax.tree.leaves(fun(*args))
    )


DERIVATIVES = {
    "call": lambda f: f,
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args),
    "hessian": lambda f: jax.hessian(total(f), (0, 1)),
    "grad of jitted grad": lambda f: jax.grad(
        total(jax.jit(jax.grad(total(f), (0, 1)))), (0, 1)
    ),
}
WEAK, STRONG = jnp.full((4, 4), 0.1), jnp.ones((3, 4))


@pytest.mark.parametrize(
    "name", slow_except({"all dtypes", "linearize"}, WITH_PRODUCTS)
)
def test_shapes_dtypes_and_weak_types_are_those_of_plain_jax(name):
    """If one were weak by mistake, a product with a float16 array would be float16."""
    assert WEAK.weak_type
    fun = WITH_PRODUCTS[name]
    with jax.enable_checks(True):
        for derivative, of in DERIVATIVES.items():
            if (name, derivative) == ("a rule in a checkpoint", "hessian"):
                continue  # JAX has no forward mode of it.
            of_cast, of_fun = (of(f) for f in (ols.autocast(fun), fun))
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
    assert set(seen) == {(np.dtype("float32"), np.dtype("float32"))}


def test_a_product_is_rounded_to_the_low_dtype_and_nothing_after_it():
    x, w = jnp.array([[1000.0, 1025.0]]), jnp.ones((2, 1))
    fun = ols.autocast(lambda x, w: ((x + 0.3) @ w, (x @ w) + 0.3))
    rounded, exact = fun(x, w)
    # Between 1024 and 2048 the numbers of float16 are 1 apart, and below it 0.5. So the
    # first is the sum of 1000.5 and 1025, rounded to an even number.
    assert (float(rounded[0, 0]), float(exact[0, 0])) == (2026.0, np.float32(2025.3))


def test_a_kernel_with_a_lookup_is_not_rewritten():
    def kernel(x_ref, row_ref):
        x = x_ref[...].astype(jnp.float16)
        row = lax.dynamic_slice(x, (jnp.int32(jnp.sum(x) * 0), 0), (1, 4))
        row_ref[...] = row.astype(jnp.float32)

    def first_row(x):
        shape = jax.ShapeDtypeStruct((1, 4), jnp.float32)
        return pl.pallas_call(kernel, shape, interpret=True)(x.astype(jnp.float32))

    def kernel_of(fun):
        (*_, call) = jax.make_jaxpr(fun)(X).eqns
        return str(call.params["jaxpr"])

    assert kernel_of(ols.autocast(first_row, level="O2")) == kernel_of(first_row)


# --- Programs that are shared -----------------------------------------------------


@jax.jit
def block(w, x):
    return jax.nn.relu(own_layer(w, jnp.tanh(x @ w)))


def test_a_jitted_block_that_is_called_five_times_is_compiled_twice():
    def deep(w, x):
        for _ in range(5):
            x = block(w, x)
        return jnp.sum(x)

    def blocks(fun):
        text = jax.jit(fun).lower(W, X).as_text()
        return text.count("func.func private @block")

    # The first one has an input that depends on no product.
    assert blocks(ols.autocast(deep)) == 2
    assert blocks(jax.grad(ols.autocast(deep))) == blocks(jax.grad(deep))


def test_outside_jit_a_jitted_function_inside_is_traced_once():
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
def test_a_function_runs_by_the_settings_of_each_autocast_around_it(prepare):
    inner = prepare(jax.jit(jax.named_scope("layer")(lambda x: x @ W)))
    for dtype in ("float16", "bfloat16", "float16"):
        assert dtypes_of(ols.autocast(lambda x: inner(x), dtype), X) == [dtype]
        high = ols.autocast(lambda x: inner(x), dtype, high=["layer"])
        assert dtypes_of(high, X) == ["float32"]
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
