"""Several devices: all skip together, and they exchange nothing but the verdict."""

import functools
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compat import IS_JAX_0_7, set_mesh
from helpers.compiled import collectives_of
from helpers.inner import adam, lenient
from helpers.programs import equations_of

pytestmark = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices, as on CPU"
)

PACKED = pytest.mark.skipif(
    IS_JAX_0_7, reason="XLA of JAX 0.7 does not pack small reductions on CPU"
)

SCALE = 2.0**10
RULE = ols.dynamic_loss_scale(SCALE)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 16).reshape(8, 2), "b": jnp.asarray([0.5, -0.0])}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


BATCH = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
BAD_BATCH = BATCH.at[5, 0].set(jnp.nan)  # One device of eight sees it.


def local_step(tx, params, state, batch, *, mean):
    """One data-parallel step on this device's share of the batch."""
    grads = ols.scaled_grad(loss_fn, state)(params, batch)
    grads = jax.lax.pmean(grads, "data") if mean else grads
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def one_device(batches):
    tx = ols.loss_scaled(adam(), RULE)
    params, state = PARAMS, tx.init(PARAMS)
    for batch in batches:
        grads = ols.scaled_grad(loss_fn, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(actual, expected):
    """Values agree up to the order in which devices are summed."""
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
        actual,
        expected,
    )


def test_pmap_equals_one_device_and_all_devices_skip_together():
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")
    step = jax.pmap(functools.partial(local_step, tx, mean=True), axis_name="data")
    params, state = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (8, *x.shape)), (PARAMS, tx.init(PARAMS))
    )
    batches = [BATCH, BAD_BATCH, 2 * BATCH]
    for batch in batches:
        params, state = step(params, state, batch[:, None])
    for device in range(8):
        ours = jax.tree.map(lambda x, d=device: x[d], (params, state))
        assert_close(ours, one_device(batches))
    assert state.loss_scale_state.total_notfinite.tolist() == [1] * 8


