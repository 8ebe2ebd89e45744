"""Known bugs of other loss scalers: a test or a comment on what happens here instead.

First those of JAX: jmp, Flax's DynamicScale, mpx, optax.apply_if_finite, Haiku's
example. Then those of PyTorch, apex, Keras, TensorFlow, MindSpore, Megatron-LM,
DeepSpeed, fairseq and others. The bugs of each part are numbered from 1. A comment
stands for a bug that another file tests, or that is impossible here.

Two of JAX's bugs happen here, too: without `axis_name`, scales drift apart under pmap
(31), and a float16 scalar loss limits the scale (34).
"""

import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.compat import enable_x64
from helpers.inner import adam, lenient

PARAMS = {"w": jnp.asarray([1.0, -2.0, 3.0])}
GRADS = {"w": jnp.asarray([0.5, 0.25, -1.0])}
SCALE = 2.0**10
SCALED = jax.tree.map(lambda g: g * SCALE, GRADS)
BAD = {"w": jnp.asarray([0.5, jnp.nan, -1.0])}
RULE = ols.dynamic_loss_scale(SCALE)
SGD = lenient(optax.sgd(1.0))


def mesh_of(axis_type=AxisType.Auto, shape=(4,), names=("data",)):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, (axis_type,) * len(shape), devices=devices)


def mapped(function, mesh, in_specs, out_specs, check_vma=True):
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


def apply(params, updates):
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def multi_steps(inner, count):
    return lenient(optax.MultiSteps(inner, count).gradient_transformation())


# JAX.


# 1, a cond whose branches diverge between devices: `tests/integration/test_devices.py`.


