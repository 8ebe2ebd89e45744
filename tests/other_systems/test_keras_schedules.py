"""Schedules under Keras's `gradient_accumulation_steps`.

Keras's pages: "Learning rate schedules will look at 'real' iterations value (optimizer
steps)", so that with three steps the first updates read them at 2, 5 and 8.
"""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.usefixtures("standard_promotion")


def step_itself(step):
    return jnp.asarray(step, jnp.float32)


def make(inner, window=3):
    tx = ols.loss_scale_optimizer(inner, 1.0, gradient_accumulation_steps=window)
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


def all_updates(tx, steps, bad=(), grad=1.0, param=0.0):
    """The update of each step, and the last state."""
    params = jnp.full(1, param)
    opt_state = tx.init(params)
    found = []
    for step in range(steps):
        grads = ols.scale(jnp.full(1, jnp.nan if step in bad else grad), opt_state)
        updates, opt_state = tx.update(grads, opt_state, params)
        found.append(float(updates[0]))
    return found, opt_state


def rates(tx, steps, bad=()):
    """The learning rate of each update, which is minus the update itself."""
    updates, _ = all_updates(tx, steps, bad)
    return [-update for update in updates if update != 0]


SCHEDULED = {
    "sgd": optax.sgd(step_itself),
    "momentum": optax.sgd(step_itself, momentum=0.0),
    "scale_by_schedule": optax.scale_by_schedule(lambda step: -step_itself(step)),
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd)(step_itself),
    "chain": optax.chain(optax.identity(), optax.sgd(step_itself)),
    "masked": optax.masked(optax.sgd(step_itself), True),
    "partition": optax.partition({"all": optax.sgd(step_itself)}, "all"),
    "flatten": optax.flatten(optax.sgd(step_itself)),
    "named_chain": optax.named_chain(("sgd", optax.sgd(step_itself))),
    "master_weights": ols.master_weights(optax.sgd(step_itself)),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_with_three_steps_the_updates_read_a_schedule_at_2_5_and_8(name):
    assert rates(make(SCHEDULED[name]), steps=9) == [2, 5, 8]


def test_a_schedule_of_weight_decay_is_read_at_2_5_and_8():
    tx = make(optax.add_decayed_weights(step_itself))
    updates, _ = all_updates(tx, 9, grad=0.0, param=1.0)
    assert updates == [0, 0, 2, 0, 0, 5, 0, 0, 8]


SGD = make(optax.sgd(step_itself))


@pytest.mark.parametrize("bad", [(0,), (2,), (1, 4), (0, 1, 2, 3)])
def test_a_skipped_step_counts_no_iteration(bad):
    assert rates(SGD, steps=9 + len(bad), bad=bad) == [2, 5, 8]


@pytest.mark.parametrize("window", [None, 1])
def test_without_accumulation_schedules_count_updates(window):
    # The update at step 0 is zero.
    assert rates(make(optax.sgd(step_itself), window), steps=4) == [1, 2, 3]


@pytest.mark.slow
def test_schedules_are_read_alike_without_jit():
    window = {"gradient_accumulation_steps": 3}
    tx = ols.loss_scale_optimizer(optax.sgd(step_itself), 1.0, **window)
    assert rates(tx, steps=3) == [2]


def test_a_multi_steps_inside_moves_its_schedule_once_in_its_own_updates():
    # Two times three steps for an update, the third of each three being read.
    tx = make(optax.MultiSteps(optax.sgd(step_itself), 2))
    assert rates(tx, steps=18) == [2, 5, 8]


def test_the_formula_of_the_docstring_serves_an_optimizer_with_one_count():
    def with_one_count(schedule):
        def update(updates, count, params=None):
            return jax.tree.map(lambda g: -schedule(count) * g, updates), count + 1

        return optax.GradientTransformation(lambda params: jnp.asarray(0), update)

    k = 3
    assert rates(make(with_one_count(step_itself), window=k), steps=9) == [1, 2]
    inner = with_one_count(lambda count: step_itself(k * count + k - 1))
    assert rates(make(inner, window=k), steps=9) == [2, 5, 8]


def test_counts_in_the_state_are_of_updates_as_in_optax():
    # So a state that was saved by `optax.MultiSteps` fits.
    _, opt_state = all_updates(make(optax.adam(step_itself)), 6)
    counts = optax.tree.get_all_with_path(opt_state, "count")
    assert [int(count) for _, count in counts] == [2, 2]


@pytest.mark.slow
def test_a_count_at_its_largest_stays_there():
    # Times three it would wrap around to a negative step.
    tx = make(optax.sgd(lambda step: jnp.where(step < 0, -1.0, 1.0)))
    params = jnp.zeros(1)
    opt_state = tx.init(params)
    largest = jnp.asarray(np.iinfo(np.int32).max)
    opt_state = optax.tree.set(opt_state, count=largest)
    for _ in range(3):
        updates, opt_state = tx.update(jnp.ones(1), opt_state, params)
    assert updates == -1.0


def test_a_schedule_is_read_at_2_5_and_8_inside_an_nnx_optimizer():
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make(optax.sgd(step_itself)), wrt=nnx.Param)
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    kernels = [model.kernel[...]]
    for _ in range(9):
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        update(model, optimizer, ols.scale(grads, optimizer))
        kernels.append(model.kernel[...])
    moved = -np.diff(np.ravel(kernels))
    np.testing.assert_allclose(moved, [0, 0, 2, 0, 0, 5, 0, 0, 8], atol=1e-5)
