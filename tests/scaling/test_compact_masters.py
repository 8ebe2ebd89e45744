"""`master_weights(compact=True)`: masters that take 16 bits beside the parameters."""

import pickle

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compat import IS_JAX_0_7
from helpers.inner import adam, lenient
from helpers.programs import casts_left_out_on_gpu

RNG = np.random.default_rng(0)
HALVES = [jnp.float16, jnp.bfloat16]
OPTIMIZERS = {
    "sgd": lambda: lenient(optax.sgd(2.0**-8)),
    "momentum": lambda: lenient(optax.sgd(2.0**-8, momentum=0.9)),
    "adamw": lambda: lenient(optax.adamw(1e-3)),
    "lion": lambda: lenient(optax.lion(1e-3)),
}


def compact(inner):
    return ols.master_weights(inner, compact=True)


def apply(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def steps(tx, params, grads, *, is_jitted=True, state=None):
    """Parameters and states after each step of as many as there are gradients."""

    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return apply(params, updates), state

    step = jax.jit(step) if is_jitted else step
    history = [(params, tx.init(params) if state is None else state)]
    for grad in grads:
        history.append(step(*history[-1], grad))
    return history


def masters_of(history):
    return [ols.full_masters(params, state) for params, state in history]


def values(dtype, size=2000):
    """Parameters of every size, as many small as large, and zeros of either sign."""
    numbers = RNG.normal(size=size) * 2.0 ** RNG.integers(-12, 8, size)
    return jnp.asarray(np.concatenate([numbers, [0.0, -0.0, 1.0, -1.0]]), dtype)


@pytest.mark.fast_every(5)
@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_inner_optimizer_sees_the_masters_that_it_sees_without_compact(
    name, dtype, is_jitted
):
    params = values(dtype)
    grads = jnp.asarray(RNG.normal(size=(15, params.size)), dtype)
    options = {"is_jitted": is_jitted}
    full = steps(ols.master_weights(OPTIMIZERS[name]()), params, grads, **options)
    own = steps(compact(OPTIMIZERS[name]()), params, grads, **options)
    for (_, full_state), (own_params, own_state) in zip(full, own, strict=True):
        master = ols.full_masters(own_params, own_state)
        expected = full_state.master_params
        is_kept = np.ones(params.shape, bool)
        if dtype == jnp.float16:  # Smaller masters have fewer bits.
            is_kept = np.min(np.abs(masters_of(full)), axis=0) >= 2.0**-16
            assert is_kept.mean() > 0.9
            np.testing.assert_allclose(master, expected, rtol=0, atol=2.0**-36)
        assert_same_bits(master[is_kept], expected[is_kept])
        assert_same_bits(own_state.inner_state, full_state.inner_state)


def test_ties_in_bfloat16_go_away_from_zero_and_masters_stay_those_of_full_masters():
    params = jnp.asarray([1.0, -1.0, 1 + 2**-7, -1 - 2**-7], jnp.bfloat16)
    # The masters after one step are 1 + 2**-8 and 1 + 3 * 2**-8: ties.
    grads = -jnp.sign(params.astype(jnp.float32)) * 2.0**-8
    sgd = lenient(optax.sgd(1.0))
    _, (full, full_state) = steps(ols.master_weights(sgd), params, [grads])
    _, (own, own_state) = steps(compact(sgd), params, [grads])
    assert full.tolist() == [1.0, -1.0, 1 + 2**-6, -1 - 2**-6]
    assert own.tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6, -1 - 2**-6]
    assert_same_bits(ols.full_masters(own, own_state), full_state.master_params)


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_master_is_nearest_to_its_parameter_after_a_step_of_any_size(
    dtype, is_jitted
):
    bits = RNG.integers(0, 2**16, size=(2, 50_000)).astype(np.uint16)
    start, target = (np.nan_to_num(x.view(dtype).astype(np.float32)) for x in bits)
    limit = float(jnp.finfo(dtype).max) / 4  # Differences of larger values overflow.
    start, target = np.clip(start, -limit, limit), np.clip(target, -limit, limit)
    neighbour = np.nextafter(target.astype(dtype), np.array(np.inf, dtype))
    between = RNG.random(50_000) * (neighbour.astype(np.float64) - target) + target
    params = jnp.asarray(start, dtype)
    grads = params.astype(jnp.float32) - between.astype(np.float32)
    sgd = lenient(optax.sgd(1.0))
    (_, (full, full_state)) = steps(ols.master_weights(sgd), params, [grads])
    history = steps(compact(sgd), params, [grads], is_jitted=is_jitted)
    own, own_state = history[-1]
    master = np.asarray(ols.full_masters(own, own_state))
    if dtype == jnp.float16:
        np.testing.assert_array_equal(own, master.astype(dtype))
        np.testing.assert_array_equal(own, full)
        error = np.abs(master - np.asarray(full_state.master_params))
        assert (error <= 2.0**-40).all()
    else:
        np.testing.assert_array_equal(master, full_state.master_params)


