"""The levels O0 to O3, and normalization layers under O2."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import optax_lossscale as ols
from helpers.programs import dtypes_of, equations_of
from helpers.under_autocast import HALF, W, X, assert_close, computed_in, dot_loss


def test_level_o0_is_the_function_itself():
    assert ols.autocast(dot_loss, level="O0")(W, X) == dot_loss(W, X)
    assert dtypes_of(ols.autocast(dot_loss, level="O0"), W, X) != [HALF]


def test_levels_o2_and_o3_compute_everything_but_sums_in_float16(capsys):
    def fun(w, x):
        return jnp.sum(jnp.exp(x @ w) + jnp.tanh(x), axis=0) / 3

    for level in ("O2", "O3"):
        found = computed_in(capsys, fun, W, X, level=level)
        assert (found["exp"], found["add"]) == ("float16", "float16")
        assert found["reduce_sum"] == "float32"
        assert_close(ols.autocast(fun, level=level)(W, X), fun(W, X))


def layer_norm(x, scale):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale


class LinenNorm:
    @staticmethod
    def make():
        layer = nn.LayerNorm()
        params = layer.init(jax.random.key(0), X)
        return layer.apply, params


class NnxNorm:
    @staticmethod
    def make():
        layer = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
        return (lambda layer, x: layer(x)), layer


class EquinoxNorm:
    @staticmethod
    def make():
        return (lambda layer, x: jax.vmap(layer)(x)), eqx.nn.LayerNorm(4)


class OwnNorm:
    @staticmethod
    def make():
        return (lambda params, x: layer_norm(x, params["norm"])), {"norm": jnp.ones(4)}


@pytest.mark.fast_every(4)
@pytest.mark.parametrize("kind", [LinenNorm, NnxNorm, EquinoxNorm, OwnNorm])
def test_level_o2_leaves_normalization_layers_in_float32(kind):
    apply, layer = kind.make()

    def fun(layer, w, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return apply(layer, 100 * (x @ w)) @ w

    def dtypes(level):
        program = jax.make_jaxpr(ols.autocast(fun, level=level))(layer, W, X)
        found = [e for e in equations_of(program) if e.primitive.name == "rsqrt"]
        assert len(found) == 1
        return found[0].invars[0].aval.dtype

    assert dtypes("O1") == jnp.float32
    assert dtypes("O2") == jnp.float32
    assert_close(ols.autocast(fun, level="O2")(layer, W, X), fun(layer, W, X))


def test_level_o2_casts_products_even_under_the_name_of_a_normalization_layer():
    class PreNorm(nn.Module):
        fun: nn.Module

        @nn.compact
        def __call__(self, x):
            with jax.named_scope("layer_norm"):
                return x + self.fun(nn.LayerNorm()(x))

    model = PreNorm(nn.Dense(4))
    with jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), X)
        assert dtypes_of(ols.autocast(model.apply, level="O2"), params, X) == [HALF]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_scalars_stay_in_float32(level):
    cast = ols.autocast(lambda s, t: (s * 2.0, s * t), level=level)
    double, product = cast(jnp.float32(1e5), jnp.float32(1e-9))
    np.testing.assert_allclose([double, product], [2e5, 1e-4], rtol=1e-6)


@pytest.mark.parametrize("move", [jnp.stack, lambda x: jnp.tile(x[0], (2, 1)), list])
def test_activations_that_are_stacked_or_repeated_stay_in_float16(move):
    def fun(w, x):
        h = x @ w
        return jax.tree.map(lambda h: h.astype(jnp.float16), move([h, h]))

    program = jax.make_jaxpr(ols.autocast(fun))(W, X)
    casts = [e for e in equations_of(program) if e.outvars[0].aval.dtype == jnp.float32]
    assert not casts
