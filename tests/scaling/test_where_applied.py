"""`where_applied`: on a skipped step, what lives outside the optimizer is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.steps import eager_and_jitted

TX = ols.loss_scaled(optax.sgd(0.1), ols.dynamic_loss_scale(2.0**10))
FIRST = TX.init(jnp.ones(2))
_, APPLIED = TX.update(jnp.ones(2), FIRST)
_, SKIPPED = TX.update(jnp.full(2, jnp.nan), FIRST)
_, REJECTED = TX.update(jnp.ones(2), FIRST, accept=False)
NEW = {"mean": jnp.asarray([jnp.nan, 1.0]), "count": jnp.asarray(4), "n": None}
OLD = {"mean": jnp.asarray([2.0, -0.0]), "count": jnp.asarray(3), "n": None}


@eager_and_jitted
def test_new_is_kept_if_the_step_was_applied_and_old_if_it_was_skipped(run):
    select = run(lambda opt_state: ols.where_applied(opt_state, NEW, OLD))
    assert_same_bits(select(APPLIED), NEW)
    assert_same_bits(select(SKIPPED), OLD)
    assert_same_bits(select(REJECTED), OLD)


def test_keys_are_selected_and_what_is_no_array_is_new():
    new, old = jax.random.split(jax.random.key(0))
    assert_same_bits(ols.where_applied(SKIPPED, new, old), old)
    assert ols.where_applied(SKIPPED, "new", "old") == "new"


@pytest.mark.parametrize("old", [2, 2.0, np.float64(2), jnp.ones(()) * 2])
def test_an_old_value_is_cast_to_the_dtype_of_the_new_one(old):
    assert_same_bits(ols.where_applied(SKIPPED, jnp.float16(1), old), jnp.float16(2))
    assert_same_bits(ols.where_applied(SKIPPED, jnp.int32(1), old), jnp.int32(2))


def test_each_member_of_an_ensemble_selects_its_own_values():
    states = jax.tree.map(lambda *each: jnp.stack(each), APPLIED, SKIPPED)
    select = jax.vmap(lambda state, new: ols.where_applied(state, new, 2 * new))
    assert select(states, jnp.ones((2, 3))).tolist() == [[1.0] * 3, [2.0] * 3]


def test_the_state_may_be_inside_any_pytree():
    tree = {"step": 3, "opt": (SKIPPED, optax.EmptyState())}
    assert_same_bits(ols.where_applied(tree, NEW, OLD), OLD)


@pytest.mark.parametrize("jit", [lambda fun: fun, nnx.jit], ids=["eager", "nnx.jit"])
def test_a_module_of_nnx_is_set_back_in_place(jit):
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    mean = model.mean

    @jit
    def step(model, state):
        old = nnx.clone(model)
        model.mean[...] += 1.0
        return ols.where_applied(state, [model], [old])[0] is model

    for state, expected in ((APPLIED, 1.0), (SKIPPED, 1.0), (APPLIED, 2.0)):
        step(model, state)
        assert model.mean is mean
        assert mean[...].tolist() == [expected] * 2
    old = nnx.clone(model)
    assert ols.where_applied(SKIPPED, model, old) is model


def test_variables_that_new_and_old_share_are_refused():
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    old = nnx.state(model, nnx.BatchStat)  # It holds the variables of the model.
    for shared in (old, model):
        new = nnx.state(model, nnx.BatchStat) if shared is old else model
        with pytest.raises(ValueError, match=r"must not share .*`nnx.clone`"):
            ols.where_applied(SKIPPED, new, shared)


def test_what_would_undo_the_skip_is_refused():
    with pytest.raises(ValueError, match="`new` must not hold the loss scale"):
        ols.where_applied(SKIPPED, APPLIED, SKIPPED)
    with pytest.raises(ValueError, match="must hold a LossScaleState, got none"):
        ols.where_applied(optax.EmptyState(), NEW, OLD)