@pytest.mark.parametrize("grads_dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("params_dtype", [jnp.float16, jnp.float32])
def test_jax_02_gradients_and_parameters_can_have_different_dtypes(
    grads_dtype, params_dtype
):
    params = jax.tree.map(lambda p: p.astype(params_dtype), PARAMS)
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(params)
    for grads in (SCALED, BAD):
        grads = jax.tree.map(lambda g: g.astype(grads_dtype), grads)
        updates, state = tx.update(grads, state, params)
        params = apply(params, updates)
        assert params["w"].dtype == params_dtype
    assert state.loss_scale_state.total_notfinite == 1


# 3, gradients averaged for the user; 4, the verdict of replicated gradients; 5, a sum
# over devices in float16; 6, a NaN on one of several axes; 7 and 8, sharded gradients
# on automatic and explicit meshes: `tests/integration/test_devices.py`.


def test_jax_09_a_nan_in_a_micro_batch_does_not_poison_multi_steps():
    tx = ols.loss_scaled(multi_steps(SGD, 2), RULE)
    params, state = PARAMS, tx.init(PARAMS)
    windows = []
    for grads in (SCALED, BAD, SCALED):  # The bad one is dropped from the window.
        grads = ols.scale(ols.unscale(grads, RULE.init()), state)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        windows.append(state.inner_state)
    np.testing.assert_array_equal(params["w"], PARAMS["w"] - GRADS["w"])
    # If MultiSteps were outside, one NaN would stay in its accumulator.
    assert windows[1].mini_step == 1
    assert_same_bits(windows[1].acc_grads, windows[0].acc_grads)


@pytest.mark.parametrize("clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0)])
def test_jax_10_clipping_does_not_hide_an_infinity(clip):
    tx = ols.loss_scaled(lenient(optax.chain(clip, optax.sgd(1.0))))
    bad = {"w": jnp.asarray([jnp.inf, 1.0, 1.0])}
    updates, state = tx.update(bad, tx.init(PARAMS), PARAMS)
    assert not updates["w"].any()
    assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
    assert state.loss_scale_state.total_notfinite == 1
    assert ols.get_loss_scale(state) == 2.0**14


def test_jax_11_counts_and_schedules_do_not_advance_on_a_skipped_step():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = ols.loss_scaled(lenient(optax.adamw(schedule)), RULE)
    state = tx.init(PARAMS)
    for _ in range(5):
        updates, state = tx.update(BAD, state, PARAMS)
        assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
    for field in ("count", "mu", "nu"):
        for _, leaf in optax.tree.get_all_with_path(state.inner_state, field):
            assert not any(np.any(x) for x in jax.tree.leaves(leaf))
    tx = ols.loss_scaled(lenient(optax.sgd(optax.linear_schedule(1.0, 0.0, 4))), RULE)
    state = tx.init(PARAMS)
    for grads in (BAD, SCALED, BAD):
        _, state = tx.update(grads, state, PARAMS)
    assert optax.tree.get(state, "count") == 1


def test_jax_12_a_nan_is_never_accepted_after_many_skipped_steps():
    tx = ols.loss_scaled(SGD, RULE)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(BAD, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, 1000)
    assert_same_bits(params, PARAMS)
    assert state.loss_scale_state.notfinite_count == 1000
    with pytest.raises(ols.LossScaleStalledError, match="1000 of 1000"):
        ols.raise_if_stalled(state)


# 13, a small gradient that unscaling flushes to zero; 14, a float16 loss that scaling
# makes infinite: `tests/scaling/test_scaling.py`.


def test_jax_15_weak_types_do_not_cause_a_second_compilation():
    tx = ols.loss_scaled(adam(), RULE)
    update = jax.jit(tx.update)
    state = tx.init(PARAMS)
    for grads in (SCALED, BAD, SCALED):
        _, state = update(grads, state, PARAMS)
    assert update._cache_size() == 1
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


# 16, a second compilation for the shardings of `init`:
# `tests/integration/test_devices.py`.


def test_jax_17_with_x64_on_every_counter_keeps_its_dtype():
    with enable_x64(True):
        tx = ols.loss_scaled(adam(), RULE)
        params = {"w": jnp.ones(3, jnp.float32)}
        _, state = tx.update(params, tx.init(params), params)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(state.loss_scale_state)]
    assert {str(dtype) for dtype in dtypes} == {"float32", "int32", "bool"}


def test_jax_18_the_reciprocal_of_a_scale_is_never_zero():
    with pytest.raises(ValueError, match=r"from 2\*\*-126 to 2\*\*126"):
        ols.static_loss_scale(2.0**127)
    rule = ols.dynamic_loss_scale(2.0**126, growth_interval=1, max_scale=2.0**126)
    state = rule.adjust(rule.init(), True)
    assert ols.unscale(jnp.float32(2.0**126), state) == 1


def test_jax_19_a_scale_never_falls_to_zero():
    for rule in (ols.dynamic_loss_scale(1.0), ols.presets.keras(), ols.presets.torch()):
        state, _ = jax.lax.scan(
            lambda s, _, rule=rule: (rule.adjust(s, False), None),
            rule.init(),
            None,
            500,
        )
        assert state.loss_scale > 0
    with pytest.raises(ValueError, match="`min_scale`"):
        ols.dynamic_loss_scale(min_scale=0.0)


def test_jax_20_float8_overflow_is_seen_and_overwritten_leaves_are_not_unscaled():
    overflowed = jnp.asarray([1e9], jnp.float32).astype(jnp.float8_e4m3fn)
    assert not ols.all_finite(overflowed)
    grads = {"w": jnp.full(2, SCALE), "_overwrite_with_gradient": jnp.ones(2)}
    mask = {"w": True, "_overwrite_with_gradient": False}
    tx = ols.loss_scaled(SGD, RULE, unscale_mask=mask)
    updates, _ = tx.update(grads, tx.init(grads), grads)
    assert updates["w"].tolist() == updates["_overwrite_with_gradient"].tolist()


def test_jax_21_leaves_that_are_not_floating_count_as_finite():
    tree = [None, optax.MaskedNode(), np.zeros(2, jax.dtypes.float0), jnp.arange(3), []]
    assert ols.all_finite(tree)
    assert not ols.all_finite(jnp.asarray([1 + 1j * jnp.nan]))
    state = RULE.init()
    assert jax.tree.structure(ols.unscale(tree, state)) == jax.tree.structure(tree)


# 22, an inner optimizer that sees a NaN: `tests/scaling/test_transform.py`.


def test_jax_23_differentiating_through_a_bad_step_gives_no_nan():
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(PARAMS)

    def loss(params):
        updates, _ = tx.update(BAD, state, params)
        return jnp.sum(optax.apply_updates(params, updates)["w"] ** 2)

    np.testing.assert_array_equal(jax.grad(loss)(PARAMS)["w"], 2 * PARAMS["w"])


def test_jax_24_a_state_can_be_donated_from_the_first_step_on():
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(PARAMS)
    leaves = jax.tree.leaves(state)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    jax.jit(tx.update, donate_argnums=1)(SCALED, state, PARAMS)


def test_jax_25_batch_statistics_can_be_kept_on_a_skipped_step():
    tx = ols.loss_scaled(SGD, RULE)
    _, state = tx.update(BAD, tx.init(PARAMS), PARAMS)
    kept = optax.tree.where(
        ols.find_loss_scale_state(state).last_finite, {"mean": jnp.nan}, {"mean": 1.0}
    )
    assert kept["mean"] == 1


# 26, gradients cast down before they are unscaled: `unscale` widens first, as 13.


def test_jax_27_states_survive_every_serialization():
    # Every tool, rule and step: `tests/integration/test_checkpoints.py`.
    tx = ols.loss_scaled(adam(), RULE)
    _, state = tx.update(SCALED, tx.init(PARAMS), PARAMS)
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)
    data = flax.serialization.to_bytes(state)
    assert_same_bits(flax.serialization.from_bytes(tx.init(PARAMS), data), state)