def test_a_parameter_that_falls_almost_to_zero_is_its_own_master():
    # -(1 + 2**-24) needs 25 bits, so the update can only lead to zero.
    params = jnp.bfloat16(1.0)
    sgd = lenient(optax.sgd(1.0))
    state = compact(sgd).init(params)
    params, state = ols.set_full_masters(params, state, jnp.float32(1 - 2**-24))
    assert params == 1.0
    _, (params, state) = steps(compact(sgd), params, [jnp.float32(1.0)], state=state)
    assert params == 0
    assert ols.full_masters(params, state) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_infinite_and_nan_parameters_keep_to_themselves(dtype):
    params = jnp.asarray([np.inf, -np.inf, np.nan, 1.0], dtype)
    tx = compact(lenient(optax.sgd(0.5)))
    state = tx.init(params)
    np.testing.assert_array_equal(
        ols.full_masters(params, state), params.astype(jnp.float32)
    )
    *_, (params, state) = steps(tx, params, [jnp.ones(4, dtype)])
    # An infinite parameter becomes NaN, as the difference of two infinities.
    expected = [np.nan, np.nan, np.nan, 0.5]
    np.testing.assert_array_equal(params.astype(jnp.float32), expected)
    np.testing.assert_array_equal(ols.full_masters(params, state), expected)


def test_a_float16_parameter_beside_infinity_keeps_its_master():
    params = jnp.float16([65504.0, -65504.0])
    tx = compact(lenient(optax.sgd(1.0)))
    steps_of_two = [jnp.float32([-2.0, 2.0])] * 9
    history = steps(tx, params, steps_of_two)
    masters = [master[0] for master in masters_of(history)]
    # 65520 is nearer to infinity: the parameter is lost, as it is in full masters.
    assert masters[:8] == [65504.0 + 2 * i for i in range(8)]
    assert [params[0] for params, _ in history[:8]] == [65504.0] * 8
    assert history[8][0].tolist() == [np.inf, -np.inf]
    assert masters[8] == 65520
    assert np.isnan(masters[9])


@pytest.mark.fast_every(3)
@pytest.mark.parametrize("is_outside", [True, False])
@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_skipped_step_changes_no_bit_of_parameters_and_remainders(
    dtype, is_jitted, is_outside
):
    if is_outside:
        tx = compact(ols.loss_scaled(adam()))
    else:
        tx = ols.loss_scaled(compact(adam()))
    infinite = jnp.asarray([np.inf, -np.inf], dtype)
    params = {"w": values(dtype), "norm": jnp.ones(3), "inf": infinite}
    good, bad = jax.tree.map(jnp.ones_like, params), jax.tree.map(jnp.ones_like, params)
    bad["w"] = bad["w"].at[7].set(jnp.inf)
    history = steps(tx, params, [good, bad, bad, good], is_jitted=is_jitted)
    _, before, skipped, again, after = history
    for params, state in (skipped, again):
        assert_same_bits(params, before[0])
        fields = (optax.tree.get(each, "remainders") for each in (state, before[1]))
        assert_same_bits(*fields)
        assert types(state) == types(before[1])
    assert ols.get_loss_scale(again[1]) == ols.get_loss_scale(before[1]) / 4
    assert (after[0]["w"] != before[0]["w"]).any()


@pytest.mark.parametrize("dtype", HALVES)
def test_compact_masters_can_be_inside_or_outside_loss_scaled(dtype):
    params = values(dtype)
    grads = jnp.asarray(RNG.normal(size=(10, params.size)) * 2.0**15, jnp.float32)
    outside = compact(ols.loss_scaled(adam()))
    inside = ols.loss_scaled(compact(adam()))
    one, other = (
        steps(tx, params, grads, is_jitted=False)[-1] for tx in (outside, inside)
    )
    assert_same_bits(one[0], other[0])
    assert_same_bits(ols.full_masters(*one), ols.full_masters(*other))