def test_pmap_without_a_mean_shares_only_the_verdict():
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")
    step = jax.pmap(functools.partial(local_step, tx, mean=False), axis_name="data")
    first = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (8, *x.shape)), (PARAMS, tx.init(PARAMS))
    )
    params, state = step(*first, BAD_BATCH[:, None])
    assert_same_bits((params, state.inner_state), (first[0], first[1].inner_state))
    assert state.loss_scale_state.loss_scale.tolist() == [SCALE / 2] * 8
    params, _ = step(*first, BATCH[:, None])
    assert len(np.unique(np.asarray(params["w"]), axis=0)) > 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_equals_one_device_and_all_devices_skip_together(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")

    def step(params, state, batch):
        def mean_loss(params, batch):
            return jax.lax.pmean(loss_fn(params, batch), "data")

        # With the check, shard_map sums gradients of replicated parameters.
        loss = mean_loss if check_vma else loss_fn
        grads = ols.scaled_grad(loss, state)(params, batch)
        grads = grads if check_vma else jax.lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=(P(), P()),
            check_vma=check_vma,
        )
    )
    params, state = PARAMS, tx.init(PARAMS)
    batches = [BATCH, BAD_BATCH, 2 * BATCH]
    for batch in batches:
        params, state = sharded(params, state, batch)
    assert_close((params, state), one_device(batches))
    assert state.loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_under_sharded_jit_all_devices_skip_and_every_type_is_kept(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with set_mesh(mesh):
        specs = {"w": P("data"), "b": P()}
        params = {
            name: jax.device_put(PARAMS[name], NamedSharding(mesh, specs[name]))
            for name in PARAMS
        }
        tx = ols.loss_scaled(adam(), RULE)
        state = jax.jit(tx.init)(params)
        update = jax.jit(tx.update)
        good = jax.tree.map(lambda p: p * SCALE, params)
        _, after = update(good, state, params)
        assert types(after) == types(state)
        for value in (np.nan, np.inf):
            poisoned = np.asarray(good["w"]).copy()
            poisoned[5, 0] = value  # On one device of eight.
            bad = {**good, "w": jax.device_put(poisoned, good["w"].sharding)}
            updates, skipped = update(bad, after, params)
            assert_same_bits(optax.apply_updates(params, updates), params)
            assert_same_bits(skipped.inner_state, after.inner_state)
            assert types(skipped) == types(state)
            assert [leaf.sharding for leaf in jax.tree.leaves(skipped)] == [
                leaf.sharding for leaf in jax.tree.leaves(after)
            ]
            assert skipped.loss_scale_state.loss_scale.sharding.is_fully_replicated
            assert skipped.loss_scale_state.total_notfinite == 1
        # The first step can be skipped, with a state that was made eagerly.
        updates, skipped = update(bad, tx.init(params), params)
        assert_same_bits(optax.apply_updates(params, updates), params)
        assert skipped.loss_scale_state.total_notfinite == 1


def collectives(function, *args):
    return collectives_of(jax.jit(function).lower(*args).compile())


ONE_AXIS = {"a": P("data"), "b": P(None, "data"), "c": P("data"), "d": P()}
TWO_AXES = {
    "a": P("data"),
    "b": P(None, "model"),
    "c": P("data", "model"),
    "d": P(("data", "model")),
    "e": P(),
}


def sharded(specs, axis_types, shape=(4, 2)):
    """A mesh, and arrays on it by name."""
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=axis_types)
    array = jnp.ones((16, 16))
    return mesh, {
        name: jax.device_put(array, NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }


class MaxState(NamedTuple):
    largest: jax.Array


def max_rule():
    """A rule that needs the largest magnitude."""
    base = ols.static_loss_scale(SCALE)

    def init():
        return base.init()._replace(rule_state=MaxState(jnp.zeros(())))

    def adjust(state, grads_finite, grads_max=None):
        adjusted = base.adjust(state, grads_finite)
        return adjusted._replace(rule_state=MaxState(grads_max))

    return ols.LossScale(init, adjust, needs_grads_max=True)


@pytest.mark.fast_every(2)
@PACKED
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("leaves", [pytest.param(1, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize(
    ("rule", "scalar"), [(RULE, "pred[]"), (max_rule(), "f32[]")], ids=["bool", "max"]
)
def test_the_check_needs_one_collective_that_carries_only_scalars(
    axis_type, leaves, rule, scalar
):
    specs = {
        f"{i}{name}": spec for i in range(leaves) for name, spec in ONE_AXIS.items()
    }
    mesh, params = sharded(specs, (axis_type,), shape=(8,))
    with set_mesh(mesh):
        tx = ols.loss_scaled(adam(), rule)
        state = jax.jit(tx.init)(params)
        found = collectives(tx.update, params, state, params)
    # XLA packs the leaves' scalars into one operation.
    ((result, kind),) = found
    assert kind == "all-reduce"
    assert set(result) == {scalar}


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("specs", [TWO_AXES, {"a": P("data"), "c": P(None, "model")}])
def test_on_an_explicit_mesh_the_check_needs_one_collective_for_any_axes(specs):
    mesh, params = sharded(specs, (AxisType.Explicit,) * 2)
    with set_mesh(mesh):
        tx = ols.loss_scaled(adam(), RULE)
        state = jax.jit(tx.init)(params)
        found = collectives(tx.update, params, state, params)
        _updates, after = jax.jit(tx.update)(params, state, params)
        assert types(after) == types(state)
        bad = {**params, "c": params["c"] * jnp.nan}
        skipped = jax.jit(tx.update)(bad, state, params)[1]
        tx = ols.loss_scaled(adam(), max_rule())
        unscaled = jax.jit(tx.update)(params, tx.init(params), params)[1]
    assert unscaled.loss_scale_state.rule_state.largest == 1 / SCALE
    assert found == [(["pred[]"], "all-reduce")]
    assert after.loss_scale_state.last_finite
    assert not skipped.loss_scale_state.last_finite


@PACKED
@pytest.mark.parametrize(
    "axis_types", [(AxisType.Auto,) * 2, (AxisType.Explicit, AxisType.Auto)]
)
def test_on_an_automatic_mesh_the_check_needs_one_collective_for_each_set_of_axes(
    axis_types,
):
    # XLA cannot merge reductions over different devices, and while tracing the
    # shardings are unknown. Still only scalars cross, and nothing is gathered.
    mesh, params = sharded(TWO_AXES, axis_types)
    with set_mesh(mesh):
        tx = ols.loss_scaled(adam(), RULE)
        found = collectives(tx.update, params, jax.jit(tx.init)(params), params)
    assert 1 <= len(found) <= 3
    for result, kind in found:
        assert kind == "all-reduce"
        assert set(result) == {"pred[]"}


@pytest.mark.fast_every(6)
@pytest.mark.parametrize(
    "axis_name",
    [
        "data",
        ("data", "model"),
        pytest.param(["data", "model"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("check_updates", "expected"), [(False, 1), (True, 2)])
def test_in_shard_map_each_check_needs_one_collective(
    axis_name, check_vma, check_updates, expected
):
    mesh, params = sharded(TWO_AXES, (AxisType.Auto,) * 2)
    tx = ols.loss_scaled(adam(), RULE, axis_name=axis_name, check_updates=check_updates)
    state = tx.init(params)
    # Moments are sharded as their parameters are; everything else is replicated.
    specs = jax.tree.map(lambda leaf: P(), state)
    specs = optax.tree.set(specs, mu=TWO_AXES, nu=TWO_AXES)
    if axis_name == "data":
        specs = jax.tree.map(lambda spec: P(), specs)
    leaf_specs = TWO_AXES if axis_name != "data" else dict.fromkeys(TWO_AXES, P())
    update = jax.shard_map(
        tx.update,
        mesh=mesh,
        in_specs=(leaf_specs, specs, leaf_specs),
        out_specs=(leaf_specs, specs),
        check_vma=check_vma,
    )
    found = collectives(update, params, state, params)
    assert found.count((["pred[]"], "all-reduce")) == expected


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_a_nan_on_one_device_makes_all_devices_of_two_axes_skip(check_vma):
    # A device sees only its shard, so the verdict must span both axes.
    mesh, params = sharded({"c": TWO_AXES["c"]}, (AxisType.Auto,) * 2)
    tx = ols.loss_scaled(adam(), RULE, axis_name=("data", "model"))
    spec = {"c": P("data", "model")}
    state = tx.init(params)
    specs = optax.tree.set(jax.tree.map(lambda leaf: P(), state), mu=spec, nu=spec)
    step = jax.jit(
        jax.shard_map(
            tx.update,
            mesh=mesh,
            in_specs=(spec, specs, spec),
            out_specs=(spec, specs),
            check_vma=check_vma,
        )
    )
    bad = {"c": params["c"].at[15, 15].set(jnp.nan)}  # Only on the last device.
    updates, skipped = step(bad, state, params)
    assert not updates["c"].any()
    assert_same_bits(skipped.inner_state, state.inner_state)
    updates, _ = step(params, state, params)
    assert updates["c"].all()
    every = P(("data", "model"))

    def verdict_of_device(x):
        return jnp.reshape(ols.all_finite(x, axis_name=("data", "model")), 1)

    verdicts = jax.jit(
        jax.shard_map(
            verdict_of_device,
            mesh=mesh,
            in_specs=every,
            out_specs=every,
            check_vma=check_vma,
        )
    )
    assert verdicts(jnp.ones(8)).all()
    assert not verdicts(jnp.ones(8).at[7].set(jnp.nan)).any()


def test_a_tensor_parallel_shard_map_equals_one_device():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = ols.loss_scaled(adam(), RULE, axis_name=("data", "model"))
    weight_specs = {"w": P("model"), "b": P()}  # Rows of the matrix by device.

    def loss(params, batch):
        out = jax.lax.psum(batch @ params["w"], "model") + params["b"][None]
        return jax.lax.pmean(jnp.mean(out**2), "data")

    def step(params, state, batch):
        grads = ols.scaled_grad(loss, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(PARAMS)
    specs = jax.tree.map(lambda leaf: P(), state)
    specs = optax.tree.set(specs, mu=weight_specs, nu=weight_specs)
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(weight_specs, specs, P("data", "model")),
            out_specs=(weight_specs, specs),
        )
    )
    params, batches = PARAMS, [BATCH, BAD_BATCH, 2 * BATCH]
    for batch in batches:
        params, state = step(params, state, batch)
    assert_close((params, state), one_device(batches))


def accumulate(tx, params, state, batches, mean):
    """Micro-steps under `lax.scan`, as a pipeline has them."""

    def micro_step(carry, batch):
        params, state = carry
        grads = ols.scaled_grad(loss_fn, state)(params, batch)
        grads = jax.lax.pmean(grads, "data") if mean else grads
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(micro_step, (params, state), batches)[0]


MICRO_BATCHES = jnp.stack([BATCH, BAD_BATCH, 2 * BATCH, -BATCH, 0.5 * BATCH])


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("where", ["sharded jit", "shard_map"])
def test_accumulation_under_scan_drops_a_bad_micro_batch_on_all_devices(where):
    def make(axis_name):
        inner = optax.MultiSteps(optax.adam(0.1), 2)
        return lenient(ols.loss_scaled(inner, RULE, axis_name=axis_name))

    alone = make(None)
    good = jnp.delete(MICRO_BATCHES, 1, axis=0)
    expected, _ = accumulate(alone, PARAMS, alone.init(PARAMS), good, mean=False)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    if where == "sharded jit":
        run = functools.partial(accumulate, alone, mean=False)
        batches = jax.device_put(MICRO_BATCHES, NamedSharding(mesh, P(None, "data")))
    else:
        run = jax.shard_map(
            functools.partial(accumulate, make("data"), mean=True),
            mesh=mesh,
            in_specs=(P(), P(), P(None, "data")),
            out_specs=P(),
            check_vma=False,
        )
        batches = MICRO_BATCHES
    params, state = jax.jit(run)(PARAMS, alone.init(PARAMS), batches)
    assert_close(params, expected)
    assert state.loss_scale_state.total_notfinite == 1
    assert optax.tree.get(state, "gradient_step") == 2


def test_an_unbound_axis_name_raises_the_error_of_jax_with_a_hint():
    tx = ols.loss_scaled(adam(), RULE, axis_name="batch")
    with pytest.raises(NameError, match="unbound axis name: batch") as caught:
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    notes = "".join(caught.value.__notes__)
    assert "`axis_name` must name axes of the `pmap`" in notes


def test_on_an_explicit_mesh_other_leaves_can_be_outside_the_mesh():
    mesh, params = sharded(TWO_AXES, (AxisType.Explicit,) * 2)
    trees = {"a": np.ones(3, np.float32), "b": 1.0, **params}
    assert jax.jit(ols.all_finite)(trees)  # Without `set_mesh`, too.
    with set_mesh(mesh):
        assert jax.jit(ols.all_finite)(trees)
        assert not jax.jit(ols.all_finite)({**trees, "b": np.nan})
        # A step whose rule needs max_magnitude can be differentiated; the gradient of
        # max_magnitude is zero.
        largest = jax.grad(lambda c: ols.max_magnitude({**params, "c": c}))
        assert not jax.jit(largest)(params["c"]).any()


def test_on_an_explicit_mesh_state_and_gradients_can_be_sharded_differently():
    mesh, params = sharded({"a": P()}, (AxisType.Explicit,), shape=(8,))
    tx = ols.loss_scaled(adam(), RULE)
    with set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        grads = jax.device_put(params, NamedSharding(mesh, P("data")))
        bare = jax.jit(adam().update)(grads, state.inner_state, params)[1]
        for poison, finite in ((1.0, True), (jnp.nan, False)):
            bad = {"a": grads["a"] * poison}
            _, after = jax.jit(tx.update)(bad, state, params)
            assert types(after.inner_state) == types(bare)
            assert after.loss_scale_state.last_finite == finite


def test_an_empty_tuple_of_axis_names_means_no_axis():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    finite = jax.jit(
        jax.shard_map(
            lambda grads: ols.all_finite(grads, axis_name=()),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
        )
    )
    assert finite(jnp.ones(8))
    of_each_device = jax.jit(
        jax.shard_map(
            lambda grads: ols.all_finite(grads, axis_name=()).reshape(1),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
    )
    verdicts = of_each_device(jnp.ones(8).at[3].set(jnp.nan))
    assert verdicts.tolist() == [True] * 3 + [False] + [True] * 4


def test_the_update_never_branches_on_the_verdict_of_one_device():
    # jax #40823: under shard_map the branches of a cond diverge silently.
    tx = ols.loss_scaled(adam(), RULE)
    program = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    assert "cond" not in str(program)
    assert "select_n" in {equation.primitive.name for equation in equations_of(program)}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local_verdict(grad):
        return tx.update({"w": grad}, tx.init({"w": grad}))[1].loss_scale_state

    disagreeing = jax.shard_map(
        local_verdict, mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(disagreeing)(jnp.ones(8))


def test_in_shard_map_float16_gradients_can_update_float32_parameters_or_skip():
    # optax.apply_if_finite fails there: branches of a cond must agree in dtype.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")
    state = tx.init(PARAMS)
    update = jax.jit(
        jax.shard_map(tx.update, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P())
    )
    grads = jax.tree.map(lambda p: (p * SCALE).astype(jnp.float16), PARAMS)
    updates, after = update(grads, state, PARAMS)
    assert types(after) == types(state)
    assert updates["w"].dtype == jnp.float32
    assert updates["w"].any()
    bad = {**grads, "b": grads["b"] * jnp.float16(jnp.inf)}
    assert not update(bad, state, PARAMS)[0]["w"].any()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [P("data"), P()])
def test_the_verdict_is_the_same_for_varying_and_invariant_gradients(spec, check_vma):
    # A psum of an invariant flag would count the flag eight times.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    finite = jax.jit(
        jax.shard_map(
            lambda grads: ols.all_finite(grads, axis_name="data"),
            mesh=mesh,
            in_specs=spec,
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    assert finite(jnp.ones(8))
    assert not finite(jnp.ones(8).at[3].set(jnp.inf))
    assert not finite(jnp.ones(8).at[3].set(jnp.nan))


def test_without_an_axis_name_a_replicated_state_diverges_between_devices():
    # Without `axis_name` the verdicts differ, and replicated states diverge.
    def average(grads, state, params):
        state = jax.tree.map(lambda s, p: 0.5 * s + 0.5 * p, state, params)
        return grads, state

    tx = ols.loss_scaled(optax.GradientTransformation(jnp.zeros_like, average), RULE)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    def step(grads, params):
        _, state = tx.update(grads, tx.init(params), params)
        return state.inner_state

    averages = step(jnp.ones(8).at[5].set(jnp.inf), jnp.ones(1))
    assert averages.tolist() == [0.5] * 5 + [0.0] + [0.5] * 2


@pytest.mark.parametrize(("inner", "sign"), [(None, 1), (optax.sgd(1.0), -1)])
def test_gradients_are_never_reduced_over_devices(inner, sign):
    # flax's DynamicScale(axis_name=...) gives N times the gradient under check_vma.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.loss_scaled(inner, RULE, axis_name="data")
    local = jax.jit(
        jax.shard_map(
            lambda grads: tx.update(grads, tx.init(grads))[0],
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
    )
    assert_same_bits(local(jnp.arange(24.0) * SCALE), sign * jnp.arange(24.0))


def test_a_float16_mean_over_devices_can_overflow_and_a_float32_mean_does_not():
    # The gradients are finite on every device, but their float16 sum is infinite. So
    # the check comes after the reduction; a reduction in float32 does not overflow.
    tx = ols.loss_scaled(None, RULE, axis_name="data")
    grads = jnp.full((8, 1), 60000.0, jnp.float16)

    def step(grads, dtype):
        grads = jax.lax.pmean(grads.astype(dtype), "data")
        return tx.update(grads, tx.init(grads))

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for dtype, finite in ((jnp.float16, False), (jnp.float32, True)):
        of_dtype = functools.partial(step, dtype=dtype)
        updates, state = jax.pmap(of_dtype, axis_name="data")(grads)
        assert state.loss_scale_state.last_finite.tolist() == [finite] * 8
        expected = 60000.0 / SCALE if finite else 0.0
        np.testing.assert_allclose(updates, expected, rtol=1e-3)
        mapped = jax.shard_map(of_dtype, mesh=mesh, in_specs=P("data"), out_specs=P())
        updates, state = jax.jit(mapped)(grads)
        assert state.loss_scale_state.last_finite == finite
        np.testing.assert_allclose(updates, expected, rtol=1e-3)


def test_pcast_avoids_the_float16_sum_that_shard_map_inserts():
    # With its check, shard_map sums gradients of replicated parameters in float16, and
    # a cast afterwards is too late.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    to_varying = (
        functools.partial(jax.lax.pcast, axis_name="data", to="varying")
        if hasattr(jax.lax, "pcast")
        else functools.partial(jax.lax.pvary, axis_name="data")
    )
    tx = ols.loss_scaled(None, ols.static_loss_scale(1.0), axis_name="data")

    def step(weight, x, cast):
        weight = cast(weight)
        grads = ols.scaled_grad(lambda w: jnp.sum(w * x), tx.init(weight))(weight)
        grads = jax.lax.pmean(grads.astype(jnp.float32), "data")
        return tx.update(grads, tx.init(grads))[0]

    for cast, expected in ((lambda weight: weight, 0.0), (to_varying, 20000.0)):
        over = jax.jit(
            jax.shard_map(
                functools.partial(step, cast=cast),
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=P(),
            )
        )
        assert over(jnp.float16(1.0), jnp.full(8, 20000.0, jnp.float16)) == expected


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_maximum_over_shards_does_not_drop_a_nan(axis_type):
    # XLA's all-reduce-max over devices drops NaN.
    mesh, params = sharded({"a": P("data")}, (axis_type,), shape=(8,))
    with set_mesh(mesh):
        poison = np.ones((16, 16), np.float32)
        poison[5, 5] = np.nan
        bad = jax.device_put(poison, params["a"].sharding)
        assert jax.jit(ols.max_magnitude)([bad]) == np.inf
    largest = jax.pmap(lambda x: ols.max_magnitude(x, axis_name="i"), axis_name="i")
    assert (largest(poison.reshape(8, -1)) == np.inf).all()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_headroom_rule_sees_a_nan_on_any_shard(axis_type):
    # XLA's maximum over devices drops a NaN.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    tx = ols.loss_scaled(adam(), ols.headroom_loss_scale())
    update = jax.jit(tx.update)
    with set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data"))
        params = jax.device_put(jnp.ones((8, 2)), sharding)
        state = tx.init(params)
        for shard in range(8):
            grads = np.ones((8, 2), np.float32)
            grads[shard, 1] = jnp.nan
            _, after = update(jax.device_put(grads, sharding), state, params)
            assert not ols.find_loss_scale_state(after).last_finite, shard


@pytest.mark.slow
def test_all_devices_of_pmap_have_the_same_headroom_scale():
    tx = ols.loss_scaled(adam(), ols.headroom_loss_scale(), axis_name="data")
    params = jnp.ones(2)
    states = jax.tree.map(lambda x: jnp.stack([x] * 8), tx.init(params))
    update = jax.pmap(tx.update, axis_name="data", in_axes=(0, 0, None))
    for shard in range(8):
        grads = jnp.ones((8, 2)).at[shard].set(2.0**7)
        _, after = update(grads, states, params)
        # The largest unscaled gradient is 2**7 / 2**15 = 2**-8, and the margin is 0.75
        # bits: 65504 * 2**-0.75 / 2**-8 is about 2**23.25.
        assert set(after.loss_scale_state.loss_scale.tolist()) == {2.0**23}
        _, after = update(grads.at[shard, 0].set(jnp.nan), after, params)
        # A nonfinite step counts as a gradient twice as large, so it costs one bit.
        assert set(after.loss_scale_state.loss_scale.tolist()) == {2.0**22}


def test_under_pmap_without_an_axis_name_the_scales_of_devices_drift_apart():
    # This is why `axis_name` is needed: each replica has its own scale.
    tx = ols.loss_scaled(adam(), RULE)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), tx.init(PARAMS))
    grads = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), PARAMS)
    grads["b"] = grads["b"].at[5].set(jnp.nan)
    _, state = jax.pmap(tx.update)(grads, state, grads)
    expected = [SCALE / 2 if device == 5 else SCALE for device in range(8)]
    assert state.loss_scale_state.loss_scale.tolist() == expected


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("spec", [P("data"), P()])
def test_with_out_shardings_for_init_the_step_is_compiled_only_once(spec):
    mesh, params = sharded(ONE_AXIS, (AxisType.Auto,), shape=(8,))
    tx = ols.loss_scaled(adam(), RULE)

    def shardings(leaf):
        return jax.tree.map(
            lambda x: NamedSharding(mesh, spec if x.ndim else P()), leaf
        )

    params = jax.device_put(params, shardings(params))
    abstract = jax.eval_shape(tx.init, params)
    compilations = {}
    for name, init in {
        "eager": tx.init,
        "out_shardings": jax.jit(tx.init, out_shardings=shardings(abstract)),
    }.items():
        update = jax.jit(functools.partial(tx.update))  # Has its own cache.
        state = init(params)
        for _ in range(3):
            _, state = update(params, state, params)
        compilations[name] = update._cache_size()
    assert compilations == {"eager": 2, "out_shardings": 1}


def test_fully_sharded_parameters_and_moments_equal_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.loss_scaled(adam(), RULE)
    spec = {"w": NamedSharding(mesh, P("data")), "b": NamedSharding(mesh, P())}
    params = jax.tree.map(jnp.copy, PARAMS)
    params = {name: jax.device_put(params[name], spec[name]) for name in params}
    replicated = NamedSharding(mesh, P())
    abstract = jax.tree.map(lambda _: replicated, jax.eval_shape(tx.init, params))
    state = jax.jit(tx.init, out_shardings=optax.tree.set(abstract, mu=spec, nu=spec))(
        params
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        grads = ols.scaled_grad(loss_fn, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    batches = [BATCH, BAD_BATCH, 2 * BATCH]
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    for batch in batches:
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, state = step(params, state, batch)
    assert_close((params, state), one_device(batches))
    assert step._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == before
    assert state.loss_scale_state.loss_scale.sharding.is_fully_replicated
    assert len(state.inner_state[0].mu["w"].sharding.device_set) == 8


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
def test_the_update_can_be_lowered_for_every_accelerator(platform):
    tx = ols.loss_scaled(adam(), RULE)
    export = jax.export.export(jax.jit(tx.update), platforms=[platform])
    assert export(PARAMS, tx.init(PARAMS), PARAMS).platforms == (platform,)
    mesh, params = sharded(TWO_AXES, (AxisType.Explicit,) * 2)
    with set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        assert export(params, state, params).nr_devices == 8
