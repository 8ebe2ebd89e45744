"""`docs/guides/checkpoints.md`: a restored run continues with the same bits."""

import functools
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.compare import assert_same_bits, types
from helpers.inner import adam
from helpers.steps import apply

# One parameter is in float16, to see that it comes back so.
pytestmark = pytest.mark.filterwarnings("ignore:.*master_weights")
PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 16).reshape(8, 2),
    "loss_scale": jnp.asarray([0.5, -0.0], jnp.float16),
}
RULES = {
    "dynamic": ols.dynamic_loss_scale(2.0**10, growth_interval=2, hysteresis=2),
    "static": ols.static_loss_scale(8.0),
    "headroom": ols.headroom_loss_scale(history=4, recent=2),
}
TX = {name: ols.loss_scaled(adam(), rule) for name, rule in RULES.items()}
TX["masters"] = ols.loss_scaled(ols.master_weights(adam()), RULES["dynamic"])
SIZES = [1.0, np.nan, 0.01, 2.0, np.inf, 0.5]


@functools.cache
def step_of(name):
    @jax.jit
    def step(params, state, size):
        grads = jax.tree.map(lambda p: p * size.astype(p.dtype), params)
        updates, state = TX[name].update(ols.scale(grads, state), state, params)
        return apply(params, updates), state

    return step


def train(name, params, state, sizes):
    for size in sizes:
        params, state = step_of(name)(params, state, np.float32(size))
    return params, state


def by_pickle(folder, tree, target):
    return jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(tree)))


def by_flax(folder, tree, target):
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(tree))


def by_numpy(folder, tree, target):
    np.savez(folder / "saved.npz", *jax.tree.leaves(tree))
    with np.load(folder / "saved.npz") as saved:
        leaves = [saved[name] for name in saved.files]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def by_orbax(folder, tree, target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "orbax", target)


def by_equinox(folder, tree, target):
    eqx.tree_serialise_leaves(folder / "saved.eqx", tree)
    return eqx.tree_deserialise_leaves(folder / "saved.eqx", like=target)


@pytest.mark.parametrize(
    "tool",
    slow_except(
        {by_flax, by_orbax, by_equinox},
        [by_pickle, by_flax, by_numpy, by_orbax, by_equinox],
    ),
)
def test_a_run_that_is_restored_continues_with_the_same_bits(tool, tmp_path):
    first = {name: (PARAMS, TX[name].init(PARAMS)) for name in TX}
    saved = {name: train(name, *first[name], SIZES[:4]) for name in TX}
    restored = tool(tmp_path, saved, jax.eval_shape(lambda: first))
    assert_same_bits(restored, saved)
    assert types(restored) == types(first)
    for name in TX:
        expected = train(name, *saved[name], SIZES[4:])
        assert_same_bits(train(name, *restored[name], SIZES[4:]), expected)


def test_a_restored_scale_is_used_and_kept_under_a_rule_with_another_one():
    saved = ols.loss_scaled(None, ols.static_loss_scale(2.0**10)).init(PARAMS)
    state = by_pickle(None, saved, None)
    tx = ols.loss_scaled(None, ols.static_loss_scale(8.0))
    grads = ols.scaled_grad(lambda p: jnp.sum(p["w"]), state)(PARAMS)
    updates, state = tx.update(grads, state)
    assert (updates["w"] == 1.0).all()
    assert ols.get_loss_scale(state) == 2.0**10


def test_a_state_restored_without_a_target_is_refused_with_a_hint(tmp_path):
    plain = by_orbax(tmp_path, TX["dynamic"].init(PARAMS), None)
    with pytest.raises(ValueError, match="restore into a target"):
        ols.get_loss_scale(plain)
    with pytest.raises(ValueError, match="restore into a target"):
        TX["dynamic"].update(PARAMS, plain, PARAMS)


@pytest.mark.slow
@pytest.mark.several_devices
def test_orbax_restores_onto_another_mesh(tmp_path):
    def placed(tree, mesh, spec):
        def place(leaf):
            where = spec if jnp.shape(leaf) == (8, 2) else P()
            return jax.device_put(leaf, NamedSharding(mesh, where))

        return jax.tree.map(place, tree)

    first = PARAMS, TX["dynamic"].init(PARAMS)
    held = train("dynamic", *first, SIZES[:4])
    saved = placed(held, jax.make_mesh((8,), ("data",)), P("data"))
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    target = placed(first, mesh, P("data", "model"))
    restored = by_orbax(tmp_path, saved, target)
    assert_same_bits(restored, held)
    shardings = [jax.tree.map(lambda x: x.sharding, t) for t in (restored, target)]
    assert shardings[0] == shardings[1]
    after = train("dynamic", *restored, SIZES[4:])
    assert_same_bits(after, train("dynamic", *held, SIZES[4:]))


def test_a_state_of_half_precision_parameters_can_be_adopted_once_it_is_widened():
    params = {"w": PARAMS["w"].astype(jnp.float16)}
    saved, new = adam().init(params), TX["dynamic"].init(params)
    assert saved[0].nu["w"].dtype == jnp.float16
    saved = jax.tree.map(lambda m, n: m.astype(n.dtype), saved, new.inner_state)
    assert types(ols.adopt_inner_state(saved, RULES["dynamic"])) == types(new)