def test_other_parameters_move_as_they_do_without_masters_and_take_no_memory():
    params = {
        "w": jnp.ones(3, jnp.float16),
        "norm": jnp.ones(3),
        "i": jnp.arange(3, dtype=jnp.int16),
        "none": None,
    }
    grads = params | {"i": jnp.zeros(3, jnp.int16), "norm": jnp.float32([1, 2, 3])}
    is_trained = {"w": True, "norm": True, "i": False, "none": None}
    inner = lenient(optax.masked(optax.adam(0.1), is_trained))
    tx = compact(inner)
    history = steps(tx, params, [grads] * 3, is_jitted=False)
    masked = optax.MaskedNode()
    for _, state in history:
        remainders = dict(state.remainders)
        assert remainders.pop("w").dtype == jnp.uint16
        assert remainders == {"norm": masked, "i": masked, "none": None}
    wide = [each | {"w": jnp.ones(3)} for each in (params, grads)]
    bare = steps(inner, wide[0], wide[1:] * 3, is_jitted=False)
    assert_same_bits(history[-1][0]["norm"], bare[-1][0]["norm"])


def test_full_precision_parameters_can_be_changed_between_steps():
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = compact(lenient(optax.adamw(0.1, weight_decay=0.5)))
    state = tx.init(params)
    updates, _ = tx.update(zeros, state, params | {"full": 100 * params["full"]})
    np.testing.assert_allclose(updates["full"], -5.0)


def test_a_half_precision_parameter_that_is_changed_elsewhere_takes_its_master_along():
    params = {"w": jnp.bfloat16([1.0, 3.0, -2.0])}
    tx = compact(lenient(optax.sgd(2.0**-12)))
    *_, (params, state) = steps(tx, params, [{"w": jnp.ones(3)}] * 3)
    pruned = {"w": params["w"].at[1:].set(0)}
    masters = ols.full_masters(pruned, state)["w"]
    assert masters[0] == 1 - 3 * 2.0**-12
    assert (np.abs(masters[1:]) < 1e-38).all()
    *_, (params, _) = steps(tx, pruned, [{"w": jnp.full(3, 2.0**12)}], state=state)
    assert params["w"].tolist() == [-3 * 2.0**-12, -1.0, -1.0]


def test_a_parameter_without_a_gradient_stays_and_keeps_its_remainder():
    params = {"w": jnp.ones(3, jnp.float16), "frozen": jnp.float16([1.0, -0.0])}
    tx = compact(lenient(optax.sgd(1e-4)))
    *_, (params, state) = steps(tx, params, [jax.tree.map(jnp.ones_like, params)] * 2)
    grads = {"w": jnp.ones(3), "frozen": None}
    updates, after = jax.jit(tx.update)(grads, state, params)
    assert updates["frozen"] is None
    assert_same_bits(after.remainders["frozen"], state.remainders["frozen"])


def test_a_float8_parameter_has_a_float32_master():
    params = {"w": jnp.ones(2, jnp.float8_e4m3fn), "h": jnp.ones(2, jnp.bfloat16)}
    grads = {"w": jnp.ones(2), "h": jnp.ones(2)}
    histories = [
        steps(make(lenient(optax.sgd(2.0**-6))), params, [grads] * 5)
        for make in (ols.master_weights, compact)
    ]
    (full, full_state), (own, own_state) = (history[-1] for history in histories)
    assert own_state.remainders["w"].dtype == jnp.float32
    assert_same_bits(own, full)
    assert_same_bits(ols.full_masters(own, own_state), full_state.master_params)


def sharded(params):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P("data"))
    return jax.device_put(params, sharding), sharding


