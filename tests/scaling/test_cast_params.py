"""`cast_params`: half-precision parameters, and layers that stay in float32."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import optax_lossscale as ols


def dtypes(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "dtype")
    }


def test_in_linen_every_layer_but_normalization_is_cast():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=True)(nn.Dense(2)(x))
            x = nn.GroupNorm(1)(nn.RMSNorm()(nn.LayerNorm(name="ln_f")(x)))
            return nn.Dense(2, name="normalized_head")(x)

    variables = Net().init(jax.random.key(0), jnp.ones((1, 2)))
    found = dtypes(ols.cast_params(variables))
    halves = {path for path, dtype in found.items() if dtype == "float16"}
    assert halves == {
        f"params/{layer}/{name}"
        for layer in ("Dense_0", "normalized_head")
        for name in ("kernel", "bias")
    }
    assert len(found) == 4 + 2 + 2 + 2 + 1 + 2


def test_in_equinox_and_nnx_normalization_is_recognized_by_its_class():
    key = jax.random.key(0)
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=key), eqx.nn.LayerNorm(2)])
    half = ols.cast_params(model)
    assert half.layers[0].weight.dtype == jnp.float16
    assert half.layers[1].weight.dtype == jnp.float32

    module = nnx.Sequential(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.RMSNorm(2, rngs=nnx.Rngs(0))
    )
    half = ols.cast_params(module)
    assert half.layers[0].kernel.dtype == jnp.float16
    assert half.layers[1].scale.dtype == jnp.float32


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("transformer/~/layer_norm_1", True),
        ("resnet/~/initial_batchnorm", True),
        ("input_layernorm", True),
        ("norm1", True),
        ("bn2", True),
        ("ln_f", True),
        ("normalization", True),
        ("LayerNorm2d_0", True),
        ("ln_pre", True),
        ("norm_layer", True),
        ("layernorm_before", True),
        ("conv_bn1", True),
        ("q_norm", True),
        ("PreNorm_0", False),
        ("ConvNorm_0", False),
        ("BNReLU_0", False),
        ("NormalizedMLP_0", False),
        ("lng", False),
        ("abnormal", False),
        ("normal", False),
        ("bnb", False),
        ("linear", False),
    ],
)
def test_normalization_is_recognized_by_the_names_of_parameters(path, is_kept):
    params = {path: {"w": jnp.ones(2)}}
    dtype = ols.cast_params(params)[path]["w"].dtype
    assert dtype == (jnp.float32 if is_kept else jnp.float16)


def test_keep_is_called_with_path_and_leaf():
    params = {"a": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "norm": jnp.ones((2, 2))}
    half = ols.cast_params(params, jnp.bfloat16, keep=lambda path, leaf: leaf.ndim < 2)
    assert dtypes(half) == {"a/b": "float32", "a/w": "bfloat16", "norm": "bfloat16"}
    half = ols.cast_params(params, keep=lambda path, leaf: path == "a/w")
    assert dtypes(half) == {"a/b": "float16", "a/w": "float32", "norm": "float16"}


def test_leaves_of_other_dtypes_pass_through():
    params = {
        "i": jnp.arange(2),
        "c": jnp.ones(2, jnp.complex64),
        "q": jnp.ones(2, jnp.float8_e4m3fn),
        "k": jax.random.key(0),
        "n": None,
        "f": 1.5,
        "h": np.ones(2, np.float32),
    }
    half = ols.cast_params(params)
    assert half.pop("h").dtype == jnp.float16
    assert half == {name: leaf for name, leaf in params.items() if name != "h"}


def test_parameters_can_be_cast_back_to_float32_but_not_to_int32():
    params = {"w": jnp.float32([1.0, 0.1])}
    back = ols.cast_params(ols.cast_params(params), jnp.float32)
    np.testing.assert_array_equal(back["w"], np.float32(np.float16(params["w"])))
    with pytest.raises(ValueError, match="must be float16, bfloat16 or float32, got i"):
        ols.cast_params(params, jnp.int32)


def test_abstract_parameters_are_cast_and_keep_their_shardings():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    leaf = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    params = {"w": leaf, "LayerNorm_0": leaf, "count": count}
    half = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16, sharding=sharding)
    expected = {"w": half, "LayerNorm_0": leaf, "count": count}
    assert ols.cast_params(params, jnp.bfloat16) == expected


def test_abstract_parameters_are_cast_as_the_arrays_that_they_describe():
    def init(key):
        return nn.Dense(2).init(key, jnp.ones((1, 2)))

    shapes = jax.eval_shape(init, jax.random.key(0))
    expected = jax.eval_shape(lambda key: ols.cast_params(init(key)), jax.random.key(0))
    assert ols.cast_params(shapes) == expected


def test_what_is_no_array_is_not_cast_although_it_has_a_dtype():
    params = {"a": jnp.float32, "b": np.dtype("float32"), "c": nn.Dense(2, dtype="f4")}
    assert ols.cast_params(params) == params


def test_none_is_not_a_dtype_to_cast_to():
    with pytest.raises(ValueError, match="float16, bfloat16 or float32, got None"):
        ols.cast_params({"w": jnp.ones(1)}, None)
