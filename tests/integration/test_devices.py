"""`docs/guides/many_devices.md`: all skip together, and exchange only the verdict."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.compare import assert_same_bits, types
from helpers.compiled import collectives_of
from helpers.inner import adam

pytestmark = pytest.mark.several_devices

SCALE = 2.0**10
RULES = {
    "dynamic": ols.dynamic_loss_scale(SCALE),
    "headroom": ols.headroom_loss_scale(SCALE, history=4, recent=2),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
check_vma = pytest.mark.parametrize("check_vma", slow_except([True], [True, False]))
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 16).reshape(8, 2), "b": jnp.asarray([0.5, -0.0])}
BATCH = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
BAD_BATCH = BATCH.at[5, 0].set(jnp.nan)  # One device of eight sees it.
BATCHES = [BATCH, BAD_BATCH, 2 * BATCH]


def make_mesh(axis_type=AxisType.Auto, shape=(8,)):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def over_devices(fun, in_specs, out_specs, *, shape=(8,), check_vma=True):
    """A function under `shard_map` and `jit`."""
    over = {"mesh": make_mesh(shape=shape), "check_vma": check_vma}
    return jax.jit(jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs, **over))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def train_step(tx, axis_name=None):
    """A step on a device's share of the batch; the trainer averages the gradients."""

    def step(params, state, batch):
        grads = ols.scaled_grad(loss_fn, state)(params, batch)
        grads = jax.lax.pmean(grads, axis_name) if axis_name else grads
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def train(step, params, state):
    for batch in BATCHES:
        params, state = step(params, state, batch)
    return params, state


@functools.cache
def on_one_device():
    tx = ols.loss_scaled(adam(), RULES["dynamic"])
    return train(jax.jit(train_step(tx)), PARAMS, tx.init(PARAMS))


def assert_close(actual):
    """Values agree up to the order in which devices are summed."""
    pairs = zip(*map(jax.tree.leaves, (actual, on_one_device())), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_pmap_equals_one_device_and_all_devices_skip_together():
    tx = ols.loss_scaled(adam(), RULES["dynamic"], axis_name="data")
    step = jax.pmap(train_step(tx, "data"), axis_name="data")
    one_row_each = lambda *args: step(*args[:2], args[2][:, None])  # noqa: E731
    first = jax.tree.map(lambda x: jnp.stack([x] * 8), (PARAMS, tx.init(PARAMS)))
    params, state = train(one_row_each, *first)
    for device in (0, 5):
        assert_close(jax.tree.map(lambda x, d=device: x[d], (params, state)))
    assert state.loss_scale_state.total_notfinite.tolist() == [1] * 8


def test_shard_map_equals_one_device_and_all_devices_skip_together():
    tx = ols.loss_scaled(adam(), RULES["dynamic"], axis_name="data")
    step = over_devices(
        train_step(tx, "data"), (P(), P(), P("data")), P(), check_vma=False
    )
    after = train(step, PARAMS, tx.init(PARAMS))
    assert_close(after)
    assert after[1].loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize(
    "axis_type", slow_except([AxisType.Explicit], [AxisType.Explicit, AxisType.Auto])
)
@each_rule
def test_under_sharded_jit_all_devices_skip_and_every_type_is_kept(rule, axis_type):
    # XLA's maximum over devices drops a NaN.
    tx = ols.loss_scaled(adam(), rule)
    update = jax.jit(tx.update)
    with jax.set_mesh(make_mesh(axis_type)):
        spec = {"w": P("data"), "b": P()}
        params = {name: jax.device_put(PARAMS[name], spec[name]) for name in spec}
        state = jax.jit(tx.init)(params)
        good = jax.tree.map(lambda p: p * SCALE, params)
        _, after = update(good, state, params)
        assert types(after) == types(state)
        bad = np.asarray(good["w"]).copy()
        bad[5, 0] = np.nan
        bad = {**good, "w": jax.device_put(bad, good["w"].sharding)}
        updates, skipped = update(bad, after, params)
        assert_same_bits(optax.apply_updates(params, updates), params)
        assert_same_bits(skipped.inner_state, after.inner_state)
        assert skipped.loss_scale_state.total_notfinite == 1
        assert types(skipped) == types(state)


@check_vma
@each_rule
def test_a_nan_in_one_shard_of_two_axes_makes_all_devices_skip(rule, check_vma):
    # A device sees only its shard, so the verdict must span both axes.
    tx = ols.loss_scaled(optax.sgd(1.0), rule, axis_name=("data", "model"))
    params = jnp.ones((8, 4))
    state, spec = tx.init(params), P("data", "model")
    specs = (spec, P(), spec), (spec, P())
    step = over_devices(tx.update, *specs, shape=(4, 2), check_vma=check_vma)
    updates, after = step(params, state, params)
    assert updates.all()
    assert after.loss_scale_state.last_finite
    updates, after = step(params.at[7, 3].set(jnp.nan), state, params)
    assert not updates.any()
    assert after.loss_scale_state.total_notfinite == 1


@pytest.mark.slow
def test_sharded_parameters_and_moments_keep_their_shardings_over_donated_steps():
    mesh, tx = make_mesh(), ols.loss_scaled(adam(), RULES["dynamic"])

    def place(leaf):
        return NamedSharding(mesh, P("data") if jnp.shape(leaf) == (8, 2) else P())

    first = jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS)))
    shardings = jax.tree.map(place, first)
    params, state = jax.device_put(first, shardings)
    step = jax.jit(train_step(tx), donate_argnums=(0, 1))
    for batch in BATCHES:
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, state = step(params, state, batch)
    assert_close((params, state))
    assert step._cache_size() == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, (params, state)) == shardings