@pytest.mark.parametrize("is_jitted", [True, False])
def test_remainders_are_sharded_as_parameters_over_donated_steps_and_under_scan(
    is_jitted,
):
    params = {"w": jnp.ones(16, jnp.float16), "norm": jnp.ones(16)}
    params, sharding = sharded(params)
    tx = ols.loss_scaled(compact(adam()))
    state = (jax.jit(tx.init) if is_jitted else tx.init)(params)

    def check(state):
        remainder = optax.tree.get(state, "remainders")["w"]
        assert remainder.sharding.is_equivalent_to(sharding, 1)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(optax.tree.ones_like(params), state, params)
        return (apply(params, updates), state), None

    check(state)
    stepped = jax.jit(lambda *carry: step(carry, None)[0], donate_argnums=(0, 1))
    for _ in range(3):
        params, state = stepped(params, state)
        check(state)
    assert stepped._cache_size() <= 2
    (params, state), _ = jax.lax.scan(step, (params, state), None, length=3)
    check(state)
    masters = ols.full_masters(params, state)
    assert masters["w"].sharding.is_equivalent_to(sharding, 1)
    params, state = ols.set_full_masters(params, state, masters)
    check(state)


def test_masters_under_vmap_are_those_of_each_member():
    tx = ols.loss_scaled(compact(adam()))
    params = values(jnp.bfloat16, 60).reshape(4, -1)
    grads = ols.scale(params, tx.init(params)).at[2, 3].set(jnp.nan)

    def update(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return apply(params, updates), state

    moved, states = jax.vmap(update)(grads, params)
    alone = [update(*each) for each in zip(grads, params, strict=True)]
    assert_same_bits((moved, states), jax.tree.map(lambda *x: jnp.stack(x), *alone))
    assert_same_bits(moved[2], params[2])


def test_the_state_can_be_pickled_and_no_two_fields_share_a_buffer():
    params = {"w": jnp.ones(3, jnp.float16), "norm": jnp.ones(3)}
    state = compact(adam()).init(params)
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)
    leaves = jax.tree.leaves((params, state))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_check_updates_catches_a_parameter_that_overflows():
    params = {"w": jnp.ones(2, jnp.float16)}
    rule = ols.static_loss_scale(1.0)
    inner = compact(lenient(optax.sgd(1e5)))
    tx = ols.loss_scaled(inner, rule, check_updates=True)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["w"].tolist() == [0.0, 0.0]
    assert ols.full_masters(params, state)["w"].tolist() == [1.0, 1.0]
    assert state.loss_scale_state.total_notfinite == 1


def labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


AROUND = {
    "alone": lambda make: make(adam(0.01)),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(9.0), make(adam(0.01))),
    "ema in front": lambda make: optax.chain(optax.ema(0.9), make(adam(0.01))),
    "masked": lambda make: optax.chain(
        optax.masked(make(optax.sgd(0.01)), lambda t: jax.tree.map(jnp.ndim, t))
    ),
    "partition": lambda make: optax.partition(
        {"matrix": make(adam(0.01)), "vector": make(lenient(optax.sgd(0.1)))}, labels
    ),
    "partition inside": lambda make: make(
        optax.partition({"matrix": adam(0.01), "vector": optax.sgd(0.1)}, labels)
    ),
    "accumulation": lambda make: optax.MultiSteps(make(adam(0.01)), 2),
    "accumulation inside": lambda make: make(optax.MultiSteps(adam(0.01), 2)),
    "injected": lambda make: make(optax.inject_hyperparams(optax.adam)(0.01)),
}


@pytest.mark.fast_every(4)
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("name", AROUND)
def test_compact_masters_are_the_full_ones_in_any_composition(name, is_scaled):
    params = {
        "a": values(jnp.bfloat16, 60).reshape(4, 16),
        "b": values(jnp.bfloat16, 60),
        "norm": jnp.ones(5),
    }
    grads = [
        jax.tree.map(lambda x: jnp.float32(RNG.normal(size=x.shape)), params)
        for _ in range(6)
    ]
    results = []
    for make in (ols.master_weights, compact):
        tx = lenient(AROUND[name](make))
        tx = ols.loss_scaled(tx, ols.static_loss_scale(1.0)) if is_scaled else tx
        history = steps(tx, params, grads, is_jitted=False)
        if is_scaled:  # Alone, `optax.ema` changes its dtypes.
            assert types(history[0][1]) == types(history[-1][1])
        results.append(masters_of(history))
    assert_same_bits(results[1], results[0])
    assert (results[1][-1]["a"] != results[1][0]["a"]).any()


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_float32_parameters_start_without_losing_a_bit(dtype, is_scaled):
    trained = {"w": jnp.float32(RNG.normal(size=500) + 3), "norm": jnp.float32([0.1])}
    tx = compact(adam(1e-3))
    tx = ols.loss_scaled(tx) if is_scaled else tx
    params = {"w": trained["w"].astype(dtype), "norm": trained["norm"]}
    params, state = ols.set_full_masters(params, tx.init(params), trained)
    assert_same_bits(ols.full_masters(params, state), trained)
    assert params["w"].dtype == dtype
    assert types(state) == types(tx.init(params))
    grads = [jax.tree.map(jnp.ones_like, trained)] * 3
    scaled = [ols.scale(each, state) for each in grads] if is_scaled else grads
    history = steps(tx, params, scaled, is_jitted=False, state=state)
    exact = steps(adam(1e-3), trained, grads, is_jitted=False)
    assert_same_bits(masters_of(history), [params for params, _ in exact])


