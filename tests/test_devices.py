"""Several devices: all agree to skip, and nothing but the verdict crosses them."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same_bits, types
from compat import set_mesh
from inner import adam
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

SCALE = 2.0**10
RULE = ols.dynamic_loss_scale(SCALE)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 16).reshape(8, 2), "b": jnp.asarray([0.5, -0.0])}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


BATCH = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
BAD_BATCH = BATCH.at[5, 0].set(jnp.nan)  # Seen by one device of eight.


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
    """The same up to the order in which devices are summed."""
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
        actual,
        expected,
    )


def test_pmap_equals_one_device_and_all_skip_together():
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


def test_pmap_without_a_mean_shares_the_verdict_alone():
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
def test_shard_map_equals_one_device_and_all_skip_together(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = ols.loss_scaled(adam(), RULE, axis_name="data")

    def step(params, state, batch):
        def mean_loss(params, batch):
            return jax.lax.pmean(loss_fn(params, batch), "data")

        # With the check, gradients of replicated parameters arrive summed.
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
def test_sharded_jit_skips_everywhere_and_keeps_every_type(axis_type):
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
        poisoned = np.asarray(good["w"]).copy()
        poisoned[5, 0] = np.nan  # On one device of eight.
        bad = {**good, "w": jax.device_put(poisoned, good["w"].sharding)}
        updates, skipped = update(bad, after, params)
        assert_same_bits(optax.apply_updates(params, updates), params)
        assert_same_bits(skipped.inner_state, after.inner_state)
        assert types(skipped) == types(state)
        assert [leaf.sharding for leaf in jax.tree.leaves(skipped)] == [
            leaf.sharding for leaf in jax.tree.leaves(after)
        ]
        assert skipped.loss_scale_state.loss_scale.sharding.is_fully_replicated


def test_vmap_over_an_ensemble_skips_the_bad_member_alone():
    tx = ols.loss_scaled(adam(), RULE)
    params = jax.tree.map(lambda p: jnp.stack([p, p + 1, p - 1]), PARAMS)
    states = jax.vmap(tx.init)(params)
    grads = jax.tree.map(lambda p: p * SCALE, params)
    grads["b"] = grads["b"].at[1, 0].set(jnp.inf)
    updates, states = jax.vmap(tx.update)(grads, states, params)
    after = optax.apply_updates(params, updates)
    assert states.loss_scale_state.last_finite.tolist() == [True, False, True]
    assert ols.get_loss_scale(states).tolist() == [SCALE, SCALE / 2, SCALE]
    for member, moved in enumerate([True, False, True]):
        same = bool((after["w"][member] == params["w"][member]).all())
        assert same != moved


def test_donated_buffers_are_reused():
    tx = ols.loss_scaled(adam(), RULE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, poison):
        grads = jax.tree.map(lambda p: p * poison, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    for poison in (1.0, np.nan, 1.0):
        old = jax.tree.leaves((params, state.inner_state))
        params, state = step(params, state, poison)
        assert all(leaf.is_deleted() for leaf in old)
    assert state.loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
def test_the_update_lowers_for_every_accelerator(platform):
    tx = ols.loss_scaled(adam(), RULE)
    export = jax.export.export(jax.jit(tx.update), platforms=[platform])
    assert export(PARAMS, tx.init(PARAMS), PARAMS).platforms == (platform,)