def test_jax_28_a_parameter_can_be_called_loss_scale():
    params = {"loss_scale": jnp.ones(2), "dynamic": {"loss_scale": jnp.ones(2)}}
    tx = ols.loss_scaled(adam(), RULE)
    assert ols.get_loss_scale(tx.init(params)) == SCALE


def test_jax_29_a_train_state_that_passes_no_extra_arguments_works():
    train_state = TrainState.create(
        apply_fn=None, params=PARAMS, tx=ols.loss_scaled(SGD, RULE)
    )
    train_state = train_state.apply_gradients(grads=SCALED)
    np.testing.assert_array_equal(train_state.params["w"], PARAMS["w"] - GRADS["w"])


def test_jax_30_init_works_on_abstract_shapes():
    tx = ols.loss_scaled(adam(), RULE)
    shapes = jax.eval_shape(lambda: PARAMS)
    abstract = jax.eval_shape(tx.init, shapes)
    assert jax.tree.structure(abstract) == jax.tree.structure(tx.init(PARAMS))


# 31, scales that drift apart under pmap: `tests/integration/test_devices.py`.
# Without `axis_name` they do, as nothing in a pmapped function can detect it.


# 32, settings in the state, each value of which compiles anew: they are closed over,
# and the state is arrays (`tests/scaling/test_laws.py`).


# 33, an ensemble that skips together: `tests/scaling/test_transform.py`.


@pytest.mark.parametrize(("scale", "is_finite"), [(2.0**15, True), (2.0**16, False)])
def test_jax_34_a_float16_scalar_loss_limits_the_scale(scale, is_finite):
    state = ols.static_loss_scale(scale).init()

    def loss_fn(x):
        return jnp.mean((x.astype(jnp.float16)) ** 2)

    def wide_loss_fn(x):
        return jnp.mean((x.astype(jnp.float16)).astype(jnp.float32) ** 2)

    x = jnp.full(8, 1e-3)
    assert ols.all_finite(ols.scaled_grad(loss_fn, state)(x)) == is_finite
    assert ols.all_finite(ols.scaled_grad(wide_loss_fn, state)(x))


# Others.


# 1, a float16 loss that is scaled in float16, and 1b, a scale that is cast to float16,
# where 65536 is infinite: `tests/scaling/test_scaling.py`.


# 2, gradients that overflow on unscaling; 4, an inner state that a skip changes:
# `tests/scaling/test_transform.py`.


# 3, gradients poisoned between the check and the step: both are one call here.


# 5, several optimizers; 20, a scale for each loss: `test_migration_examples.py`.


def test_other_06_each_micro_batch_is_unscaled_by_its_own_scale():
    rule = ols.dynamic_loss_scale(SCALE, growth_interval=1)
    tx = ols.loss_scaled(multi_steps(SGD, 2), rule)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):  # At two different scales.
        updates, state = tx.update(ols.scale(GRADS, state), state, params)
        params = optax.apply_updates(params, updates)
    assert ols.get_loss_scale(state) == SCALE * 4
    np.testing.assert_array_equal(params["w"], PARAMS["w"] - GRADS["w"])


def test_other_07_growth_that_the_cap_prevents_restarts_the_count():
    rule = ols.dynamic_loss_scale(SCALE, growth_interval=2, max_scale=SCALE)
    state = rule.adjust(rule.adjust(rule.init(), True), True)
    assert (state.loss_scale, state.rule_state.growth_count) == (SCALE, 0)