@pytest.mark.parametrize("dtype", HALVES)
def test_a_run_goes_on_from_full_to_compact_masters_and_back(dtype):
    full, own = ols.master_weights(adam(1e-3)), compact(adam(1e-3))
    params = jnp.asarray(RNG.normal(size=300) + 3, dtype)
    grads = jnp.float32(RNG.normal(size=(6, 300)))
    never_converted = steps(full, params, grads)
    *_, (params, state) = steps(full, params, grads[:2])
    masters = ols.full_masters(params, state)
    params, converted = ols.set_full_masters(params, own.init(params), masters)
    converted = converted._replace(inner_state=state.inner_state)
    *_, (params, state) = steps(own, params, grads[2:4], state=converted)
    masters = ols.full_masters(params, state)
    params, converted = ols.set_full_masters(params, full.init(params), masters)
    converted = converted._replace(inner_state=state.inner_state)
    *_, last = steps(full, params, grads[4:], state=converted)
    assert_same_bits(last, never_converted[-1])


def test_what_does_not_fit_together_is_refused():
    params = {"w": jnp.ones(3, jnp.float16)}
    tx = compact(adam())
    state = tx.init(params)
    with pytest.raises(ValueError, match="needs `params`"):
        tx.update(params, state)
    with pytest.raises(TypeError, match="`compact` must be True or False, got 'yes'"):
        ols.master_weights(adam(), compact="yes")
    with pytest.raises(ValueError, match="with `compact=False`, got a CompactMaster"):
        ols.master_weights(adam()).update(params, state, params)
    with pytest.raises(ValueError, match="with `compact=True`, got a MasterWeights"):
        tx.update(params, ols.master_weights(adam()).init(params), params)
    wide = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="'w' of shape"):
        tx.update(params, tx.init(wide), params)
    with pytest.raises(ValueError, match="in float32, for which the state has a rem"):
        tx.update(params, state, wide)
    with pytest.raises(ValueError, match="must hold masters, got none in a tree"):
        ols.full_masters(params, adam().init(params))
    with pytest.raises(ValueError, match="`params` must be the parameters of this"):
        ols.full_masters({"w": jnp.ones(4, jnp.float16)}, state)
    with pytest.raises(ValueError, match="`params` must be the parameters of this"):
        ols.full_masters(params | {"b": jnp.ones(4)}, state)
    both = {"one": params, "other": params}
    with pytest.raises(ValueError, match="`params` must be the parameters of this"):
        ols.full_masters(both, {"one": state, "other": state})
    with pytest.raises(ValueError, match=r"got several for 'w'"):
        ols.full_masters(params, {"one": state, "other": state})
    for cast in (jnp.float32, jnp.int32):
        other = jax.tree.map(lambda x, dtype=cast: x.astype(dtype), state)
        with pytest.raises(ValueError, match=f"an array in {cast.dtype}"):
            tx.update(params, other, params)
        with pytest.raises(ValueError, match=f"an array in {cast.dtype}"):
            ols.full_masters(params, other)
    with pytest.raises(ValueError, match="in float16, for which the state has no rem"):
        ols.set_full_masters(params, tx.init(wide), wide)
    with pytest.raises(ValueError, match="Are the arguments swapped"):
        ols.full_masters(state, params)
    with pytest.raises(ValueError, match="To add masters to a run"):
        tx.update(params, adam().init(params), params)
    for function in (
        lambda: tx.update(params, state, {"w": jnp.ones(3, jnp.bfloat16)}),
        lambda: ols.full_masters(wide, state),
        lambda: ols.set_full_masters(wide, state, wide),
    ):
        with pytest.raises(ValueError, match="Has the model not been cast back"):
            function()
    with pytest.raises(ValueError, match=r"`masters` must have .* got shapes \[\(4,"):
        ols.set_full_masters(params, state, {"w": jnp.ones(4)})


