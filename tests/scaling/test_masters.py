"""`docs/guides/half_precision_parameters.md`: `cast_params`, and masters of them."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.inner import adam, lenient, standard_promotion
from helpers.steps import apply, steps

RNG = np.random.default_rng(0)
HALVES = ["float16", "bfloat16"]


def test_parameters_are_rounded_masters_and_masters_follow_float32_training():
    start = {dtype: jnp.asarray(RNG.normal(size=50), dtype) for dtype in HALVES}
    grads = [
        {dtype: jnp.asarray(RNG.normal(size=50), dtype) for dtype in HALVES}
        for _ in range(20)
    ]
    # Updates are float32: the parameters could not hold some of them.
    tx = ols.loss_scaled(ols.master_weights(adam(0.1)), ols.static_loss_scale(1.0))
    history = steps(tx, start, grads)
    exact = steps(adam(0.1), *optax.tree.cast((start, grads), jnp.float32))
    for (params, state), (expected, _) in zip(history, exact, strict=True):
        masters = state.inner_state.master_params
        for dtype in HALVES:
            assert_same_bits(params[dtype], masters[dtype].astype(dtype))
            np.testing.assert_allclose(
                masters[dtype], expected[dtype], rtol=1e-5, atol=1e-6
            )


def test_small_updates_add_up_in_the_masters():
    # Each is a quarter of the spacing below 1 in float16.
    tx = ols.master_weights(lenient(optax.sgd(2.0**-13)))
    history = steps(tx, jnp.float16(1.0), [jnp.float16(1.0)] * 4)
    assert [float(params) for params, _ in history] == [1, 1, 1, 1 - 2**-11, 1 - 2**-11]
    masters = [float(state.master_params) for _, state in history]
    assert masters == [1 - i * 2.0**-13 for i in range(5)]


@pytest.mark.parametrize(
    ("place", "dtype"), [("inside", "float16"), ("outside", "bfloat16")]
)
def test_a_skipped_step_changes_no_bit_of_parameters_and_masters(dtype, place):
    rule = ols.dynamic_loss_scale(2.0**4)
    if place == "inside":
        tx = ols.loss_scaled(ols.master_weights(adam()), rule)
    else:
        tx = ols.master_weights(ols.loss_scaled(adam(), rule))
    special = jnp.asarray([np.inf, -np.inf, 0.0, -0.0], dtype)
    weights = jnp.asarray(RNG.normal(size=40), dtype)
    params = {"w": weights, "norm": jnp.ones(3), "special": special}
    good = jax.tree.map(jnp.ones_like, params)
    bad = {**good, "w": good["w"].at[7].set(jnp.inf)}
    before, *skipped, after = steps(tx, params, [bad, bad, good])
    for params, state in skipped:
        assert_same_bits(params, before[0])
        masters = (optax.tree.get(each, "master_params") for each in (state, before[1]))
        assert_same_bits(*masters)
        assert types(state) == types(before[1])
    assert ols.get_loss_scale(skipped[-1][1]) == 4.0
    assert (after[0]["w"] != before[0]["w"]).any()


def test_masters_see_unscaled_gradients_in_float32_and_float32_parameters_themselves():
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2), "i": jnp.arange(2)}
    tx = ols.loss_scaled(
        ols.master_weights(lenient(optax.sgd(0.5))), ols.static_loss_scale(2.0**10)
    )
    state = tx.init(params)
    grads = {"half": jnp.full(2, 2.0**-4, jnp.float16), "full": jnp.full(2, 2.0**10)}
    grads["i"] = np.zeros(2, jax.dtypes.float0)
    updates, after = tx.update(grads, state, params)
    masters = after.inner_state.master_params
    assert masters["half"].tolist() == [1 - 2.0**-15] * 2
    moved = apply(params, updates)
    assert moved["full"].tolist() == [0.5, 0.5]
    assert_same_bits(moved["half"], params["half"])
    assert_same_bits(moved["i"], params["i"])


def test_a_float32_parameter_that_was_changed_elsewhere_keeps_its_new_value():
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2)}
    decayed = optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.5))
    tx = ols.master_weights(lenient(decayed))
    state = tx.init(params)
    params["full"] = 100 * params["full"]
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert apply(params, updates)["full"].tolist() == [49.5, 49.5]


def test_steps_run_in_a_scan_are_donated_and_share_no_buffer():
    params = {"w": jnp.ones(3, jnp.float16), "norm": jnp.ones(3)}
    tx = ols.loss_scaled(ols.master_weights(adam()))
    leaves = jax.tree.leaves((params, tx.init(params)))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)

    def body(carry, size):
        params, state = carry
        grads = jax.tree.map(lambda p: p * size.astype(p.dtype), params)
        updates, state = tx.update(grads, state, params)
        return (apply(params, updates), state), None

    first = params, tx.init(params)
    sizes = jnp.asarray([1.0, jnp.nan, 1.0])
    (moved, state), _ = jax.lax.scan(body, first, sizes)
    assert types((moved, state)) == types(first)
    assert state.loss_scale_state.total_notfinite == 1


def test_update_needs_parameters_and_a_state_of_its_own():
    tx, params = ols.master_weights(optax.sgd(0.1)), jnp.ones(2, jnp.float16)
    with pytest.raises(ValueError, match="needs `params`"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"To add masters to a run"):
        tx.update(params, optax.sgd(0.1).init(params), params)


# --- Casts ---------------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.LayerNorm()(nn.Conv(2, (1,))(x)))


def test_in_linen_every_layer_but_normalization_is_cast():
    with standard_promotion():
        params = Net().init(jax.random.key(0), jnp.ones((1, 2, 2)))["params"]
    cast = ols.cast_params(params)
    dtypes = {
        name: {x.dtype.name for x in jax.tree.leaves(cast[name])} for name in cast
    }
    half = {"float16"}
    assert dtypes == {"Conv_0": half, "Dense_0": half, "LayerNorm_0": {"float32"}}
    assert_same_bits(cast["Dense_0"]["bias"], jnp.zeros(2, jnp.float16))


def test_in_equinox_normalization_is_recognized_by_its_class():
    key = jax.random.key(0)
    model = [eqx.nn.Linear(2, 2, key=key), eqx.nn.LayerNorm(2), jnp.arange(2), "text"]
    linear, norm, number, text = ols.cast_params(model, jnp.bfloat16)
    assert linear.weight.dtype == jnp.bfloat16
    assert norm.weight.dtype == jnp.float32
    assert number is model[2]
    assert text == "text"


def test_keep_is_called_with_path_and_leaf_and_all_can_be_cast_back():
    params = {"layer": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
    cast = ols.cast_params(params, keep=lambda path, leaf: path == "layer/bias")
    assert cast["layer"]["kernel"].dtype == jnp.float16
    assert cast["layer"]["bias"].dtype == jnp.float32
    assert_same_bits(ols.cast_params(cast, jnp.float32), params)
    with pytest.raises(
        ValueError, match="`dtype` must be float16, bfloat16 or float32"
    ):
        ols.cast_params(params, jnp.float64)


def test_an_equinox_model_that_is_cast_back_after_each_step_follows_its_masters():
    model = ols.cast_params(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    tx = ols.loss_scaled(ols.master_weights(lenient(optax.sgd(2.0**-13))))
    state = tx.init(model)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 2.0**15, jnp.float32), model)
    for _ in range(3):
        updates, state = tx.update(grads, state, model)
        with standard_promotion():
            model = ols.cast_params(eqx.apply_updates(model, updates))
    assert model.weight.dtype == jnp.float16
    masters = state.inner_state.master_params.weight
    assert_same_bits(model.weight, masters.astype(jnp.float16))
