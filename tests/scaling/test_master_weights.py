"""`master_weights`: half-precision parameters that follow float32 masters."""

import pickle

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import types
from helpers.inner import adam, lenient

RNG = np.random.default_rng(0)
HALVES = [jnp.float16, jnp.bfloat16]


def apply(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def steps(tx, params, grads_of, count=20):
    state = tx.init(params)
    history = []
    for i in range(count):
        updates, state = tx.update(grads_of(i), state, params)
        params = apply(params, updates)
        history.append((params, state))
    return history


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_are_rounded_masters_and_masters_follow_float32_training(dtype):
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
def test_the_parameter_is_the_rounded_master_after_a_step_of_any_size(dtype, is_jitted):
    bits = RNG.integers(0, 2**16, size=(2, 50_000)).astype(np.uint16)
    start, target = (np.nan_to_num(x.view(dtype).astype(np.float32)) for x in bits)
    limit = float(jnp.finfo(dtype).max) / 4  # Differences of larger values overflow.
    start, target = np.clip(start, -limit, limit), np.clip(target, -limit, limit)
    # Half of the targets are midway between neighbours, where rounding changes.
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


def test_the_parameter_is_the_rounded_master_after_falling_almost_to_zero():
    params = jnp.float16(60_000.0)
    tx = ols.master_weights(lenient(optax.sgd(1.0)))
    grad = params.astype(jnp.float32) - 2.0**-24
    updates, state = tx.update(grad, tx.init(params), params)
    params = apply(params, updates)
    assert params == state.master_params.astype(jnp.float16)


def test_updates_too_small_for_float16_add_up_in_the_master():
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


def test_float32_parameters_move_as_they_do_without_master_weights():
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


def test_float32_parameters_can_be_changed_between_steps():
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = ols.master_weights(lenient(optax.adamw(0.1, weight_decay=0.5)))
    state = tx.init(params)
    params = {"half": params["half"], "full": 100 * params["full"]}
    updates, state = tx.update(zeros, state, params)
    np.testing.assert_allclose(updates["full"], -5.0)
    np.testing.assert_allclose(state.master_params["full"], 95.0)


@pytest.mark.parametrize("is_outside", [True, False])
def test_with_a_loss_scale_a_bad_step_changes_neither_parameters_nor_masters(
    is_outside,
):
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


def test_master_weights_can_be_inside_or_outside_loss_scaled():
    params = jnp.asarray(RNG.normal(size=50), jnp.float16)
    grads = jnp.asarray(RNG.normal(size=(20, 50)) * 2.0**15, jnp.float32)
    outside = ols.master_weights(ols.loss_scaled(adam()))
    inside = ols.loss_scaled(ols.master_weights(adam()))
    (one, _), (other, _) = (
        steps(tx, params, lambda i: grads[i])[-1] for tx in (outside, inside)
    )
    np.testing.assert_array_equal(one, other)


def test_masters_keep_their_sharding_over_donated_steps_and_under_scan():
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
    masters = optax.tree.get(state, "master_params")
    assert masters["w"].sharding.is_equivalent_to(sharding, 1)


def test_the_state_can_be_pickled_and_no_two_fields_share_a_buffer():
    params = {"w": jnp.ones(3, jnp.float16), "norm": jnp.ones(3)}
    tx = ols.master_weights(adam())
    state = tx.init(params)
    chex.assert_trees_all_equal(pickle.loads(pickle.dumps(state)), state)
    leaves = jax.tree.leaves((params, state))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_inside_loss_scaled_check_updates_catches_a_parameter_that_overflows():
    params = {"w": jnp.ones(2, jnp.float16)}
    rule = ols.static_loss_scale(1.0)
    inner = ols.master_weights(lenient(optax.sgd(1e5)))
    tx = ols.loss_scaled(inner, rule, check_updates=True)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["w"].tolist() == [0.0, 0.0]
    assert state.inner_state.master_params["w"].tolist() == [1.0, 1.0]
    assert state.loss_scale_state.total_notfinite == 1


def test_missing_params_and_a_wrong_inner_optimizer_are_refused():
    tx = ols.master_weights(adam())
    params = jnp.ones(2, jnp.float16)
    with pytest.raises(ValueError, match="needs `params`"):
        tx.update(params, tx.init(params))
    with pytest.raises(TypeError, match="`inner` must be an optimizer"):
        ols.master_weights(optax.adam)


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def keeps_parameters():
    """An optimizer that keeps a reference to the parameters that it was given."""

    def update(updates, state, params=None):
        return updates, state

    return optax.GradientTransformation(lambda params: params, update)


@pytest.mark.parametrize("inner", [adam(), keeps_parameters()])
def test_parameters_of_every_kind_can_be_donated_with_their_masters(inner):
    params = {"w": jnp.ones(3, jnp.float16), "i": jnp.arange(3), "b": jnp.ones(3) > 0}
    state = ols.master_weights(inner).init(params)
    masters = state.master_params
    assert len(set(pointers((params, masters)))) == 6
    assert not set(pointers(masters)) & set(pointers(state.inner_state))


def test_a_parameter_without_a_gradient_stays_and_keeps_its_own_buffer():
    params = {"w": jnp.ones(3, jnp.float16), "frozen": jnp.ones(3), "h": jnp.float16(1)}
    grads = {"w": jnp.ones(3), "frozen": None, "h": None}
    tx = ols.master_weights(lenient(optax.sgd(0.5)))
    step = jax.jit(lambda p, s: tx.update(grads, s, p))
    updates, state = step(params, tx.init(params))
    assert apply(params["w"], updates["w"]).tolist() == [0.5, 0.5, 0.5]
    assert (updates["frozen"], updates["h"]) == (None, None)
    assert state.master_params["h"].dtype == jnp.float32
    assert not set(pointers(params)) & set(pointers(state))


@pytest.mark.parametrize(
    "wrap",
    [
        ols.master_weights,
        lambda inner: ols.loss_scaled(
            ols.master_weights(inner), ols.static_loss_scale(1.0)
        ),
    ],
)
def test_parameters_may_be_python_numbers(wrap):
    params = {"number": 1.0, "half": jnp.float16(1.0)}
    history = steps(wrap(lenient(optax.sgd(0.25))), params, lambda i: params, 2)
    for (moved, state), value in zip(history, (0.75, 0.5), strict=True):
        assert moved == {"number": value, "half": value}
        masters = optax.tree.get(state, "master_params")
        assert types(masters) == types({"number": jnp.ones(()), "half": jnp.ones(())})


def test_masters_of_abstract_parameters_are_zero():
    params = {"w": jax.ShapeDtypeStruct((2,), jnp.float16)}
    state = ols.master_weights(adam()).init(params)
    assert state.master_params["w"].tolist() == [0.0, 0.0]
    assert state.master_params["w"].dtype == jnp.float32


class EquinoxModel(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout


def arrays(model):
    return [np.asarray(x) for x in jax.tree.leaves(model) if eqx.is_array(x)]


@pytest.mark.parametrize("dtype", HALVES)
def test_an_equinox_model_cast_back_after_each_step_is_the_rounded_float32_run(dtype):
    dense = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    model = EquinoxModel(dense, eqx.nn.LayerNorm(4), eqx.nn.Dropout(0.5))
    model = ols.cast_params(model, dtype)
    dtypes = [dtype, dtype, jnp.float32, jnp.float32]
    tx = ols.loss_scaled(ols.master_weights(optax.sgd(2.0**-12)))
    state = tx.init(model)

    def add(model, grads, state):
        updates, state = tx.update(grads, state, model)
        with jax.numpy_dtype_promotion("standard"):
            return eqx.apply_updates(model, updates), state

    @eqx.filter_jit
    def step(model, grads, state):
        model, state = add(model, grads, state)
        return ols.cast_params(model, dtype), state

    def all_equal_to(value):
        params = eqx.filter(model, eqx.is_array)
        return ols.scale(optax.tree.full_like(params, value), state)

    exact = [x.astype(np.float32) for x in arrays(model)]
    for value in (1.0, 2.0, -1.0, 3.0, 1.0):
        model, state = step(model, all_equal_to(value), state)
        exact = [x - np.float32(2.0**-12 * value) for x in exact]
        assert [x.dtype for x in arrays(model)] == dtypes
        for x, master in zip(arrays(model), exact, strict=True):
            np.testing.assert_array_equal(x, master.astype(x.dtype))
    masters = arrays(state.inner_state.master_params)
    jax.tree.map(np.testing.assert_array_equal, masters, exact)
    assert model.dropout.p == 0.5
    not_cast_back, _ = add(model, all_equal_to(1.0), state)
    assert {x.dtype for x in arrays(not_cast_back)} == {np.dtype(np.float32)}