def by_dtype(params):
    return jax.tree.map(lambda x: "half" if x.dtype.itemsize == 2 else "full", params)


def test_labels_that_depend_on_dtypes_are_refused_inside_loss_scaled():
    params = {"w": jnp.ones(3, jnp.float16), "norm": jnp.ones(3)}
    parts = {"half": compact(adam()), "full": adam()}
    tx = ols.loss_scaled(optax.partition(parts, by_dtype))
    with pytest.raises(ValueError, match="Do masks or labels depend on the dtypes"):
        tx.init(params)
    tx = ols.loss_scaled(optax.partition(parts, by_dtype(params)))
    assert tx.init(params).loss_scale_state.loss_scale == 2.0**15


@pytest.mark.parametrize("make", [ols.master_weights, compact])
@pytest.mark.parametrize(
    "options", [{"use_ema": True}, {"weight_decay": 0.1, "learning_rate": 0.1}]
)
def test_keras_options_that_change_parameters_go_inside_the_masters(make, options):
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    with pytest.raises(ValueError, match="must be inside `master_weights`, got"):
        ols.loss_scale_optimizer(make(optax.sgd(1e-4)), **options).init(params)
    tx = lenient(make(ols.loss_scale_optimizer(optax.sgd(2.0**-12), **options)))
    state = tx.init(params)
    grads = ols.scale(jax.tree.map(jnp.ones_like, params), state)
    history = steps(tx, params, [grads] * 20, is_jitted=False)
    assert (history[-1][0]["w"] < 1).all()


def test_keras_accumulates_gradients_of_both_half_precision_dtypes():
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)}
    tx = ols.loss_scale_optimizer(
        compact(lenient(optax.sgd(2.0**-12))), gradient_accumulation_steps=2
    )
    grads = ols.scale(jax.tree.map(jnp.ones_like, params), tx.init(params))
    *_, last = steps(lenient(tx), params, [grads] * 4, is_jitted=False)
    assert ols.full_masters(*last)["a"].tolist() == [1 - 2.0**-11] * 2


@pytest.mark.parametrize("make", [ols.master_weights, compact])
def test_leaves_that_are_not_trained_are_left_alone(make):
    params = {
        "w": jnp.ones(2, jnp.bfloat16),
        "i": jnp.arange(2),
        "key": jax.random.key(0),
    }
    grads = {"w": jnp.ones(2), "i": None, "key": None}
    for tx in (make(optax.sgd(1e-4)), ols.loss_scaled(make(lenient(optax.sgd(1e-4))))):
        state = tx.init(params)
        _, state = tx.update(grads, state, params)
        masters = ols.full_masters(params, state)
        new_params, new_state = ols.set_full_masters(params, state, masters)
        assert_same_bits(new_params["i"], params["i"])
        assert_same_bits(ols.full_masters(new_params, new_state), masters)
        assert types(new_state) == types(state)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_masters_are_taken_from_arrays_of_any_real_dtype(dtype):
    params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    values = {"w": np.array([3, 5], dtype), "norm": np.array([7, 9], dtype)}
    state = compact(adam()).init(params)
    params, state = ols.set_full_masters(params, state, values)
    expected = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)
    assert_same_bits(ols.full_masters(params, state), expected)


def test_replaced_masters_share_no_buffer_with_parameters_and_state():
    masters = {"w": jnp.ones(2) / 3, "norm": jnp.ones(2)}
    params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    for make in (ols.master_weights, compact):
        state = make(adam()).init(params)
        held = masters, *ols.set_full_masters(params, state, masters)
        leaves = jax.tree.leaves(held)
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("make", [ols.master_weights, compact])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_step_can_be_differentiated(make, dtype):
    def moved(rate, params):
        tx = ols.loss_scaled(make(lenient(optax.sgd(rate))), ols.static_loss_scale(1.0))
        grads = params.astype(jnp.float32) ** 2
        updates, _ = tx.update(grads, tx.init(params), params)
        return apply(params, updates).astype(jnp.float32).sum()

    params = jnp.asarray([1.0, 2.0], dtype)
    slopes = jax.grad(moved, argnums=(0, 1))(jnp.float32(0.25), params)
    # The sum of p - r p**2 has the slopes -p**2 and 1 - 2 r p.
    assert slopes[0] == -5.0
    assert slopes[1].tolist() == [0.5, 0.0]


