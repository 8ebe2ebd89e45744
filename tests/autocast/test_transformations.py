"""autocast under and over every transformation of JAX."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7, set_mesh
from helpers.programs import dtypes_of
from helpers.under_autocast import (
    HALF,
    W,
    X,
    assert_autocast,
    assert_close,
    dot_loss,
    own_layer,
    with_scan,
)


def with_jit(w, x):
    return jnp.mean(jax.jit(lambda w, x: x @ w)(w, x) ** 2)


def with_vmap(w, x):
    return jnp.mean(jax.vmap(lambda row: row @ w)(x) ** 2)


def with_jvp(w, x):
    value, tangent = jax.jvp(lambda w: dot_loss(w, x), (w,), (w,))
    return value + tangent


def with_grad(w, x):
    return jnp.sum(jax.grad(dot_loss)(w, x) ** 2)


def with_linearize(w, x):
    value, push = jax.linearize(lambda w: dot_loss(w, x), w)
    return value + push(w)


def with_cond(w, x):
    return jax.lax.cond(x[0, 0] > 9, lambda: 0.0, lambda: jnp.mean((x @ w) ** 2))


def with_switch(w, x):
    branches = [lambda w: jnp.sum(w), lambda w: jnp.mean((x @ w) ** 2)]
    return jax.lax.switch(jnp.int32(1), branches, w)


def with_remat(w, x):
    return jnp.mean(jax.checkpoint(lambda w: jnp.tanh(x @ w) @ w)(w) ** 2)


def with_names(w, x):
    with jax.named_scope("layer"):
        return jnp.mean((x @ w) ** 2)


def with_associative_scan(w, x):
    return jnp.mean(jax.lax.associative_scan(jnp.matmul, jnp.stack([w, w, w])) ** 2)


def with_custom_vjp(w, x):
    return jnp.mean(own_layer(w, x) ** 2)


@jax.custom_jvp
def own_product(w, x):
    return x @ w


@own_product.defjvp
def own_product_jvp(primals, tangents):
    (w, x), (w_dot, x_dot) = primals, tangents
    return own_product(w, x), x @ w_dot + x_dot @ w


def with_custom_jvp(w, x):
    return jnp.mean(own_product(w, x) ** 2)


PROGRAMS = {
    program.__name__.removeprefix("with_"): program
    for program in (
        with_jit,
        with_vmap,
        with_jvp,
        with_grad,
        with_linearize,
        with_cond,
        with_switch,
        with_scan,
        with_remat,
        with_names,
        with_associative_scan,
        with_custom_vjp,
        with_custom_jvp,
    )
}


@pytest.mark.fast_every(10)
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_are_in_float16_in_functions_that_use_a_transformation(name):
    assert_autocast(PROGRAMS[name], W, X)


@pytest.mark.fast_every(4)
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.grad,
        lambda f: jax.vmap(f, in_axes=(None, 0)),
        lambda f: lambda w, x: jax.jvp(functools.partial(f, x=x), (w,), (w,)),
        lambda f: lambda w, x: jax.linearize(functools.partial(f, x=x), w)[1](w),
        lambda f: lambda w, x: jax.lax.map(lambda row: f(w, row), x),
        lambda f: lambda w, x: jax.lax.scan(lambda c, r: (c, f(w, r)), 0.0, x)[1],
        jax.checkpoint,
        lambda f: jax.grad(jax.checkpoint(f)),
        jax.jacrev,
        jax.hessian,
    ],
)
def test_results_under_every_transformation_are_right(transform):
    w = W[:2]
    x = X[:, :2]
    assert_close(
        transform(ols.autocast(dot_loss))(w, x), transform(dot_loss)(w, x), 3e-2
    )


@pytest.mark.slow
def test_results_under_pmap_shard_map_and_sharded_jit_are_right():
    cast = ols.autocast(dot_loss)
    x = jnp.stack([X] * 4)
    expected = dot_loss(W, X)
    mapped = jax.pmap(cast, in_axes=(None, 0), devices=jax.devices()[:4])(W, x)
    assert_close(mapped, jnp.stack([expected] * 4))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), auto, devices=jax.devices()[:4])

    def mean_loss(w, x):
        return jax.lax.pmean(dot_loss(w, x[0]), "data")

    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    over = jax.shard_map(ols.autocast(mean_loss), **specs)
    under = jax.shard_map(mean_loss, **specs)
    assert_close(over(W, x), expected)
    assert_close(ols.autocast(under)(W, x), expected)
    assert set(dtypes_of(ols.autocast(under), W, x)) == {HALF}
    grads = jax.grad(lambda w: ols.autocast(under)(w, x) * 2.0**8)(W) / 2.0**8
    assert_close(grads, jax.grad(dot_loss)(W, X))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    assert_close(jax.jit(jax.vmap(cast, (None, 0)))(W, sharded), mapped)


@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 has no jax.set_mesh")
def test_gradients_on_an_explicit_mesh_are_right():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), explicit, devices=jax.devices()[:4])
    with set_mesh(mesh):
        x = jax.device_put(jnp.concatenate([X, X[:1]]), P("data"))
        w = jax.device_put(W, P())
        grads = jax.jit(jax.grad(ols.autocast(dot_loss)))(w, x)
        assert_close(grads, jax.grad(dot_loss)(w, x))


@pytest.mark.slow
@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 does not export the primitive")
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f, jax.checkpoint])
def test_taylor_series_are_right(wrap):
    def fun(x):
        return jax.nn.softmax(jnp.tanh(x @ W) @ W) * jnp.exp(x)

    def series_of(fun):
        return lambda x: jet(fun, (x,), ((jnp.ones(4), jnp.ones(4)),))

    x, cast = X[0], wrap(ols.autocast(fun))
    with jax.numpy_rank_promotion("allow"):
        assert_close(series_of(cast)(x), series_of(fun)(x))
        loss = lambda fun, x: jnp.sum(series_of(fun)(x)[1][1])  # noqa: E731
        grads = jax.grad(functools.partial(loss, cast))(x)
        assert_close(grads, jax.grad(functools.partial(loss, fun))(x))
