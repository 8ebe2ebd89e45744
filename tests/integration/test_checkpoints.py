"""A run that is saved and restored, with any tool, continues with the same bits."""

import functools
import pickle
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import checkpoints
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.inner import adam, lenient

PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 16).reshape(8, 2),
    "loss_scale": jnp.asarray([0.5, -0.0], jnp.float16),
}
RULES = {
    "dynamic": ols.dynamic_loss_scale(2.0**10, growth_interval=2, hysteresis=2),
    "static": ols.static_loss_scale(8.0),
    "headroom": ols.headroom_loss_scale(history=4, recent=2),
    "none": ols.no_loss_scale(),
}
COMPACT = "dynamic, compact masters"
RULES[COMPACT] = RULES["dynamic"]
GRADS = [1.0, 3.0, np.nan, 0.01, 2.0, np.inf, np.inf, 0.5, -1.0]


def optimizer(rule):
    inner = ols.master_weights(adam(), compact=True) if rule == COMPACT else adam()
    return ols.loss_scaled(inner, RULES[rule])


@functools.cache
def jitted_step(rule):
    @jax.jit
    def step(params, opt_state, size):
        grads = jax.tree.map(lambda p: p * size.astype(p.dtype), params)
        grads = ols.scale(grads, opt_state)
        updates, opt_state = optimizer(rule).update(grads, opt_state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), opt_state

    return step


def train(rule, params, opt_state, sizes):
    """Parameters and optimizer state before each step, and after the last."""
    held = [(params, opt_state)]
    for size in np.nan_to_num(sizes, posinf=1.0) if rule == "none" else sizes:
        held.append(jitted_step(rule)(*held[-1], np.float32(size)))
    return held


def fresh(rule):
    # A bare Adam widens its moments of float16 parameters at the second step.
    params = optax.tree.cast(PARAMS, jnp.float32) if rule == "none" else PARAMS
    return params, optimizer(rule).init(params)


@functools.cache
def uninterrupted(rule):
    return train(rule, *fresh(rule), GRADS)


def save_pickle(folder, tree):
    (folder / "pickle").write_bytes(pickle.dumps(tree))


def restore_pickle(folder, target):
    return jax.tree.map(jnp.asarray, pickle.loads((folder / "pickle").read_bytes()))


def save_flax(folder, tree):
    (folder / "flax").write_bytes(flax.serialization.to_bytes(tree))


def restore_flax(folder, target):
    return flax.serialization.from_bytes(target, (folder / "flax").read_bytes())


def save_numpy(folder, tree):
    np.savez(folder / "saved.npz", *jax.tree.leaves(tree))


def restore_numpy(folder, target):
    with np.load(folder / "saved.npz") as saved:
        leaves = [saved[name] for name in saved.files]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def save_orbax(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", tree)


def restore_orbax(folder, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "orbax", target)


def save_equinox(folder, tree):
    eqx.tree_serialise_leaves(folder / "saved.eqx", tree)


def restore_equinox(folder, target):
    return eqx.tree_deserialise_leaves(folder / "saved.eqx", like=target)


STARTS = [0, 6, len(GRADS)]  # Before a first, a bad and no step.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "restore"),
    [
        (save_pickle, restore_pickle),
        (save_flax, restore_flax),
        (save_numpy, restore_numpy),
        (save_equinox, restore_equinox),
        (save_orbax, restore_orbax),
    ],
)
def test_a_run_that_is_restored_continues_with_the_same_bits(save, restore, tmp_path):
    saved = {
        rule: {str(start): uninterrupted(rule)[start] for start in STARTS}
        for rule in RULES
    }
    save(tmp_path, saved)
    # Orbax, too, needs no more than shapes.
    restored = restore(tmp_path, jax.eval_shape(lambda: saved))
    assert_same_bits(restored, saved)
    for rule, runs in restored.items():
        ends = {i: train(rule, *runs[i], GRADS[int(i) :])[-1] for i in runs}
        expected = dict.fromkeys(runs, uninterrupted(rule)[-1])
        assert_same_bits({rule: ends}, {rule: expected})


def test_plain_dicts_restored_without_a_target_are_refused_with_a_hint(tmp_path):
    save_orbax(tmp_path, uninterrupted("dynamic")[4][1])
    plain = restore_orbax(tmp_path, None)
    with pytest.raises(ValueError, match="restore into a target"):
        ols.get_loss_scale(plain)
    with pytest.raises(ValueError, match="must be a LossScaledState"):
        optimizer("dynamic").update(PARAMS, plain, PARAMS)


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("shape", "axes"), [((4, 2), ("data", "model")), ((1,), ("one",))]
)
def test_orbax_restores_onto_another_mesh(shape, axes, tmp_path):
    def placed(tree, mesh, spec):
        def place(leaf):
            where = NamedSharding(mesh, spec if jnp.shape(leaf) == (8, 2) else P())
            return jax.device_put(leaf, where)

        return jax.tree.map(place, tree)

    held = uninterrupted("dynamic")[4]
    saved = placed(held, jax.make_mesh((8,), ("data",)), P("data"))
    target = placed(fresh("dynamic"), jax.make_mesh(shape, axes), P(*axes))
    save_orbax(tmp_path, saved)
    restored = restore_orbax(tmp_path, target)
    assert_same_bits(restored, held)
    shardings = [jax.tree.map(lambda x: x.sharding, t) for t in (restored, target)]
    assert shardings[0] == shardings[1]
    after = train("dynamic", *restored, GRADS[4:])[-1]
    assert_same_bits(after, uninterrupted("dynamic")[-1])


