"""`master_weights`: half-precision parameters that follow float32 masters.

Masters are full or compact; what only compact ones do is in test_compact_masters.py.
"""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compat import enable_x64
from helpers.inner import adam, lenient
from helpers.steps import apply, steps

RNG = np.random.default_rng(0)
UNSCALED = ols.static_loss_scale(1.0)
compact = functools.partial(ols.master_weights, compact=True)
full_or_compact = pytest.mark.parametrize(
    "make", [ols.master_weights, compact], ids=["full", "compact"]
)
# Full masters are the same in each dtype, and compact ones differ.
in_each_form = pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (ols.master_weights, jnp.float16),
        (compact, jnp.float16),
        (compact, jnp.bfloat16),
    ],
    ids=["full", "compact-float16", "compact-bfloat16"],
)
in_each_half = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])


@in_each_half
def test_parameters_are_rounded_masters_and_masters_follow_float32_training(dtype):
    start = jnp.asarray(RNG.normal(size=100), dtype)
    grads = jnp.asarray(RNG.normal(size=(20, 100)), dtype)
    history = steps(ols.master_weights(adam(1e-3)), start, grads)
    wide = [array.astype(jnp.float32) for array in (start, grads)]
    exact = steps(adam(1e-3), *wide)
    for (params, state), (expected, _) in zip(history, exact, strict=True):
        assert params.dtype == dtype
        np.testing.assert_array_equal(params, state.master_params.astype(dtype))
        np.testing.assert_allclose(state.master_params, expected, rtol=1e-5, atol=1e-7)


@full_or_compact
def test_a_parameter_that_falls_almost_to_zero_is_its_own_master(make):
    # -(1 + 2**-24) needs 25 bits, so the update can only lead to zero.
    params, tx = jnp.bfloat16(1.0), make(lenient(optax.sgd(1.0)))
    master = jnp.float32(1 - 2**-24)
    params, state = ols.set_full_masters(params, tx.init(params), master)
    assert params == 1.0
    _, (params, state) = steps(tx, params, [jnp.float32(1.0)], state=state)
    assert params == 0
    assert ols.full_masters(params, state) == 0


@full_or_compact
def test_other_parameters_move_as_they_do_without_masters(make):
    params = {
        "w": jnp.ones(3, jnp.float16),
        "norm": jnp.ones(3),
        "i": jnp.arange(3, dtype=jnp.int16),
        "none": None,
    }
    grads = params | {"i": jnp.zeros(3, jnp.int16), "norm": jnp.float32([1, 2, 3])}
    is_trained = {"w": True, "norm": True, "i": False, "none": None}
    inner = lenient(optax.masked(optax.adam(0.1), is_trained))
    *_, (moved, _) = steps(make(inner), params, [grads] * 3, run=lambda f: f)
    wide = [each | {"w": jnp.ones(3)} for each in (params, grads)]
    *_, (bare, _) = steps(inner, wide[0], wide[1:] * 3, run=lambda f: f)
    assert_same_bits(moved["norm"], bare["norm"])
    assert moved["w"].dtype == jnp.float16


@full_or_compact
def test_full_precision_parameters_can_be_changed_between_steps(make):
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = make(lenient(optax.adamw(0.1, weight_decay=0.5)))
    params["full"], state = 100 * params["full"], tx.init(params)
    updates, state = tx.update(zeros, state, params)
    np.testing.assert_allclose(updates["full"], -5.0)
    moved = apply(params, updates)
    np.testing.assert_allclose(ols.full_masters(moved, state)["full"], 95.0)


def around(make, is_outside):
    if is_outside:
        return make(ols.loss_scaled(adam()))
    return ols.loss_scaled(make(adam()))


@pytest.mark.parametrize("is_outside", [True, False])
@in_each_form
def test_a_skipped_step_changes_no_bit_of_parameters_and_masters(
    dtype, make, is_outside
):
    tx = around(make, is_outside)
    special = jnp.asarray([np.inf, -np.inf, 0.0, -0.0], dtype)
    weights = jnp.asarray(RNG.normal(size=40), dtype)
    params = {"w": weights, "norm": jnp.ones(3), "special": special}
    good = jax.tree.map(jnp.ones_like, params)
    bad = {**good, "w": good["w"].at[7].set(jnp.inf)}
    before, *skipped, after = steps(tx, params, [bad, bad, good])
    for params, state in skipped:
        assert_same_bits(params, before[0])
        assert_same_bits(ols.full_masters(params, state), ols.full_masters(*before))
        assert types(state) == types(before[1])
    first, last = before[1], skipped[-1][1]
    assert ols.get_loss_scale(last) == ols.get_loss_scale(first) / 4
    assert (after[0]["w"] != before[0]["w"]).any()


