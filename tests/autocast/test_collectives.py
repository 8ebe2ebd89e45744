"""What belongs to a parameter crosses devices in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compat import set_mesh
from helpers.compiled import arrays_sent, collectives_of
from helpers.programs import equations_of
from helpers.under_autocast import assert_close

DEVICES = 4
# Each device has a prime number of rows, and other sizes are powers of two, so that the
# sizes of activations, and no others, are multiples of it.
ROWS = 13


def normal(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32)


def dense():
    def loss(params, x):
        x = jax.nn.gelu(x @ params["up"] + params["bias"][None])
        return jnp.mean((x @ params["down"] - 1) ** 2)

    params = {"up": normal(1, 8, 16), "bias": normal(2, 16), "down": normal(3, 16, 8)}
    return loss, params, normal(0, DEVICES * ROWS, 8)


def tied_attention():
    def loss(params, tokens):
        x = params["table"][tokens]
        q, k, v = (x @ params[name] for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        x = x + jnp.einsum("bqk,bkd->bqd", weights, v)
        logits = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    params = {name: normal(i, 8, 8) for i, name in enumerate("qkv")}
    params["table"] = normal(4, 32, 8)
    tokens = np.random.default_rng(0).integers(0, 32, (DEVICES * ROWS, 4))
    return loss, params, jnp.asarray(tokens)


def convolution():
    def loss(params, x):
        kinds = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            x, params["full"], (2, 2), "SAME", dimension_numbers=kinds
        )
        x = lax.conv_general_dilated(
            jax.nn.relu(x),
            params["grouped"],
            (1, 1),
            "SAME",
            dimension_numbers=kinds,
            feature_group_count=8,
        )
        x = lax.conv_transpose(x, params["transposed"], (2, 2), "SAME")
        return jnp.mean((x - 1) ** 2)

    params = {
        "full": normal(1, 2, 2, 4, 8),
        "grouped": normal(2, 2, 2, 1, 8),
        "transposed": normal(3, 2, 2, 8, 4),
    }
    return loss, params, normal(0, DEVICES * ROWS, 8, 8, 4)


def recurrent():
    def loss(params, x):
        def cell(h, x):
            h = jnp.tanh(x @ params["input"] + h @ params["hidden"])
            return h, h

        def layer(x, w):
            return x + jax.nn.silu(x @ w), None

        _, x = lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return jnp.mean((lax.scan(layer, x, params["layers"])[0] - 1) ** 2)

    params = {
        "input": normal(1, 8, 8),
        "hidden": normal(2, 8, 8),
        "layers": normal(3, 4, 8, 8),
    }
    return loss, params, normal(0, DEVICES * ROWS, 4, 8)


def experts():
    def loss(params, x):
        values, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        gates = jnp.einsum("tk,tke->te", values, jax.nn.one_hot(chosen, 4))
        hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, params["up"]))
        out = jnp.einsum("teh,ehd,te->td", hidden, params["down"], gates)
        return jnp.mean((x + out - 1) ** 2)

    params = {
        "router": normal(1, 8, 4),
        "up": normal(2, 4, 8, 16),
        "down": normal(3, 4, 16, 8),
    }
    return loss, params, normal(0, DEVICES * ROWS, 8)


def routed():
    def loss(params, x):
        sizes = jnp.full(3, len(x) // 3)
        return jnp.mean((lax.ragged_dot(x, params["w"], sizes) - 1) ** 2)

    return loss, {"w": normal(1, 3, 8, 8)}, normal(0, DEVICES * ROWS, 8)


def checkpointed():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss(params, x):
        def layer(x, w):
            return x + jax.nn.gelu(jnp.tanh(x @ w) @ w.T)

        for w in params["all"]:
            x = jax.checkpoint(layer)(x, w)
        for w in params["products"]:
            x = jax.checkpoint(layer, policy=policy)(x, w)
        return jnp.mean((x - 1) ** 2)

    params = {"all": [normal(1, 8, 16)], "products": [normal(2, 8, 16)]}
    return loss, params, normal(0, DEVICES * ROWS, 8)


MODELS = {
    "dense": dense,
    "tied attention": tied_attention,
    "convolution": convolution,
    "recurrent": recurrent,
    "experts": experts,
    "routed": routed,
    "checkpointed": checkpointed,
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
every_level = pytest.mark.parametrize("level", ["O1", "O2"])


def make_mesh(axis_type):
    devices = jax.devices()[:DEVICES]
    return jax.make_mesh((DEVICES,), ("data",), (axis_type,), devices=devices)


def split_first_axis(mesh, leaf):
    """Splits the first axis that can be split."""
    axis = next(i for i, size in enumerate(leaf.shape) if size % DEVICES == 0)
    return NamedSharding(mesh, P(*[None] * axis, "data"))


def compile_gradient(loss, params, batch, axis_type=AxisType.Auto, is_split=False):
    """Compiles the gradient; the batch is split, and the parameters if asked for."""
    mesh = make_mesh(axis_type)
    shardings = jax.tree.map(
        lambda leaf: (
            split_first_axis(mesh, leaf) if is_split else NamedSharding(mesh, P())
        ),
        params,
    )
    params = jax.device_put(params, shardings)
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    with set_mesh(mesh):
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


@pytest.mark.fast_every(6)
@every_level
@every_model
def test_replicated_parameters_have_gradients_that_are_summed_in_float32(model, level):
    loss, params, batch = model()
    compiled, *args = compile_gradient(ols.autocast(loss, level=level), params, batch)
    assert summed_over_devices(compiled) == {"f32"}
    assert_close(compiled(*args), jax.jit(jax.grad(loss))(params, batch), 2e-2)


@pytest.mark.fast_every(6)
@every_level
@every_model
def test_split_parameters_have_gradients_that_are_summed_in_float32(model, level):
    loss = ols.autocast(model()[0], level=level)
    compiled, *_ = compile_gradient(loss, *model()[1:], is_split=True)
    # XLA may move the batch of routed tokens instead.
    assert summed_over_devices(compiled) in ({"f32"}, set())


@pytest.mark.parametrize("model", [dense, checkpointed, experts])
def test_on_an_explicit_mesh_gradients_are_summed_in_float32(model):
    loss, params, batch = model()
    compiled, *_ = compile_gradient(
        ols.autocast(loss), params, batch, AxisType.Explicit
    )
    assert summed_over_devices(compiled) == {"f32"}


@pytest.mark.fast_every(3)
@pytest.mark.parametrize("is_inside", [True, False])
@every_level
@every_model
def test_under_shard_map_gradients_are_summed_in_float32(model, level, is_inside):
    loss, params, batch = model()
    cast = ols.autocast(loss, level=level)

    def mean_loss(params, batch):
        return lax.pmean(cast(params, batch), "data")

    over = {"mesh": make_mesh(AxisType.Auto), "in_specs": (P(), P("data"))}
    if is_inside:
        gradient = jax.shard_map(jax.grad(mean_loss), **over, out_specs=P())
    else:
        gradient = jax.grad(jax.shard_map(mean_loss, **over, out_specs=P()))
    program = jax.make_jaxpr(gradient)(params, batch)
    sums = [e for e in equations_of(program) if e.primitive.name.startswith("psum")]
    assert sums
    assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}


def test_a_sum_over_devices_overflows_no_earlier_than_float32():
    def loss(w, x):
        return jnp.sum((x @ w) * 200.0)

    # Each of four devices has 200 * 200 = 40000, which float16 holds; their sum is
    # 160000.
    batch = jnp.full((DEVICES, 2), 200.0)
    compiled, *args = compile_gradient(ols.autocast(loss), jnp.zeros((2, 2)), batch)
    np.testing.assert_array_equal(compiled(*args), jnp.full((2, 2), 160000.0))


@pytest.mark.fast_every(3)
@every_level
@pytest.mark.parametrize("is_split", [False, True])
def test_gradients_of_parameters_that_are_rounded_first_are_summed_in_float16(
    is_split, level
):
    def loss(params, x):
        x = x @ params["Dense_0"]["kernel"]
        x = (x - jnp.mean(x, -1, keepdims=True)) * params["LayerNorm_0"]["scale"][None]
        return jnp.mean((jnp.tanh(x) @ params["Dense_1"]["kernel"] - 1) ** 2)

    params = {
        "Dense_0": {"kernel": normal(1, 8, 16)},
        "LayerNorm_0": {"scale": normal(2, 16)},
        "Dense_1": {"kernel": normal(3, 16, 8)},
    }
    batch = normal(0, DEVICES * ROWS, 8)

    @ols.autocast(level=level)
    def of_rounded(params, batch):
        return loss(optax.tree.cast(ols.cast_params(params), jnp.float32), batch)

    compiled, *args = compile_gradient(of_rounded, params, batch, is_split=is_split)
    assert summed_over_devices(compiled) == {"f16", "f32"}
    # Parameters of normalization layers are not rounded.
    in_float32 = {array for array in arrays_sent(compiled) if "f32" in array}
    assert in_float32 == {"f32[16]"}
    assert_close(compiled(*args), jax.jit(jax.grad(loss))(params, batch), 2e-2)
