"""`cast_params`: half-precision parameters, and layers that stay in float32."""

import re

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

    x = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    variables = jax.eval_shape(Net().init, jax.random.key(0), x)
    found = dtypes(ols.cast_params(variables))
    halves = {path for path, dtype in found.items() if dtype == "float16"}
    assert halves == {
        f"params/{layer}/{name}"
        for layer in ("Dense_0", "normalized_head")
        for name in ("kernel", "bias")
    }
    assert len(found) == 4 + 2 + 2 + 2 + 1 + 2


@pytest.mark.slow
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


KEPT = """
transformer/~/layer_norm_1 resnet/~/initial_batchnorm input_layernorm norm1 bn2 ln_f
normalization LayerNorm2d_0 ln_pre norm_layer layernorm_before conv_bn1 q_norm
col_norm GemmaNorm_0 T5Norm MyNorm_1 QKNorm ln/BatchNormalization MyNormalization_0
"""
CAST = """
PreNorm_0 ConvNorm_0 BNReLU_0 NormalizedMLP_0 lng abnormal normal bnb linear
Conv2dNorm_0 MyPostNorm SpectralNorm_0 L2Norm GlobalNorm NormBlock_0 Normalizer_0
"""


@pytest.mark.parametrize(
    ("paths", "expected"), [(KEPT, jnp.float32), (CAST, jnp.float16)]
)
def test_normalization_is_recognized_by_the_names_of_parameters(paths, expected):
    params = {path: np.ones(1, np.float32) for path in paths.split()}
    half = ols.cast_params({path: {"w": w} for path, w in params.items()})
    assert [path for path in half if half[path]["w"].dtype != expected] == []


class GemmaNorm(eqx.Module):
    weight: jax.Array


def test_a_norm_of_ones_own_is_recognized_by_its_class():
    model = [GemmaNorm(jnp.ones(2)), eqx.nn.Linear(2, 2, key=jax.random.key(0))]
    norm, linear = ols.cast_params(model)
    assert (norm.weight.dtype, linear.weight.dtype) == (jnp.float32, jnp.float16)


def test_keep_is_called_with_path_and_leaf():
    params = {"a": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "norm": jnp.ones((2, 2))}
    half = ols.cast_params(params, jnp.bfloat16, keep=lambda path, leaf: leaf.ndim < 2)
    assert dtypes(half) == {"a/b": "float32", "a/w": "bfloat16", "norm": "bfloat16"}
    half = ols.cast_params(params, keep=lambda path, leaf: path == "a/w")
    assert dtypes(half) == {"a/b": "float16", "a/w": "float32", "norm": "float16"}


def test_leaves_of_other_dtypes_and_what_is_no_array_pass_through():
    params = {
        "i": jnp.arange(2),
        "c": jnp.ones(2, jnp.complex64),
        "q": jnp.ones(2, jnp.float8_e4m3fn),
        "k": jax.random.key(0),
        "n": None,
        "f": 1.5,
        "dtype": np.dtype("float32"),
        "class": jnp.float32,
        "module": nn.Dense(2, dtype="f4"),
        "h": np.ones(2, np.float32),
    }
    half = ols.cast_params(params)
    assert half.pop("h").dtype == jnp.float16
    assert half == {name: leaf for name, leaf in params.items() if name != "h"}


def test_parameters_can_be_cast_back_to_float32_and_to_no_other_dtype():
    params = {"w": jnp.float32([1.0, 0.1])}
    back = ols.cast_params(ols.cast_params(params), jnp.float32)
    np.testing.assert_array_equal(back["w"], np.float32(np.float16(params["w"])))
    with pytest.raises(ValueError, match="float16, bfloat16 or float32, got float64"):
        ols.cast_params(params, jnp.float64)
    for dtype, name in (
        (jnp.int32, "<class 'jax.numpy.int32'>"),
        (None, "None"),
        ("fp16", "'fp16'. (Did you mean float16?)"),
    ):
        message = re.escape(f"must be a floating dtype, got {name}")
        with pytest.raises(TypeError, match=message):
            ols.cast_params(params, dtype)


@pytest.mark.several_devices
def test_abstract_parameters_are_cast_and_keep_their_shardings():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    leaf = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    params = {"w": leaf, "LayerNorm_0": leaf, "count": count}
    half = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16, sharding=sharding)
    expected = {"w": half, "LayerNorm_0": leaf, "count": count}
    assert ols.cast_params(params, jnp.bfloat16) == expected