def test_full_masters_of_abstract_arrays_describe_the_masters():
    params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    described = jax.eval_shape(compact(adam()).init, params)
    masters = ols.full_masters(params, described)
    assert (masters["w"].shape, masters["w"].dtype) == ((2,), jnp.float32)


class Model(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.dense(x))


@pytest.mark.skipif(
    IS_JAX_0_7, reason="Flax 0.11 takes no state with missing leaves (optax.masked)"
)
@jax.numpy_dtype_promotion("standard")
def test_an_nnx_model_trains_and_its_masters_can_be_read_and_replaced():
    model = ols.cast_params(Model(), jnp.bfloat16)
    tx = ols.loss_scaled(compact(lenient(optax.adam(2.0**-12))))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, x):
        return (model(x).astype(jnp.float32) ** 3).sum()

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = ols.scaled_value_and_grad(loss_fn, optimizer)(model, x)
        optimizer.update(model, grads)

    for _ in range(5):
        step(model, optimizer, jnp.ones((2, 4), jnp.bfloat16))
    params = nnx.state(model, nnx.Param)
    masters = ols.full_masters(params, optimizer.opt_state)
    rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params)
    assert_same_bits(rounded, params)
    assert (masters["dense"]["kernel"][...] != params["dense"]["kernel"][...]).any()
    assert masters["norm"]["scale"][...].dtype == jnp.float32
    halved = jax.tree.map(lambda m: m / 2, masters)
    params, state = ols.set_full_masters(params, optimizer.opt_state, halved)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    nnx.update(model, params)
    optimizer.opt_state = state
    assert_same_bits(ols.full_masters(params, optimizer.opt_state), halved)
    step(model, optimizer, jnp.ones((2, 4), jnp.bfloat16))


@pytest.mark.parametrize("dtype", HALVES)
def test_an_equinox_model_is_cast_back_after_each_step(dtype):
    model = eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(0))
    model = ols.cast_params(model, dtype)
    tx = ols.loss_scaled(compact(lenient(optax.sgd(2.0**-10))))
    state = tx.init(model)
    grads = ols.scale(
        jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_array)), state
    )
    first = ols.full_masters(model, state)

    @eqx.filter_jit
    def step(model, state):
        updates, state = tx.update(grads, state, model)
        with jax.numpy_dtype_promotion("standard"):
            return ols.cast_params(eqx.apply_updates(model, updates), dtype), state

    for _ in range(3):
        model, state = step(model, state)
    last = eqx.filter(ols.full_masters(model, state), eqx.is_array)
    expected = jax.tree.map(
        lambda x: ((x - 2.0**-10) - 2.0**-10) - 2.0**-10,
        eqx.filter(first, eqx.is_array),
    )
    assert_same_bits(last, expected)
    updates, state = tx.update(grads, state, model)
    with jax.numpy_dtype_promotion("standard"):
        wide = eqx.apply_updates(model, updates)
    with pytest.raises(ValueError, match="Has the model not been cast back"):
        tx.update(grads, state, wide)


@pytest.mark.parametrize("dtype", HALVES)
def test_xla_can_leave_out_no_cast_of_a_step(dtype):
    tx = ols.loss_scaled(compact(lenient(optax.sgd(1.0))))
    params = jnp.ones(2, dtype)
    assert casts_left_out_on_gpu(tx.update, params, tx.init(params), params) == 0


def test_abstract_parameters_have_remainders_of_zero():
    params = {"w": jax.ShapeDtypeStruct((2,), jnp.float16)}
    state = compact(adam()).init(params)
    assert state.remainders["w"].dtype == jnp.uint16
    assert state.remainders["w"].tolist() == [0, 0]


def test_the_state_of_a_step_can_be_described_without_arrays():
    tx = ols.loss_scaled(compact(adam()))
    params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    described = jax.eval_shape(tx.init, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(described, tx.init(params))
