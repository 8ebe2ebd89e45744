"""cast_params and master_weights."""

import pickle

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from inner import adam, lenient
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

RNG = np.random.default_rng(0)
HALVES = [jnp.float16, jnp.bfloat16]


def apply(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def dtypes(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "dtype")
    }


# cast_params.


def test_layers_are_cast_and_normalization_is_not_in_linen():
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


def test_normalization_is_known_by_its_class_in_equinox_and_nnx():
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
def test_names_of_normalization_layers(path, is_kept):
    params = {path: {"w": jnp.ones(2)}}
    dtype = ols.cast_params(params)[path]["w"].dtype
    assert dtype == (jnp.float32 if is_kept else jnp.float16)


def test_keep_decides_by_path_and_leaf():
    params = {"a": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "norm": jnp.ones((2, 2))}
    half = ols.cast_params(params, jnp.bfloat16, keep=lambda path, leaf: leaf.ndim < 2)
    assert dtypes(half) == {"a/b": "float32", "a/w": "bfloat16", "norm": "bfloat16"}
    half = ols.cast_params(params, keep=lambda path, leaf: path == "a/w")
    assert dtypes(half) == {"a/b": "float16", "a/w": "float32", "norm": "float16"}


def test_what_is_no_half_or_float32_passes_through():
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


def test_the_way_back_and_what_is_refused():
    params = {"w": jnp.float32([1.0, 0.1])}
    back = ols.cast_params(ols.cast_params(params), jnp.float32)
    np.testing.assert_array_equal(back["w"], np.float32(np.float16(params["w"])))
    with pytest.raises(ValueError, match="must be float16, bfloat16 or float32, got i"):
        ols.cast_params(params, jnp.int32)


# master_weights.


