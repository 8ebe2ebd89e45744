"""The levels O0 to O3 of docs/guides/autocast.md: which arguments are low inside."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import optax_lossscale as ols
from helpers.modules import Net
from helpers.under_autocast import W, X, assert_close, dot_loss, dtypes_of

O2, O3 = (functools.partial(ols.autocast, level=level) for level in ("O2", "O3"))
both = pytest.mark.parametrize("cast", [O2, O3], ids=["O2", "O3"])


def dtypes_seen(cast, *args, **kwargs):
    """The dtypes that a function finds in its arguments."""
    seen = []

    def fun(*args, **kwargs):
        leaves = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        for path, leaf in leaves:
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            seen.append((name, str(getattr(leaf, "dtype", None))))

    cast(fun)(*args, **kwargs)
    return dict(seen)


def test_level_o0_is_the_function_itself():
    cast = ols.autocast(dot_loss, level="O0")
    assert str(jax.make_jaxpr(cast)(W, X)) == str(jax.make_jaxpr(dot_loss)(W, X))
    assert cast(W, X) == dot_loss(W, X)


def test_a_function_sees_low_arguments_at_o2_and_o3_alone():
    params = {"w": W, "steps": jnp.arange(3), "half": W.astype(jnp.bfloat16)}
    for cast, low in [(ols.autocast, "float32"), (O2, "float16"), (O3, "float16")]:
        assert dtypes_seen(cast, params, x=np.asarray(X), flag=jnp.array(True)) == {
            "0/half": "bfloat16",
            "0/steps": "int32",
            "0/w": low,
            "flag": "bool",
            "x": low,
        }


@both
def test_all_activations_are_low_and_float16_results_become_float32(cast):
    seen, constant = [], jnp.ones((4, 4))

    def fun(w, x):
        h = jnp.exp(jnp.tanh(x @ w))
        seen.extend([h.dtype, jnp.sum(h).dtype])
        return h, h.astype(jnp.float32) @ constant, jnp.argmax(h), {"w": w}

    results = cast(fun)(W, X)
    assert seen == [jnp.float16] * 2
    dtypes = [x.dtype for x in jax.tree.leaves(results)]
    assert dtypes == [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    assert_close(results[0], jnp.exp(jnp.tanh(X @ W)))
    assert results[3]["w"] is W
    assert dtypes_of(cast(fun), W, X) == ["float16"] * 2


# --- Normalization layers and running statistics ----------------------------------


class EquinoxNet(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.dense = eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")


LINEN = {
    "params": {"Dense_0": {"kernel": W}, "BatchNorm_0": {"scale": W[0]}},
    "batch_stats": {"BatchNorm_0": {"mean": W[0], "var": W[0]}},
}
# Parts of the names of a weight, of a normalization layer's, and of a statistic.
NETS = {
    "linen": (lambda: LINEN, ("Dense_0", "params/BatchNorm_0", "batch_stats")),
    "nnx": (Net, ("linear/kernel", "norm/scale", "norm/mean")),
    "equinox": (
        eqx.nn.make_with_state(EquinoxNet),
        ("dense/weight", "norm/weight", "1/"),
    ),
}


def test_statistics_are_never_cast_and_o2_leaves_normalization_layers():
    for name, (make, parts) in NETS.items():
        for cast, of_norm in [(O2, "float32"), (O3, "float16")]:
            found = dtypes_seen(cast, make()).items()
            floating = [(path, dtype) for path, dtype in found if "float" in dtype]
            dtypes = [{x for path, x in floating if part in path} for part in parts]
            assert dtypes == [{"float16"}, {of_norm}, {"float32"}], name


def test_an_array_in_two_places_is_cast_in_one_of_them_by_its_place():
    zeros, seen = jnp.zeros(4), []
    params = {"Dense_0": {"bias": zeros}, "LayerNorm_0": {"bias": zeros}}

    def model(params):
        seen.append({name: str(x["bias"].dtype) for name, x in params.items()})

    O2(model)(params)
    jax.jit(O2(model))(params)
    assert seen == [{"Dense_0": "float16", "LayerNorm_0": "float32"}] * 2


class Tied(nnx.Module):
    """One variable in two layers."""

    def __init__(self):
        self.linear, self.other = (
            nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(2)
        )
        self.other.kernel = self.linear.kernel


@both
def test_a_variable_in_two_layers_is_cast_and_stays_one_variable(cast):
    net, seen = Tied(), []

    @cast
    def fun(net):
        assert net.linear.kernel is net.other.kernel
        seen.append(net.linear.kernel[...].dtype)

    fun(net)
    assert seen == [jnp.float16]
    assert net.linear.kernel is net.other.kernel
    assert net.linear.kernel[...].dtype == jnp.float32


# --- Errors -----------------------------------------------------------------------


def with_carry(x):
    return lax.scan(lambda _, row: (row, None), jnp.zeros(4), x)[0]


@pytest.mark.parametrize(
    ("cast", "fun", "x", "message", "has_note"),
    [
        (O2, with_carry, X, "type", True),
        (O2, lambda x: x @ x, X, "contracting dimensions", False),
        (ols.autocast, with_carry, X.astype(complex), "type", False),
    ],
)
def test_an_error_that_names_the_low_dtype_says_what_the_level_did(
    cast, fun, x, message, has_note
):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        cast(fun)(x)
    notes = "".join(getattr(error.value, "__notes__", []))
    assert ("traced the function with float16 arguments" in notes) == has_note
