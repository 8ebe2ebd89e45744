"""`master_weights(compact=True)`: masters that take 16 bits beside the parameters.

What full and compact masters have in common is in test_master_weights.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.inner import adam, lenient
from helpers.modules import Net, mean_square
from helpers.steps import apply, steps

RNG = np.random.default_rng(0)
in_each_half = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])


def compact(inner):
    return ols.master_weights(inner, compact=True)


def masters_of(history):
    return [ols.full_masters(params, state) for params, state in history]


def values(dtype, size=2000):
    """Parameters of every size, as many small as large, and zeros of either sign."""
    numbers = RNG.normal(size=size) * 2.0 ** RNG.integers(-12, 8, size)
    return jnp.asarray(np.concatenate([numbers, [0.0, -0.0, 1.0, -1.0]]), dtype)


@pytest.mark.parametrize("make", [optax.sgd, optax.adamw])
@in_each_half
def test_the_inner_optimizer_sees_the_masters_that_it_sees_without_compact(make, dtype):
    params, inner = values(dtype), lenient(make(2.0**-8))
    grads = jnp.asarray(RNG.normal(size=(8, params.size)), dtype)
    full = steps(ols.master_weights(inner), params, grads)
    own = steps(compact(inner), params, grads)
    is_kept = np.ones(params.shape, bool)
    if dtype == jnp.float16:  # Smaller masters have fewer bits.
        is_kept = np.min(np.abs(masters_of(full)), axis=0) >= 2.0**-16
        assert is_kept.mean() > 0.9
    for master, (_, state) in zip(masters_of(own), full, strict=True):
        np.testing.assert_allclose(master, state.master_params, rtol=0, atol=2.0**-36)
        assert_same_bits(master[is_kept], state.master_params[is_kept])
    assert_same_bits(own[-1][1].inner_state, full[-1][1].inner_state)


@in_each_half
def test_the_parameter_is_the_rounded_master_after_a_step_of_any_size(dtype):
    bits = RNG.integers(0, 2**16, size=(2, 50_000)).astype(np.uint16)
    start, target = (np.nan_to_num(x.view(dtype).astype(np.float32)) for x in bits)
    limit = float(jnp.finfo(dtype).max) / 4  # Differences of larger values overflow.
    start, target = np.clip(start, -limit, limit), np.clip(target, -limit, limit)
    # Half of the targets are midway between neighbours, where rounding changes.
    neighbour = np.nextafter(target.astype(dtype), np.array(np.inf, dtype))
    share = np.where(RNG.random(50_000) < 0.5, 0.5, RNG.random(50_000))
    between = share * (neighbour.astype(np.float64) - target) + target
    params = jnp.asarray(start, dtype)
    grads = [params.astype(jnp.float32) - between.astype(np.float32)]
    sgd = lenient(optax.sgd(1.0))
    *_, (full, full_state) = steps(ols.master_weights(sgd), params, grads)
    *_, (own, own_state) = steps(compact(sgd), params, grads)
    np.testing.assert_array_equal(full, full_state.master_params.astype(dtype))
    master = np.asarray(ols.full_masters(own, own_state))
    if dtype == jnp.float16:
        np.testing.assert_array_equal(own, master.astype(dtype))
        np.testing.assert_array_equal(own, full)
        error = np.abs(master - np.asarray(full_state.master_params))
        assert (error <= 2.0**-40).all()
    else:
        np.testing.assert_array_equal(master, full_state.master_params)


@in_each_half
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


def test_other_parameters_take_no_memory():
    others = {"norm": jnp.ones(3), "i": jnp.arange(3, dtype=jnp.int16), "none": None}
    params = {"w": jnp.ones(3, jnp.float16), **others}
    remainders = compact(lenient(optax.sgd(0.1))).init(params).remainders
    assert remainders.pop("w").dtype == jnp.uint16
    masked = optax.MaskedNode()
    assert remainders == {"norm": masked, "i": None, "none": None}


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_masters_under_vmap_are_those_of_each_member():
    tx = ols.loss_scaled(compact(adam()))
    params = values(jnp.bfloat16, 60).reshape(4, -1)
    grads = ols.scale(params, tx.init(params)).at[2, 3].set(jnp.nan)

    @jax.jit
    def update(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return apply(params, updates), state

    moved, states = jax.vmap(update)(grads, params)
    alone = [update(*each) for each in zip(grads, params, strict=True)]
    assert_same_bits((moved, states), jax.tree.map(lambda *x: jnp.stack(x), *alone))
    assert_same_bits(moved[2], params[2])


def labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)


AROUND = {
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
}


@pytest.mark.slow
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
        for _ in range(3)
    ]
    results = []
    for make in (ols.master_weights, compact):
        tx = lenient(AROUND[name](make))
        tx = ols.loss_scaled(tx, ols.static_loss_scale(1.0)) if is_scaled else tx
        history = steps(tx, params, grads, run=lambda f: f)
        if is_scaled:  # Alone, `optax.ema` changes its dtypes.
            assert types(history[0][1]) == types(history[-1][1])
        results.append(masters_of(history))
    assert_same_bits(results[1], results[0])
    assert (results[1][-1]["a"] != results[1][0]["a"]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "is_scaled"), [(jnp.float16, True), (jnp.bfloat16, False)]
)
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
    history = steps(tx, params, scaled, run=lambda f: f, state=state)
    exact = steps(adam(1e-3), trained, grads, run=lambda f: f)
    assert_same_bits(masters_of(history), [params for params, _ in exact])
    whole = jax.tree.map(lambda x: np.asarray(x).astype(np.int32), trained)
    state = ols.set_full_masters(params, state, whole)  # Of any real dtype.
    expected = jax.tree.map(jnp.float32, whole)
    assert_same_bits(ols.full_masters(*state), expected)


@in_each_half
def test_a_run_goes_on_from_full_to_compact_masters_and_back(dtype):
    full, own = ols.master_weights(adam(1e-3)), compact(adam(1e-3))
    params = jnp.asarray(RNG.normal(size=300) + 3, dtype)
    grads = jnp.float32(RNG.normal(size=(6, 300)))

    def converted(tx, params, state):
        masters = ols.full_masters(params, state)
        params, new = ols.set_full_masters(params, tx.init(params), masters)
        return params, new._replace(inner_state=state.inner_state)

    never_converted = steps(full, params, grads)
    *_, (params, state) = steps(full, params, grads[:2])
    params, state = converted(own, params, state)
    *_, (params, state) = steps(own, params, grads[2:4], state=state)
    params, state = converted(full, params, state)
    *_, last = steps(full, params, grads[4:], state=state)
    assert_same_bits(last, never_converted[-1])


HALF = {"w": jnp.ones(3, jnp.float16)}
WIDE = {"w": jnp.ones(3)}
TX = compact(adam())
STATE, WIDE_STATE = TX.init(HALF), TX.init(WIDE)
FULL = ols.master_weights(adam())
OTHER_PARAMS = "`params` must be the parameters of this"
NOT_CAST_BACK = "Has the model not been cast back"


IN_BFLOAT16 = {"w": jnp.ones(3, jnp.bfloat16)}
IN_INT32 = jax.tree.map(lambda x: x.astype("int32"), STATE)
BOTH = optax.partition(
    {"compact": compact(adam()), "full": FULL}, {"a": "compact", "b": "full"}
)
A_AND_B = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.float16)}
WIDE_A_AND_B = ols.cast_params(A_AND_B, jnp.float32)
FROZEN = optax.partition(
    {"full": FULL, "frozen": optax.set_to_zero()}, {"a": "frozen", "b": "full"}
)
UNFIT = [
    (lambda: ols.full_masters(WIDE_A_AND_B, BOTH.init(A_AND_B)), NOT_CAST_BACK),
    (
        lambda: ols.set_full_masters(WIDE_A_AND_B, BOTH.init(A_AND_B), A_AND_B),
        NOT_CAST_BACK,
    ),
    (
        lambda: ols.full_masters(A_AND_B, FROZEN.init(A_AND_B)),
        "Pass only what is trained",
    ),
    (
        lambda: ols.set_full_masters(A_AND_B, FROZEN.init(A_AND_B), WIDE_A_AND_B),
        "Pass only",
    ),
    (lambda: FULL.update(HALF, FULL.init(HALF)), "needs `params`"),
    (lambda: TX.update(HALF, STATE), "needs `params`"),
    (lambda: FULL.update(HALF, STATE, HALF), "`compact=False`, got a CompactMaster"),
    (lambda: TX.update(HALF, FULL.init(HALF), HALF), "=True`, got a MasterWeights"),
    (lambda: TX.update(HALF, WIDE_STATE, HALF), "'w' of shape"),
    (lambda: TX.update(HALF, STATE, WIDE), "in float32, for which the state has a rem"),
    (lambda: ols.full_masters(HALF, adam().init(HALF)), "hold masters, got none in a"),
    (lambda: ols.full_masters({"w": HALF["w"][:2]}, STATE), OTHER_PARAMS),
    (lambda: ols.full_masters(HALF | {"b": HALF["w"]}, STATE), OTHER_PARAMS),
    (lambda: ols.full_masters([HALF, HALF], [STATE, STATE]), OTHER_PARAMS),
    (lambda: ols.full_masters(HALF, [STATE, STATE]), "got several for 'w'"),
    (lambda: TX.update(HALF, IN_INT32, HALF), "an array in int32"),
    (lambda: ols.full_masters(HALF, IN_INT32), "an array in int32"),
    (
        lambda: ols.set_full_masters(HALF, WIDE_STATE, WIDE),
        "for which the state has no",
    ),
    (lambda: ols.full_masters(STATE, HALF), "Are the arguments swapped"),
    (lambda: TX.update(HALF, adam().init(HALF), HALF), "To add masters to a run"),
    (lambda: TX.update(HALF, STATE, IN_BFLOAT16), NOT_CAST_BACK),
    (lambda: ols.full_masters(WIDE, STATE), NOT_CAST_BACK),
    (lambda: ols.set_full_masters(WIDE, STATE, WIDE), NOT_CAST_BACK),
    (lambda: ols.set_full_masters(HALF, STATE, {"w": jnp.ones(4)}), r"shapes \[\(4,"),
]


@pytest.mark.parametrize(("call", "message"), UNFIT)
def test_what_does_not_fit_together_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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


@pytest.mark.slow
def test_keras_accumulates_gradients_of_both_half_precision_dtypes():
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)}
    tx = ols.loss_scale_optimizer(
        compact(lenient(optax.sgd(2.0**-12))), gradient_accumulation_steps=2
    )
    grads = ols.scale(jax.tree.map(jnp.ones_like, params), tx.init(params))
    *_, last = steps(lenient(tx), params, [grads] * 4)
    assert ols.full_masters(*last)["a"].tolist() == [1 - 2.0**-11] * 2


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_an_nnx_model_trains_and_its_masters_can_be_read_and_replaced():
    model = ols.cast_params(Net(), jnp.bfloat16)
    tx = ols.loss_scaled(compact(lenient(optax.sgd(2.0**-12))))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = ols.scaled_grad(mean_square, optimizer)(model, x)
        optimizer.update(model, grads)

    x = jnp.ones((2, 4), jnp.bfloat16)
    step(model, optimizer, x)
    params = nnx.state(model, nnx.Param)
    masters = ols.full_masters(params, optimizer.opt_state)
    rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params)
    assert_same_bits(rounded, params)
    assert masters["norm"]["scale"][...].dtype == jnp.float32
    halved = jax.tree.map(lambda m: m / 2, masters)
    params, state = ols.set_full_masters(params, optimizer.opt_state, halved)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    nnx.update(model, params)
    optimizer.opt_state = state
    assert_same_bits(ols.full_masters(params, optimizer.opt_state), halved)
    step(model, optimizer, x)