def steps(tx, params, grads_of, count=20):
    state = tx.init(params)
    history = []
    for i in range(count):
        updates, state = tx.update(grads_of(i), state, params)
        params = apply(params, updates)
        history.append((params, state))
    return history


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_are_the_rounded_masters_and_masters_those_of_float32(dtype):
    start = jnp.asarray(RNG.normal(size=100), dtype)
    grads = jnp.asarray(RNG.normal(size=(20, 100)), dtype)
    history = steps(ols.master_weights(adam(1e-3)), start, lambda i: grads[i])
    exact = steps(
        adam(1e-3), start.astype(jnp.float32), lambda i: grads[i].astype(jnp.float32)
    )
    for (params, state), (expected, _) in zip(history, exact, strict=True):
        assert params.dtype == dtype
        np.testing.assert_array_equal(params, state.master_params.astype(dtype))
        np.testing.assert_allclose(state.master_params, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_jitted", [False, True])
def test_whatever_the_step_the_parameter_is_the_rounded_master(dtype, is_jitted):
    bits = RNG.integers(0, 2**16, size=(2, 50_000)).astype(np.uint16)
    start, target = (np.nan_to_num(x.view(dtype).astype(np.float32)) for x in bits)
    limit = float(jnp.finfo(dtype).max) / 4  # Beyond, differences overflow.
    start, target = np.clip(start, -limit, limit), np.clip(target, -limit, limit)
    # Half of them near the middle between two neighbours, where rounding turns.
    neighbour = np.nextafter(target.astype(dtype), np.array(np.inf, dtype))
    middle = (target.astype(np.float64) + neighbour.astype(np.float64)) / 2
    target = np.where(RNG.random(50_000) < 0.5, middle, target).astype(np.float32)
    params = jnp.asarray(start, dtype)
    tx = ols.master_weights(lenient(optax.sgd(1.0)))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    grads = params.astype(jnp.float32) - target
    step = jax.jit(step) if is_jitted else step
    params, state = step(params, tx.init(params), grads)
    np.testing.assert_array_equal(params, state.master_params.astype(dtype))


def test_a_parameter_that_falls_to_nearly_nothing_takes_its_master_along():
    params = jnp.float16(60_000.0)
    tx = ols.master_weights(lenient(optax.sgd(1.0)))
    grad = params.astype(jnp.float32) - 2.0**-24
    updates, state = tx.update(grad, tx.init(params), params)
    params = apply(params, updates)
    assert params == state.master_params.astype(jnp.float16)


def test_small_updates_add_up():
    history = steps(
        ols.master_weights(lenient(optax.sgd(1e-4))),
        jnp.float16(1.0),
        lambda i: jnp.float16(1.0),
        100,
    )
    params, state = history[-1]
    np.testing.assert_allclose(state.master_params, 0.99, rtol=1e-5)
    assert params == jnp.float16(0.99)
    bare = jnp.float16(1.0)
    assert bare - jnp.float16(1e-4) == bare


def test_float32_parameters_move_as_without_it():
    params = {"w": jnp.ones(3, jnp.float16), "norm": jnp.ones(3), "i": jnp.arange(3)}
    grads = {"w": jnp.ones(3), "norm": jnp.asarray([0.1, 0.2, 0.3]), "i": jnp.arange(3)}

    def inner():
        tree = {"w": True, "norm": True, "i": False}
        return lenient(optax.masked(optax.adam(0.1), tree))

    (with_masters, _), *_ = steps(
        ols.master_weights(inner()), params, lambda i: grads, 1
    )
    (without, _), *_ = steps(inner(), params, lambda i: grads, 1)
    np.testing.assert_array_equal(with_masters["norm"], without["norm"])
    assert with_masters["w"].dtype == jnp.float16


def test_float32_parameters_that_others_changed_are_taken_as_they_are():
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = ols.master_weights(lenient(optax.adamw(0.1, weight_decay=0.5)))
    state = tx.init(params)
    params = {"half": params["half"], "full": 100 * params["full"]}
    updates, state = tx.update(zeros, state, params)
    np.testing.assert_allclose(updates["full"], -5.0)
    np.testing.assert_allclose(state.master_params["full"], 95.0)


@pytest.mark.parametrize("is_outside", [True, False])
def test_with_a_loss_scale_a_bad_step_changes_no_bit_of_anything(is_outside):
    if is_outside:
        tx = ols.master_weights(ols.loss_scaled(adam()))
    else:
        tx = ols.loss_scaled(ols.master_weights(adam()))
    params = {"w": jnp.asarray(RNG.normal(size=4), jnp.float16)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    good = {"w": jnp.float16([1.0, -2.0, 3.0, 0.5])}
    bad = {"w": jnp.float16([1.0, jnp.inf, 3.0, 0.5])}
    params, state = step(params, state, good)
    after, skipped = step(params, state, bad)
    chex.assert_trees_all_equal(after, params)
    assert ols.get_loss_scale(skipped) == ols.get_loss_scale(state) / 2
    fields = (optax.tree.get(s, "master_params") for s in (state, skipped))
    chex.assert_trees_all_equal(*fields)
    chex.assert_trees_all_equal_dtypes(state, skipped)
    after, _ = step(after, skipped, good)
    assert (after["w"] != params["w"]).all()


def test_the_order_around_a_loss_scale_does_not_matter():
    params = jnp.asarray(RNG.normal(size=50), jnp.float16)
    grads = jnp.asarray(RNG.normal(size=(20, 50)) * 2.0**15, jnp.float32)
    outside = ols.master_weights(ols.loss_scaled(adam()))
    inside = ols.loss_scaled(ols.master_weights(adam()))
    (one, _), (other, _) = (
        steps(tx, params, lambda i: grads[i])[-1] for tx in (outside, inside)
    )
    np.testing.assert_array_equal(one, other)


def test_it_runs_in_a_scan_donated_and_sharded_without_a_second_compilation():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P("data"))
    params = {"w": jax.device_put(jnp.ones(16, jnp.float16), sharding)}
    params["norm"] = jax.device_put(jnp.ones(16), sharding)
    tx = ols.loss_scaled(ols.master_weights(adam()))
    state = jax.jit(tx.init)(params)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(optax.tree.ones_like(params), state, params)
        return (apply(params, updates), state), None

    stepped = jax.jit(lambda *carry: step(carry, None)[0], donate_argnums=(0, 1))
    for _ in range(3):
        params, state = stepped(params, state)
        masters = optax.tree.get(state, "master_params")
        assert masters["w"].sharding.is_equivalent_to(sharding, 1)
    assert stepped._cache_size() <= 2
    (params, state), _ = jax.lax.scan(step, (params, state), None, length=3)
    assert params["w"].dtype == jnp.float16


def test_its_state_survives_pickle_and_every_field_is_its_own_buffer():
    params = {"w": jnp.ones(3, jnp.float16), "norm": jnp.ones(3)}
    tx = ols.master_weights(adam())
    state = tx.init(params)
    chex.assert_trees_all_equal(pickle.loads(pickle.dumps(state)), state)
    leaves = jax.tree.leaves((params, state))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_inside_a_loss_scale_check_updates_sees_a_parameter_overflow():
    params = {"w": jnp.ones(2, jnp.float16)}
    rule = ols.static_loss_scale(1.0)
    inner = ols.master_weights(lenient(optax.sgd(1e5)))
    tx = ols.loss_scaled(inner, rule, check_updates=True)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["w"].tolist() == [0.0, 0.0]
    assert state.inner_state.master_params["w"].tolist() == [1.0, 1.0]
    assert state.loss_scale_state.total_notfinite == 1


def test_what_it_needs_and_what_it_refuses():
    tx = ols.master_weights(adam())
    params = jnp.ones(2, jnp.float16)
    with pytest.raises(ValueError, match="needs `params`"):
        tx.update(params, tx.init(params))
    with pytest.raises(TypeError, match="`inner` must be an optimizer"):
        ols.master_weights(optax.adam)