@full_or_compact
def test_a_float64_parameter_is_its_own_master(make):
    with enable_x64(True):
        params = {"w": jnp.ones(2, jnp.float16), "norm": jnp.ones(2, jnp.float64)}
        state = make(optax.sgd(0.1)).init(params)
        masters = {"w": jnp.float32([1, 2]), "norm": jnp.float64([0.1, 0.2])}
        params, state = ols.set_full_masters(params, state, masters)
        assert_same_bits(params["norm"], masters["norm"])
        assert_same_bits(ols.full_masters(params, state), masters)


@in_each_form
def test_masters_can_be_inside_or_outside_loss_scaled(dtype, make):
    params = jnp.asarray(RNG.normal(size=50), dtype)
    grads = jnp.asarray(RNG.normal(size=(4, 50)) * 2.0**15, jnp.float32)
    one, other = (
        steps(around(make, is_outside), params, grads, run=lambda f: f)[-1]
        for is_outside in (True, False)
    )
    assert_same_bits(one[0], other[0])
    assert_same_bits(ols.full_masters(*one), ols.full_masters(*other))


@pytest.mark.slow
@pytest.mark.several_devices
@full_or_compact
def test_masters_are_sharded_as_parameters_over_donated_steps_and_under_scan(make):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P("data"))
    params = {"w": jnp.ones(16, jnp.float16), "norm": jnp.ones(16)}
    params = jax.device_put(params, sharding)
    tx = ols.loss_scaled(make(adam()))
    state = jax.jit(tx.init)(params)

    def check(params, state):
        masters, stored = ols.full_masters(params, state), state.inner_state[0]
        for tree in (masters, stored):
            assert tree["w"].sharding.is_equivalent_to(sharding, 1)
        return masters

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(optax.tree.ones_like(params), state, params)
        return (apply(params, updates), state), None

    check(params, state)
    stepped = jax.jit(lambda *carry: step(carry, None)[0], donate_argnums=(0, 1))
    for _ in range(3):
        params, state = stepped(params, state)
        check(params, state)
    assert stepped._cache_size() <= 2
    (params, state), _ = jax.lax.scan(step, (params, state), None, length=3)
    assert params["w"].dtype == jnp.float16
    masters = check(params, state)
    check(*ols.set_full_masters(params, state, masters))


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@full_or_compact
def test_parameters_masters_and_inner_state_share_no_buffer(make):
    # The optimizer keeps a reference to the parameters that it was given.
    inner = optax.GradientTransformation(lambda params: params, optax.identity().update)
    half, full = jnp.ones(3, jnp.float16), jnp.ones(3)
    params = {"w": half, "norm": full, "i": jnp.arange(3), "b": full > 0}
    state = make(inner).init(params)
    stored, inner_state = state
    own = pointers((params, stored))
    assert len(set(own)) == len(own)
    assert not set(pointers(stored)) & set(pointers(inner_state))
    masters = {**params, "w": full / 3}
    moved, state = ols.set_full_masters(params, state, masters)
    held = pointers((masters, moved["w"], moved["norm"], state[0]))
    assert len(set(held)) == len(held)


@full_or_compact
def test_inside_loss_scaled_check_updates_catches_a_parameter_that_overflows(make):
    params = {"w": jnp.ones(2, jnp.float16)}
    tx = ols.loss_scaled(make(lenient(optax.sgd(1e5))), UNSCALED, check_updates=True)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["w"].tolist() == [0.0, 0.0]
    assert ols.full_masters(params, state)["w"].tolist() == [1.0, 1.0]
    assert state.loss_scale_state.total_notfinite == 1


@full_or_compact
def test_a_leaf_without_a_gradient_stays_and_keeps_its_master(make):
    others = {"frozen": jnp.ones(3), "h": jnp.float16(1), "i": jnp.arange(2)}
    params = {"w": jnp.ones(3, jnp.float16), "key": jax.random.key(0), **others}
    grads = dict.fromkeys(params) | {"w": jnp.ones(3)}
    for wrap in (lambda tx: tx, lambda tx: ols.loss_scaled(tx, UNSCALED)):
        tx = wrap(make(lenient(optax.sgd(0.5))))
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        assert apply(params["w"], updates["w"]).tolist() == [0.5, 0.5, 0.5]
        assert [updates[name] for name in ("frozen", "h", "key")] == [None] * 3
        assert_same_bits(updates["i"], jnp.zeros_like(params["i"]))
        masters = ols.full_masters(params, state)
        assert masters["h"] == 1.0
        assert not set(pointers(others)) & set(pointers(state))
        new_params, new_state = ols.set_full_masters(params, state, masters)
        assert_same_bits(new_params["i"], params["i"])
        assert_same_bits(ols.full_masters(new_params, new_state), masters)
        assert types(new_state) == types(state)


