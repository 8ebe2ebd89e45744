"""Normalization layers at O2: recognized by whole names, wherever JAX traces them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import optax_lossscale as ols
from helpers.programs import equations_of
from helpers.under_autocast import W, X


def dtypes_of_tanh(fun, *args):
    """The dtypes in which `tanh` computes at O2: float32 in normalization layers."""
    program = jax.make_jaxpr(ols.autocast(fun, level="O2"))(*args)
    found = [e for e in equations_of(program) if e.primitive.name == "tanh"]
    assert found
    return {equation.invars[0].aval.dtype.name for equation in found}


def layer_norm(x):
    return jnp.tanh(x)  # Whatever a function of this name computes is normalization.


def block(x):
    return jnp.tanh(x)


def under_shard_map(fun):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)


def under_custom_vjp(fun):
    wrapped = jax.custom_vjp(fun)
    wrapped.defvjp(lambda x: (fun(x), x), lambda x, ct: jax.vjp(fun, x)[1](ct))
    return wrapped


def under_custom_jvp(fun):
    wrapped = jax.custom_jvp(fun)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return wrapped


TRACED_APART = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": jax.vmap,
    "scan": lambda fun: lambda x: lax.scan(lambda c, row: (c, fun(row @ W)), 0, x)[1],
    "cond": lambda fun: lambda x: lax.cond(x[0, 0] > 0, lambda x: fun(x @ W), fun, x),
    "while": lambda fun: (
        lambda x: lax.while_loop(lambda x: x[0, 0] > 9, lambda x: fun(x @ W), x)
    ),
    "map": lambda fun: lambda x: lax.map(lambda row: fun(row @ W), x),
    "shard_map": under_shard_map,
    "custom_jvp": under_custom_jvp,
    "custom_vjp": under_custom_vjp,
    "jit of checkpoint": lambda fun: jax.jit(jax.checkpoint(fun)),
    "gradient": lambda fun: jax.grad(lambda x: jnp.sum(jax.jit(fun)(x))),
}


@pytest.mark.parametrize("name", TRACED_APART)
def test_a_layer_keeps_its_float32_inside(name):
    apart = TRACED_APART[name]
    assert dtypes_of_tanh(lambda x: apart(layer_norm)(x @ W), X) == {"float32"}


@pytest.mark.parametrize("name", TRACED_APART)
def test_what_a_layer_calls_belongs_to_it_inside(name):
    apart = TRACED_APART[name]

    def fun(x):
        with jax.named_scope("encoder/norm1"):
            return apart(lambda x: jnp.tanh(x))(x @ W)

    assert dtypes_of_tanh(fun, X) == {"float32"}


@pytest.mark.parametrize("name", ["jit", "checkpoint", "vmap", "shard_map"])
def test_a_function_of_another_name_stays_low_inside(name):
    apart = TRACED_APART[name]
    assert dtypes_of_tanh(lambda x: apart(block)(x @ W), X) == {"float16"}


def test_the_derivative_rules_of_a_layer_belong_to_it():
    rms_norm = jax.custom_vjp(layer_norm)
    rms_norm.defvjp(
        lambda x: (jnp.tanh(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),)
    )
    cast = ols.autocast(lambda x: rms_norm(x @ W), level="O2")
    program = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(cast(x))))(X)
    found = [e for e in equations_of(program) if e.primitive.name == "tanh"]
    assert [e.invars[0].aval.dtype.name for e in found] == ["float32"] * 2


def test_a_helper_that_jax_traced_in_a_layer_is_low_elsewhere():
    helper = jax.jit(block)

    def norm(x):
        return helper(x)

    assert dtypes_of_tanh(lambda x: norm(x @ W), X) == {"float32"}
    assert dtypes_of_tanh(lambda x: helper(x @ W), X) == {"float16"}


def test_own_classes_are_recognized_by_their_names_and_methods():
    class MyLayerNorm(nnx.Module):
        def __call__(self, x):
            return jnp.tanh(x)

    class NormMLP(nnx.Module):
        def __call__(self, x):
            return jnp.tanh(x)

        def batch_norm(self, x):
            return jnp.tanh(x)

    assert dtypes_of_tanh(lambda x: jax.jit(MyLayerNorm())(x @ W), X) == {"float32"}
    assert dtypes_of_tanh(lambda x: jax.jit(NormMLP())(x @ W), X) == {"float16"}
    assert dtypes_of_tanh(lambda x: NormMLP().batch_norm(x @ W), X) == {"float32"}


def test_a_function_inside_a_test_of_a_layer_norm_is_not_a_layer():
    def test_layer_norm():
        return dtypes_of_tanh(lambda x: jnp.tanh(x @ W), X)

    assert test_layer_norm() == {"float16"}


def test_what_a_factory_of_layers_returns_is_a_layer():
    def rms_norm(scale):
        return lambda x: scale * jnp.tanh(x)

    layer = rms_norm(2.0)
    assert dtypes_of_tanh(lambda x: layer(x @ W), X) == {"float32"}


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("LayerNorm_0", True),
        ("BatchNorm2d", True),
        ("batch_norm_1", True),
        ("InstanceNorm", True),
        ("MyRMSNorm", True),
        ("rms_norm", True),
        ("ScaleNorm_1", True),
        ("norm1", True),
        ("ln_1", True),
        ("pre_norm", True),
        ("norm_mlp", False),
        ("pre_norm_block", False),
        ("layer_norm_mlp", False),
        ("LayerNormMLP_0", False),
        ("NormAct", False),
        ("normalize_inputs", False),
        ("denormalize", False),
        ("normal_init", False),
        ("norm_free_block", False),
        ("global_norm", False),
        ("l2_norm", False),
        ("weight_norm", False),
        ("full_precision_head", False),
    ],
)
def test_a_module_is_recognized_by_its_whole_name(name, is_one):
    class Tanh(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(x)

    found = dtypes_of_tanh(lambda x: Tanh(name=name).apply({}, x @ W), X)
    assert found == {"float32" if is_one else "float16"}


def test_lengths_of_vectors_are_not_layers():
    def fun(x):
        y = x @ W
        clipped, _ = optax.clip_by_global_norm(1.0).update(y, optax.EmptyState())
        return clipped + jnp.linalg.norm(y, axis=-1, keepdims=True)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program = jax.make_jaxpr(ols.autocast(fun, level="O2"))(X)
    # In a normalization layer the result of this sum would stay in float32.
    assert program.eqns[-2].outvars[0].aval.dtype == jnp.float16
