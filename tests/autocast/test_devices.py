"""Devices add up gradients in float32, as docs/guides/many_devices.md says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.compiled import collectives_of
from helpers.under_autocast import assert_close, dtypes_of, integers

pytestmark = pytest.mark.several_devices

DEVICES = 4
# Each device has a prime number of rows, and other sizes are powers of two, so that the
# sizes of activations, and no others, are multiples of it.
ROWS = 13
W, X = integers(8, 4), integers(DEVICES * ROWS, 8)


def normal(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32)


def as_is(fun):
    return fun


def dense():
    def loss(params, x):
        x = jax.nn.gelu(x @ params["up"] + params["bias"][None])
        return jnp.mean((x @ params["down"] - 1) ** 2)

    params = {"up": normal(1, 8, 16), "bias": normal(2, 16), "down": normal(3, 16, 8)}
    return loss, params, normal(0, DEVICES * ROWS, 8)


def convolution():
    def loss(params, x):
        kinds = ("NHWC", "HWIO", "NHWC")
        settings = {"padding": "SAME", "dimension_numbers": kinds}
        x = lax.conv_general_dilated(x, params["kernel"], (2, 2), **settings)
        return jnp.mean((x - 1) ** 2)

    return loss, {"kernel": normal(1, 2, 2, 4, 8)}, normal(0, DEVICES * ROWS, 8, 8, 4)


def make_mesh(axis_type):
    devices = jax.devices()[:DEVICES]
    return jax.make_mesh((DEVICES,), ("data",), (axis_type,), devices=devices)


def compile_gradient(loss, params, batch, axis_type, is_split):
    """Compiles the gradient; the batch is split, and the parameters if asked for."""
    mesh = make_mesh(axis_type)

    def sharding_of(leaf):
        return NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), "data"))

    whole = NamedSharding(mesh, P())
    shardings = jax.tree.map(sharding_of if is_split else lambda _: whole, params)
    params = jax.device_put(params, shardings)
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss), out_shardings=shardings)
        return gradient.lower(params, batch).compile(), params, batch


def summed_over_devices(compiled):
    """Dtypes of the arrays, other than activations, that devices sum."""
    found = set()
    for arrays, kind in collectives_of(compiled):
        for dtype, _, dims in (array.partition("[") for array in arrays):
            size = np.prod([int(dim) for dim in dims[:-1].split(",") if dim])
            if kind in ("all-reduce", "reduce-scatter") and size % ROWS:
                found.add(dtype)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axis_type", "is_split"),
    [
        (dense, AxisType.Auto, True),
        (dense, AxisType.Explicit, False),
        (convolution, AxisType.Auto, False),
    ],
)
def test_devices_sum_gradients_of_parameters_in_float32(model, axis_type, is_split):
    loss, params, batch = model()
    cast = ols.autocast(loss)
    compiled, *args = compile_gradient(cast, params, batch, axis_type, is_split)
    assert summed_over_devices(compiled) == {"f32"}
    assert_close(compiled(*args), jax.jit(jax.grad(loss))(params, batch), 2e-2)


@pytest.mark.parametrize("is_automatic", [False, True])
def test_gradients_on_a_mesh_of_two_explicit_axes_are_exact(is_automatic):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def loss(w, x):
        return jnp.sum(x @ w)

    with jax.set_mesh(mesh):
        if is_automatic:
            loss = jax.sharding.auto_axes(loss, out_sharding=P())
        w = jax.device_put(W, NamedSharding(mesh, P(None, "model")))
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        assert dtypes_of(ols.autocast(loss), w, x) == ["float16"]
        actual, expected = (
            jax.jit(jax.grad(fun))(w, x) for fun in (ols.autocast(loss), loss)
        )
    np.testing.assert_array_equal(actual, expected)
    assert actual.sharding == expected.sharding


def summed(w, x):
    return lax.psum(jnp.sum(x @ w), "data")


def over_shard_map(fun, check_vma=True):
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mesh = make_mesh(AxisType.Auto)
    return jax.shard_map(fun, mesh=mesh, check_vma=check_vma, **specs)


def over_pmap(fun):
    devices = jax.devices()[:DEVICES]
    mapped = jax.pmap(fun, "data", in_axes=(None, 0), devices=devices)
    return lambda w, x: mapped(w, x.reshape(DEVICES, ROWS, 8))[0]


@pytest.mark.parametrize(
    "over",
    slow_except(
        [over_shard_map],
        [over_shard_map, functools.partial(over_shard_map, check_vma=False), over_pmap],
    ),
)
@pytest.mark.parametrize("is_inside", [True, False])
def test_gradients_in_functions_over_devices_are_exact(is_inside, over):
    def run(wrap):
        fun = over(wrap(summed)) if is_inside else wrap(over(summed))
        assert dtypes_of(fun, W, X) == ["float32" if wrap is as_is else "float16"]
        gradient = jax.grad(fun)
        return gradient(W, X) if over is over_pmap else jax.jit(gradient)(W, X)

    np.testing.assert_array_equal(run(ols.autocast), run(as_is))


@pytest.mark.slow
def test_a_scan_inside_shard_map_can_be_differentiated_from_inside_and_outside():
    x, ws = normal(0, 4, 3), normal(1, 2, 3, 3)

    def loss(x, ws):
        result, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)
        return lax.pmean(jnp.sum(result), "data")

    def over_devices(fun, out_specs):
        specs = {"in_specs": (P("data"), P()), "out_specs": out_specs}
        return jax.shard_map(fun, mesh=make_mesh(AxisType.Auto), **specs)

    def gradients(wrap):
        outside = jax.grad(wrap(over_devices(loss, P())))
        inside = over_devices(jax.grad(wrap(loss)), P("data"))
        return jax.jit(outside)(x, ws), jax.jit(inside)(x, ws)

    assert_close(gradients(ols.autocast), gradients(as_is))
