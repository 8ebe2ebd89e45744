"""`full_precision` and `low_precision`, as in docs/guides/autocast.md.

What is marked runs as it is written. `low_precision` also casts the inputs of a
function, before it is traced.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

import optax_lossscale as ols
from helpers.compat import enable_x64
from helpers.under_autocast import PROGRAMS, W, X, assert_close, dtypes_of

# --- full_precision ---------------------------------------------------------------


def product(x):
    return x @ W


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_in_a_function_in_full_precision_stay_in_float32(name):
    fun = ols.full_precision(functools.partial(PROGRAMS[name], W))
    cast = ols.autocast(fun)
    assert set(dtypes_of(cast, X)) == {"float32"}
    inside = ols.autocast(lambda x: (jax.jit(jax.checkpoint(fun))(x), x @ W))
    assert dtypes_of(inside, X)[-1] == "float16"
    assert set(dtypes_of(inside, X)[:-1]) == {"float32"}
    grad = jax.grad(lambda x: jnp.sum(fun(x)))
    for low in (ols.autocast(grad), jax.grad(lambda x: jnp.sum(cast(x)))):
        assert set(dtypes_of(low, X)) == {"float32"}


def test_one_jitted_function_is_low_outside_of_a_marked_one_and_not_inside():
    shared = jax.jit(product)

    def fun(x):
        return shared(x) + ols.full_precision(shared)(x) + shared(x)

    for _ in range(2):
        assert dtypes_of(ols.autocast(fun), X) == ["float16", "float32", "float16"]
        assert dtypes_of(fun, X) == ["float32"] * 3


# --- low_precision: what is an input ----------------------------------------------


def kernel(x):
    """Doubles what is not float32, as a fused kernel that refuses float32 would."""
    if x.dtype == jnp.float32:
        raise TypeError("this kernel takes no float32")
    return x + x


def double(x):
    """What the kernel does, for any dtype."""
    return x + x


low_kernel = ols.low_precision(kernel)


def dtypes_inside(*args, level="O1", dtype=jnp.float16, **kwargs):
    """What a marked function gets of these arguments, and the dtypes of its arrays."""
    seen = []
    mark = ols.low_precision(lambda *args, **kwargs: seen.append((args, kwargs)))
    ols.autocast(lambda: mark(*args, **kwargs), dtype, level=level)()
    return jax.tree.map(lambda x: getattr(x, "dtype", x), seen[-1])


@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", jnp.float16), ("O1", jnp.bfloat16), ("O3", jnp.float16)]
)
def test_float32_inputs_are_cast_to_the_low_dtype_before_tracing(level, dtype):
    assert dtypes_inside(X, level=level, dtype=dtype) == ((dtype,), {})
    cast = ols.autocast(lambda x: low_kernel(x), dtype, level=level)
    assert_close(cast(X), 2 * X)


def test_at_o0_and_outside_of_autocast_nothing_happens():
    assert dtypes_inside(X, level="O0") == ((jnp.float32,), {})
    marked = ols.low_precision(double)
    assert str(jax.make_jaxpr(marked)(X)) == str(jax.make_jaxpr(double)(X))
    for fun in (low_kernel, jax.jit(low_kernel)):
        with pytest.raises(TypeError, match="takes no float32"):
            fun(X)


def test_what_is_not_float32_passes_through():
    half, number = X.astype(jnp.bfloat16), 0.5
    settings, name = {"axis": 1, "names": {"a"}}, "same"
    args, _ = dtypes_inside(half, jnp.arange(3), X > 0, None, number, name, settings)
    assert args == (jnp.bfloat16, jnp.int32, jnp.bool_, None, number, name, settings)
    key = jax.random.key(0)
    assert dtypes_inside(key)[0] == (key.dtype,)
    with enable_x64(True):
        assert dtypes_inside(jnp.float64(1))[0] == (jnp.float64,)


# --- low_precision: what is a result ----------------------------------------------


def test_results_in_the_low_dtype_are_cast_back_if_an_input_was_cast():
    def fun(x):
        return x, jnp.sum(x.astype(jnp.float32)), jnp.argmax(x), x > 0

    cast = ols.autocast(lambda x: ols.low_precision(fun)(x))
    others = [jnp.float32, jnp.int32, jnp.bool_]
    for given, same in [(X, jnp.float32), (X.astype(jnp.float16), jnp.float16)]:
        assert [result.dtype for result in cast(given)] == [same, *others]


# --- low_precision: what JAX has traced before ------------------------------------


def in_scan(fun):
    def body(carry, _):  # JAX remembers a loop by its body.
        return fun(carry), None

    return lambda x: lax.scan(body, x, length=1)[0]


REMEMBERED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "cond": lambda f: lambda x: lax.cond(True, f, f, x),
    "nnx.jit": nnx.jit,
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", REMEMBERED)
def test_a_trace_made_outside_autocast_is_not_used_inside_nor_the_reverse(
    name, is_first
):
    seen = []

    @ols.low_precision
    def fun(x):
        seen.append(x.dtype)
        return x * 2.0

    wrapped = REMEMBERED[name](fun)
    calls = {
        jnp.float32: wrapped,
        jnp.float16: ols.autocast(lambda x: wrapped(x)),
        jnp.bfloat16: ols.autocast(lambda x: wrapped(x), jnp.bfloat16),
    }
    for dtype in list(calls)[:: 1 if is_first else -1]:
        seen.clear()
        assert_close(calls[dtype](X), 2 * X)
        assert set(seen) == {jnp.dtype(dtype)}


# --- low_precision: transformations and other markers -----------------------------


def with_rule(fun):
    own = jax.custom_vjp(fun)
    own.defvjp(lambda x: (fun(x), None), lambda _, ct: (fun(ct),))
    return own


WAYS = {
    "custom_vjp": lambda mark, fun: with_rule(mark(fun)),
    "itself": lambda mark, fun: mark(fun),
    "custom_vjp inside": lambda mark, fun: mark(with_rule(fun)),
    "vmap": lambda mark, fun: jax.vmap(mark(fun)),
    "grad": lambda mark, fun: jax.grad(lambda x: jnp.sum(mark(fun)(x) ** 2)),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_marked_function_works_under_and_over_transformations(name):
    def loss(x, mark, fun):
        return jnp.mean((WAYS[name](mark, fun)(jnp.tanh(x)) @ W) ** 2)

    low = functools.partial(loss, mark=ols.low_precision, fun=kernel)
    exact = functools.partial(loss, mark=lambda fun: fun, fun=double)
    expected = jax.value_and_grad(exact)(X)
    assert_close(jax.value_and_grad(ols.autocast(low))(X), expected)
    assert_close(ols.autocast(jax.value_and_grad(low))(X), expected)


def test_markers_inside_others_do_nothing_and_autocast_casts_to_its_own_dtype():
    seen = []

    @ols.low_precision
    def look(x):
        seen.append(x.dtype.name)
        return x

    inner = ols.autocast(lambda x: look(x @ W), jnp.bfloat16)

    @ols.autocast
    def fun(x):
        ols.full_precision(look)(x)
        ols.low_precision(lambda x: look(x.astype(jnp.float32)))(x)
        return look(ols.full_precision(inner)(inner(x)))

    result = fun(X)
    assert seen == ["float32", "float32", "bfloat16", "bfloat16", "float16"]
    assert_close(result, X @ W @ W, rtol=0.05)


@pytest.mark.slow
def test_a_kernel_of_pallas_gets_low_operands():
    def body(x_ref, out_ref):
        assert x_ref.dtype == out_ref.dtype == jnp.float16
        out_ref[...] = x_ref[...] * 2

    @ols.low_precision
    def doubled(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(body, out_shape=shape, interpret=True)(x)

    assert_close(jax.jit(ols.autocast(lambda x: doubled(x @ W) @ W))(X), 2 * X @ W @ W)