@pytest.mark.parametrize("wrap", [lambda tx: tx, ols.loss_scaled])
def test_parameters_may_be_python_numbers(wrap):
    params = {"number": 1.0, "half": jnp.float16(1.0)}
    tx = wrap(ols.master_weights(lenient(optax.sgd(0.25))))
    grads = ols.scale(params, tx.init(params)) if wrap is ols.loss_scaled else params
    _, *history = steps(tx, params, [grads] * 2, run=lambda f: f)
    for (moved, state), value in zip(history, (0.75, 0.5), strict=True):
        assert moved == {"number": value, "half": value}
        masters = optax.tree.get(state, "master_params")
        assert types(masters) == types({"number": jnp.ones(()), "half": jnp.ones(())})


@full_or_compact
@pytest.mark.parametrize("outside", [False, True])
def test_a_python_float_in_a_module_is_a_setting(make, outside):
    model = {"layer": eqx.nn.Dropout(0.5), "w": jnp.ones(3, jnp.float16)}
    tx = optax.sgd(0.5)
    tx = make(ols.loss_scaled(tx, UNSCALED)) if outside else ols.loss_scaled(make(tx))
    grads = {"layer": eqx.filter(model["layer"], eqx.is_array), "w": model["w"]}
    state = tx.init(model)
    updates, state = tx.update(grads, state, model)
    assert updates["layer"].p is None
    assert ols.full_masters(model, state)["layer"].p == 0.5


@full_or_compact
def test_abstract_parameters_have_masters_of_zero_and_abstract_states_describe_them(
    make,
):
    params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    tx = ols.loss_scaled(make(adam()))
    described = jax.eval_shape(tx.init, params)
    stored = tx.init(jax.eval_shape(lambda: params))
    chex.assert_trees_all_equal_shapes_and_dtypes(described, stored)
    assert stored.inner_state[0]["w"].tolist() == [0, 0]
    masters = ols.full_masters(params, described)
    assert (masters["w"].shape, masters["w"].dtype) == ((2,), jnp.float32)


@in_each_form
def test_a_step_can_be_differentiated(make, dtype):
    def moved(rate, params):
        tx = ols.loss_scaled(make(lenient(optax.sgd(rate))), UNSCALED)
        grads = params.astype(jnp.float32) ** 2
        updates, _ = tx.update(grads, tx.init(params), params)
        return apply(params, updates).astype(jnp.float32).sum()

    params = jnp.asarray([1.0, 2.0], dtype)
    slopes = jax.jit(jax.grad(moved, argnums=(0, 1)))(jnp.float32(0.25), params)
    # The sum of p - r p**2 has the slopes -p**2 and 1 - 2 r p.
    assert slopes[0] == -5.0
    assert slopes[1].tolist() == [0.5, 0.0]


@full_or_compact
def test_keras_options_that_change_parameters_go_inside_the_masters(make):
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    options = {"use_ema": True}, {"weight_decay": 0.1, "learning_rate": 0.1}
    for each in options:
        with pytest.raises(ValueError, match="must be inside `master_weights`, got"):
            ols.loss_scale_optimizer(make(optax.sgd(1e-4)), **each).init(params)
    inner = ols.loss_scale_optimizer(optax.sgd(2.0**-12), **options[0], **options[1])
    tx = lenient(make(inner))
    grads = ols.scale(jax.tree.map(jnp.ones_like, params), tx.init(params))
    *_, (params, _) = steps(tx, params, [grads] * 20)
    assert (params["w"] < 1).all()


def arrays(model):
    return [np.asarray(x) for x in jax.tree.leaves(model) if eqx.is_array(x)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype"), [(compact, jnp.bfloat16), (ols.master_weights, jnp.float16)]
)
def test_an_equinox_model_cast_back_after_each_step_is_the_rounded_float32_run(
    make, dtype
):
    dense = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    norm, dropout = eqx.nn.LayerNorm(4), eqx.nn.Dropout(0.5)
    model = {"dense": dense, "norm": norm, "dropout": dropout}
    model = ols.cast_params(model, dtype)
    tx = ols.loss_scaled(make(lenient(optax.sgd(2.0**-10))))
    state = tx.init(model)
    ones = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_array))
    grads = ols.scale(ones, state)

    @eqx.filter_jit
    def step(model, state):
        updates, state = tx.update(grads, state, model)
        with jax.numpy_dtype_promotion("standard"):
            not_cast_back = eqx.apply_updates(model, updates)
        return not_cast_back, ols.cast_params(not_cast_back, dtype), state

    expected_dtypes = [dtype, dtype, np.float32, np.float32]
    exact = [x.astype(np.float32) for x in arrays(model)]
    for _ in range(3):
        not_cast_back, model, state = step(model, state)
        exact = [x - np.float32(2.0**-10) for x in exact]
        masters = ols.full_masters(model, state)
        masters = arrays((masters["dense"], masters["norm"]))
        jax.tree.map(np.testing.assert_array_equal, masters, exact)
        assert [x.dtype for x in arrays(model)] == expected_dtypes
        assert {x.dtype for x in arrays(not_cast_back)} == {np.dtype(np.float32)}
    assert model["dropout"].p == 0.5