# 8, a restored count beyond a lowered interval: `tests/scaling/test_rules.py`.


# 9, a scale that is set resets the count; 11, zero or infinity as a scale:
# `tests/scaling/test_state.py`.


def test_other_10_a_disabled_scaler_changes_nothing_and_has_an_empty_state_dict():
    tx = ols.loss_scaled(SGD, ols.presets.torch(enabled=False))
    state = tx.init(PARAMS)
    updates, _ = tx.update(GRADS, state, PARAMS)
    np.testing.assert_array_equal(updates["w"], -GRADS["w"])
    assert ols.presets.to_torch_state_dict(state) == {}


# 12, hysteresis, which spares the scale a bad batch: `tests/scaling/test_rules.py`.


def test_other_13_an_empty_tree_of_gradients_is_finite():
    tx = ols.loss_scaled(SGD, RULE)
    updates, state = tx.update({}, tx.init({}), {})
    assert (updates, state.loss_scale_state.total_notfinite) == ({}, 0)


def test_other_14_a_static_scale_skips_unless_told_not_to():
    for skips in (True, False):
        tx = ols.loss_scaled(SGD, ols.static_loss_scale(SCALE, skip_nonfinite=skips))
        updates, _ = tx.update(BAD, tx.init(PARAMS), PARAMS)
        assert np.isfinite(updates["w"]).all() == skips


def test_other_15_bfloat16_gradients_can_be_scaled():
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), SCALED)
    tx = ols.loss_scaled(SGD, RULE)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["w"], -GRADS["w"])


def test_other_16_large_finite_gradients_are_finite():
    assert ols.all_finite(jnp.full(1000, 3e38))
    assert ols.all_finite(jnp.full(1000, 60_000.0, jnp.float16))


# 17, how verdicts are joined: the minimum of bools, or the maximum of magnitudes in
# which NaN has become infinity (`tests/integration/test_devices.py`).


def test_other_18_a_device_without_gradients_shares_the_verdict():
    finite = mapped(
        lambda x: jnp.reshape(ols.all_finite({"none": None}, axis_name="data"), 1),
        mesh_of(),
        P("data"),
        P(),
    )
    assert finite(jnp.ones(4)).all()

    def verdict(grad):  # Only the first device has a gradient that is not zero.
        tree = {"none": None, "grad": grad}
        return jnp.reshape(ols.all_finite(tree, axis_name="data"), 1)

    verdicts = mapped(verdict, mesh_of(), P("data"), P("data"))
    assert verdicts(jnp.asarray([1.0, 0.0, 0.0, 0.0])).tolist() == [True] * 4
    assert verdicts(jnp.asarray([jnp.nan, 0.0, 0.0, 0.0])).tolist() == [False] * 4


def test_other_19_every_counter_is_in_the_state_that_is_saved():
    rule = ols.dynamic_loss_scale(SCALE, hysteresis=3)
    state = rule.adjust(rule.adjust(rule.init(), True), False)
    restored = flax.serialization.from_bytes(
        rule.init(), flax.serialization.to_bytes(state)
    )
    assert_same_bits(jax.tree.map(jnp.asarray, restored), state)
    assert restored.rule_state.hysteresis_count == 2


def test_other_21_the_reported_loss_is_unscaled():
    loss, _ = ols.scaled_value_and_grad(lambda x: jnp.sum(x), RULE.init())(jnp.ones(3))
    assert loss == 3


# 22, a skipped batch that is fed again: the loop decides that, by `last_finite`.
# 23, settings read from the wrong place: presets must follow recorded trajectories.


def test_other_24_weight_decay_is_neither_scaled_nor_flushed():
    tx = ols.loss_scaled(lenient(optax.adamw(1.0, weight_decay=1e-6)), RULE)
    zeros = {"w": jnp.zeros(3, jnp.float16)}
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["w"], -1e-6 * PARAMS["w"], rtol=1e-6)


def test_other_25_factors_that_are_not_powers_of_two_stay_within_an_ulp():
    rule = ols.dynamic_loss_scale(1000.0, growth_factor=1.5, growth_interval=1)
    state, expected = rule.init(), 1000.0
    for _ in range(10):
        state, expected = rule.adjust(state, True), np.float32(expected * 1.5)
        assert abs(state.loss_scale - expected) <= np.spacing(expected)