def test_a_saved_state_of_half_precision_parameters_can_be_adopted_once_widened():
    bare, tx = adam(), optimizer("dynamic")
    params = {"w": PARAMS["w"].astype(jnp.float16)}
    saved = bare.init(params)
    assert saved[0].nu["w"].dtype == jnp.float16
    new = tx.init(params)
    saved = jax.tree.map(lambda m, n: m.astype(n.dtype), saved, new.inner_state)
    assert types(ols.adopt_inner_state(saved, RULES["dynamic"])) == types(new)


def test_a_run_can_continue_under_a_rule_of_another_kind():
    params, opt_state = uninterrupted("dynamic")[4]
    adopted = ols.adopt_inner_state(opt_state.inner_state, RULES["headroom"])
    assert types(adopted) == types(optimizer("headroom").init(params))
    _, after = train("headroom", params, adopted, [1.0])[-1]
    assert after.inner_state[0].count == opt_state.inner_state[0].count + 1
    assert after.loss_scale_state.step_count == 1


def test_the_state_of_an_optimizer_that_has_an_opt_state_itself_can_be_adopted():
    inner = optax.contrib.sam(optax.sgd(0.5), optax.sgd(0.1))
    state = inner.init({"w": jnp.ones(2)})
    assert ols.adopt_inner_state(state).inner_state is state


NET = nn.Dense(2)
X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
# Its products are exact, however XLA combines them with sums.
BARE = lenient(optax.sgd(2.0**-3, momentum=0.5))
SCALED = ols.loss_scaled(BARE, RULES["dynamic"])


def train_state(steps):
    """A run in float32, without loss scaling."""
    params = jax.jit(NET.init)(jax.random.key(0), X)
    state = TrainState.create(apply_fn=NET.apply, params=params, tx=BARE)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for _ in range(steps):
        state = step(state, jax.tree.map(jnp.sin, state.params))
    return state


@pytest.mark.slow
def test_a_saved_train_state_goes_on_with_its_moments_under_a_loss_scale(tmp_path):
    checkpoints.save_checkpoint(tmp_path, train_state(3), step=3)
    restored = checkpoints.restore_checkpoint(tmp_path, target=train_state(0))
    adopted = ols.adopt_inner_state(restored.opt_state, RULES["dynamic"])
    state = restored.replace(tx=SCALED, opt_state=adopted)
    grads = jax.tree.map(jnp.sin, state.params)
    state = state.apply_gradients(grads=ols.scale(grads, state))
    expected = train_state(4)
    assert_same_bits(state.params, expected.params)
    assert_same_bits(state.opt_state.inner_state, expected.opt_state)


@pytest.mark.slow
def test_a_saved_nnx_optimizer_goes_on_with_its_moments_under_a_loss_scale():
    def grads_of(model):
        return jax.tree.map(jnp.sin, nnx.state(model, nnx.Param))

    models = [nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2)]
    bare = [nnx.Optimizer(model, BARE, wrt=nnx.Param) for model in models]
    for model, optimizer in zip(models, bare, strict=True):
        for _ in range(3):
            optimizer.update(model, grads_of(model))
    bare[0].update(models[0], grads_of(models[0]))

    optimizer = nnx.Optimizer(models[1], SCALED, wrt=nnx.Param)
    inner_state = bare[1].opt_state
    optimizer.opt_state = optimizer.opt_state._replace(inner_state=inner_state)
    optimizer.update(models[1], ols.scale(grads_of(models[1]), optimizer))
    expected, actual = (jax.tree.leaves(nnx.state(model)) for model in models)
    assert_same_bits(actual, expected)


def test_what_holds_an_optimizer_state_is_refused_with_the_way_to_take_it_over():
    class Run(NamedTuple):
        opt_state: optax.OptState

    for state in (train_state(1), Run(train_state(1).opt_state)):
        message = rf"got a {type(state).__name__}\. .*its `opt_state`"
        with pytest.raises(TypeError, match=message):
            ols.adopt_inner_state(state)
    optimizer = nnx.Optimizer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), BARE, wrt=nnx.Param)
    for state in (optimizer.opt_state, (optimizer.opt_state, jnp.ones(1))):
        message = r"got NNX variables.*_replace\(inner_state="
        with pytest.raises(TypeError, match=message):
            ols.adopt_inner_state(state)