@check_vma
def test_in_shard_map_statistics_of_a_skipped_step_are_kept(check_vma):
    tx = ols.loss_scaled(None, RULES["dynamic"], axis_name="data")

    def step(grad, new, old):
        _, state = tx.update(grad, tx.init(grad))
        return ols.where_applied(state, {"mean": new}, {"mean": old})["mean"]

    step = over_devices(step, P("data"), P("data"), check_vma=check_vma)
    new, old = jnp.ones((8, 3)), jnp.zeros((8, 3))
    assert step(jnp.ones(8), new, old).all()
    assert not step(jnp.ones(8).at[5].set(jnp.nan), new, old).any()


@pytest.mark.parametrize(
    ("verdict", "rule"),
    [
        ("accept", ols.no_loss_scale()),
        ("accept", RULES["dynamic"]),
        ("grads_finite", RULES["headroom"]),
    ],
)
def test_a_verdict_of_one_device_is_that_of_all(verdict, rule):
    tx = ols.loss_scaled(optax.sgd(1.0), rule, axis_name="data")

    def step(losses):
        state = tx.init(PARAMS)
        updates, state = tx.update(PARAMS, state, PARAMS, **{verdict: losses[0] < 3.0})
        return updates, state

    step = over_devices(step, P("data"), P(), check_vma=False)
    for bad, total in ((None, 0), (5, 1), (0, 1)):
        losses = np.ones(8, np.float32)
        if bad is not None:
            losses[bad] = 4.0
        updates, state = step(losses)
        assert state.loss_scale_state.total_notfinite == total
        assert bool(updates["w"].any()) == (total == 0)


def test_gradients_are_never_reduced_over_devices():
    # flax's DynamicScale(axis_name=...) gives N times the gradient under check_vma.
    tx = ols.loss_scaled(None, RULES["dynamic"], axis_name="data")
    update = over_devices(lambda g: tx.update(g, tx.init(g))[0], P("data"), P("data"))
    grads = jnp.arange(24.0)
    assert_same_bits(update(grads * SCALE), grads)


@pytest.mark.parametrize("rule", RULES)
def test_only_scalars_cross_devices(rule):
    mesh = make_mesh(shape=(4, 2))
    tx = ols.loss_scaled(adam(), RULES[rule])
    specs = {"a": P("data"), "b": P(None, "data"), "c": P("data"), "d": P()}
    params = {
        name: jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    state = jax.jit(tx.init)(params)
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    found = collectives_of(compiled)
    assert found
    for arrays, kind in found:
        assert kind == "all-reduce"
        assert set(arrays) <= {"pred[]", "f32[]"}


def test_masters_and_moments_have_the_shardings_of_their_parameters():
    sharding = NamedSharding(make_mesh(), P("data"))
    params = jax.device_put(PARAMS["w"].astype(jnp.float16), sharding)
    state = ols.loss_scaled(ols.master_weights(adam())).init(params)
    masters, inner_state = state.inner_state
    for array in (masters, inner_state[0].mu, inner_state[0].nu):
        assert array.sharding == sharding


def test_an_unknown_axis_name_is_an_error_with_a_hint():
    tx = ols.loss_scaled(adam(), RULES["dynamic"], axis_name="batch")
    with pytest.raises(NameError, match="unbound axis name: batch") as caught:
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert "`axis_name` must name axes of the `pmap`" in "".join(caught.value.__notes__)


@check_vma
@pytest.mark.parametrize("spec", [P("data"), P()])
def test_all_finite_is_the_same_for_varying_and_invariant_arrays(spec, check_vma):
    check = functools.partial(ols.all_finite, axis_name="data")
    finite = over_devices(check, spec, P(), check_vma=check_vma)
    assert finite(jnp.ones(8))
    assert not finite(jnp.ones(8).at[3].set(jnp.inf))
