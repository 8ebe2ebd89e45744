"""Gradients of values that are used often are summed in float32."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.programs import equations_of
from helpers.under_autocast import W, X, assert_close, dot_loss, relative_error


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_gradient_of_a_weight_in_a_loop_is_summed_in_float32(dtype):
    w = 0.2 * jax.random.normal(jax.random.key(0), (16, 16))
    xs = jax.random.normal(jax.random.key(1), (4096, 2, 16))

    def fun(w, xs):
        def body(h, x):
            return jnp.tanh(h @ w + x), h

        return jnp.mean(jax.lax.scan(body, jnp.zeros((2, 16)), xs)[1] ** 2)

    # A sum in bfloat16 would be off by a quarter.
    scale, limit = (2.0**14, 5e-3) if dtype == jnp.float16 else (1.0, 3e-2)
    assert relative_error(fun, w, xs, dtype=dtype, scale=scale) < limit


def eager(fun):
    return fun


@pytest.mark.parametrize("jit", [eager, pytest.param(jax.jit, marks=pytest.mark.slow)])
def test_the_gradient_of_a_weight_that_is_used_often_is_summed_in_float32(jit):
    def fun(w, x):
        return sum(jnp.mean((x * 1.01**i) @ w) for i in range(200))

    # The terms have one size, and a bfloat16 sum stops growing after 256 of them.
    assert relative_error(fun, W, X, dtype=jnp.bfloat16, jit=jit) < 1e-2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_of_a_gather_is_summed_in_float32(level):
    table = jax.random.normal(jax.random.key(0), (10, 4))
    places = jnp.zeros(10_000, int)

    def of_table(table, w):
        return jnp.mean(jnp.tanh(table[places] @ w))

    def of_product(table, w):
        return jnp.mean(jnp.tanh((table @ w)[places]))

    for fun in (of_table, of_product):
        assert relative_error(fun, table, W, level=level, scale=2.0**12) < 1e-2


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_of_a_value_that_a_loop_reads_is_summed_in_float32(level, dtype):
    xs = jnp.ones((4096, 4))

    def of_computed(w):
        return jax.lax.scan(lambda s, x: (s, jnp.sum(x @ w)), 0.0, xs)[1].sum()

    def of_product(w):
        values = W @ w
        return jax.lax.map(lambda x: jnp.sum(x[None] * values), xs).sum()

    settings = {"dtype": dtype, "level": level, "scale": 2.0**-6}
    w = jnp.full((4, 4), 0.3)
    assert relative_error(lambda w: of_computed(w * 2.0), w, **settings) < 2e-2
    assert relative_error(of_product, w, **settings) < 2e-2


def test_the_gradient_of_a_half_parameter_in_a_loop_is_summed_in_float32():
    xs = jax.random.normal(jax.random.key(0), (4096, 4))

    def fun(w):
        return jax.lax.map(lambda x: jnp.mean(x.astype(w.dtype) @ w), xs).sum() / 4096

    w = jnp.full((4, 4), 0.3)
    exact = jax.grad(fun)(w)
    half = jax.grad(ols.autocast(fun, jnp.bfloat16))(w.astype(jnp.bfloat16))
    error = jnp.linalg.norm(half.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < 2e-2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_of_a_slice_under_vmap_is_summed_in_float32(level):
    def row(table, i):
        return jax.lax.dynamic_slice_in_dim(table @ W, i, 1)

    def fun(table, row=row):
        return jnp.mean(jax.vmap(row, (None, 0))(table, jnp.zeros(4096, int)))

    table = jax.random.normal(jax.random.key(0), (3, 4))
    cast = ols.autocast(row, jnp.bfloat16, level=level)
    grads = jax.grad(fun)(table, cast)
    assert_close(grads, jax.grad(fun)(table), 2e-2)


def test_gradients_of_replicated_weights_are_summed_over_devices_in_float32():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    grad = jax.grad(ols.autocast(dot_loss, level="O2"))
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    program = jax.make_jaxpr(jax.shard_map(grad, **specs))(W, jnp.ones((4, 4)))
    sums = [e for e in equations_of(program) if e.primitive.name.startswith("psum")]
    assert sums
    assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}
