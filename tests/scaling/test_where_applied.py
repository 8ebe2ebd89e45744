"""`where_applied` keeps what lives outside the optimizer on a skipped step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.modules import Net, arrays_of
from helpers.nodes import Wrapped
from helpers.steps import eager_and_jitted

TX = ols.loss_scaled(optax.sgd(0.1), ols.dynamic_loss_scale(2.0**10))
APPLIED = TX.init(jnp.ones(2))
_, SKIPPED = TX.update(jnp.full(2, jnp.nan), APPLIED)
NEW = {
    "mean": jnp.asarray([jnp.nan, 1.0]),
    "count": jnp.asarray(4),
    "key": jax.random.key(4),
}
OLD = {
    "mean": jnp.asarray([2.0, 3.0]),
    "count": jnp.asarray(3),
    "key": jax.random.key(3),
}


@eager_and_jitted
def test_new_is_kept_if_the_step_was_applied_and_old_if_it_was_skipped(run):
    select = run(lambda opt_state: ols.where_applied(opt_state, NEW, OLD))
    assert_same_bits(select(APPLIED), NEW)
    assert_same_bits(select(SKIPPED), OLD)
    assert ols.where_applied(SKIPPED, "new", "old") == "new"  # It is no array.
    kept = ols.where_applied(SKIPPED, jnp.ones(2, jnp.float16), jnp.zeros(2))
    assert kept.dtype == jnp.float16


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        (jnp.ones(2), jnp.ones(()), r"same structure and shapes, got \(2,\) and \(\)"),
        (jnp.ones(3), jnp.ones(1), r"same structure and shapes, got \(3,\) and \(1,\)"),
        (jnp.ones((3, 1)), jnp.ones((1, 3)), r"got \(3, 1\) and \(1, 3\)"),
        ([jnp.ones(2)], [None], r"structure and shapes, got \(2,\) and None"),
        ({"a": jnp.ones(2)}, {"b": jnp.ones(2)}, "pytree|Dict key"),
    ],
)
def test_trees_of_another_structure_or_shape_are_refused(new, old, message):
    with pytest.raises(ValueError, match=message):
        ols.where_applied(SKIPPED, new, old)


def test_each_member_of_a_stacked_state_selects_its_own_rows():
    states = jax.tree.map(lambda *x: jnp.stack(x), APPLIED, SKIPPED)
    new, old = jnp.ones((2, 2)), jnp.zeros((2, 2))
    kept = ols.where_applied(states, new, old)
    np.testing.assert_array_equal(kept, [[1, 1], [0, 0]])
    for shape in ((), (1, 2), (3,)):
        with pytest.raises(ValueError, match=r"not led by a state of \(2,\) members"):
            ols.where_applied(states, jnp.ones(shape), jnp.zeros(shape))


def test_a_state_may_have_an_entry_for_each_device_and_each_member():
    verdicts = jnp.asarray([[True, False, True], [False, True, False]])
    state = APPLIED.loss_scale_state._replace(last_finite=verdicts)
    for shape in ((2, 3), (2, 3, 4)):
        kept = ols.where_applied(state, jnp.ones(shape), jnp.zeros(shape))
        rows = kept.reshape(2, 3, -1)
        assert rows.shape[0:2] == verdicts.shape
        np.testing.assert_array_equal(rows.all(-1), verdicts)
        np.testing.assert_array_equal(rows.any(-1), verdicts)


@pytest.mark.parametrize("finite", [True, False, jnp.float32(1), jnp.float32(0)])
def test_a_restored_state_selects_too(finite):
    state = ols.dynamic_loss_scale().init()._replace(last_finite=finite)
    kept = ols.where_applied(state, jnp.ones(()), jnp.zeros(()))
    assert bool(kept) == bool(finite)


@pytest.mark.parametrize("old", [2, 2.0, np.float64(2), np.asarray(2)])
def test_an_old_number_gets_the_dtype_of_the_new_one(old):
    assert_same_bits(ols.where_applied(SKIPPED, jnp.float16(1), old), jnp.float16(2))
    assert_same_bits(ols.where_applied(SKIPPED, jnp.int32(1), old), jnp.int32(2))


def test_arrays_that_a_step_leaves_alone_may_be_the_same_in_both_trees():
    array = jnp.ones(2)
    assert_same_bits(ols.where_applied(SKIPPED, [array], [array]), [array])


@pytest.mark.parametrize("wrap_new", [Wrapped, jnp.asarray])
@pytest.mark.parametrize("wrap_old", [Wrapped, jnp.asarray])
def test_of_wrapped_arrays_the_values_are_selected(wrap_new, wrap_old):
    new, old = jnp.ones(2), jnp.zeros(2)
    for state, expected in ((APPLIED, new), (SKIPPED, old)):
        kept = ols.where_applied(state, [wrap_new(new)], [wrap_old(old)])
        assert_same_bits(kept, [expected])


def test_several_states_are_refused_and_a_found_one_is_taken():
    both = {"a": APPLIED, "b": SKIPPED}
    with pytest.raises(ValueError, match=r"find_loss_scale_state\(tree, path='a'\)"):
        ols.where_applied(both, 1.0, 2.0)
    state = ols.find_loss_scale_state(both, path="b")
    assert ols.where_applied(state, 1.0, 2.0) == 2.0


def test_an_old_value_that_shares_variables_with_the_new_one_is_refused():
    model = Net(width=2)
    old = nnx.state(model, nnx.BatchStat)
    model(jnp.arange(4.0).reshape(2, 2))
    new = nnx.state(model, nnx.BatchStat)
    with pytest.raises(ValueError, match=r"`old` must be a copy.*jax.tree.map\(jnp.co"):
        ols.where_applied(APPLIED, new, old)
    with pytest.raises(ValueError, match=r"`old` must be a copy.*nnx.clone\(model\)"):
        ols.where_applied(APPLIED, model, model)
    both, one_copy = (model, Net(width=2)), (nnx.clone(model), Net(width=2))
    with pytest.raises(ValueError, match="`old` must be a copy"):
        ols.where_applied(APPLIED, both, (one_copy[0], both[1]))


def numbers(model):
    return arrays_of(nnx.clone(model))


@pytest.mark.slow
def test_a_skipped_step_leaves_a_whole_nnx_model_as_it_was():
    model = Net(width=2)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        old = nnx.clone(model)
        grad_fn = ols.scaled_grad(lambda model, x: jnp.mean(model(x)), optimizer)
        optimizer.update(model, grad_fn(model, x))
        ols.where_applied(optimizer, model, old)

    x = jnp.arange(8.0).reshape(4, 2)
    first = numbers(model)
    step(model, optimizer, x)
    before = numbers(model)
    # Two statistics, one count of dropout, kernel and bias; the key stays.
    changed = [not np.array_equal(*pair) for pair in zip(first, before, strict=True)]
    assert sum(changed) >= 5
    step(model, optimizer, x * jnp.nan)
    assert_same_bits(numbers(model), before)
    step(model, optimizer, x)
    assert not np.array_equal(model.norm.mean[...], before[0])
    assert all(np.isfinite(number).all() for number in numbers(model))


def test_models_and_variables_are_changed_in_place_wherever_they_stand_in_a_tree():
    model, target = Net(width=2), Net(width=2)
    old = {"model": nnx.clone(model), "mean": nnx.clone(target.norm.mean), "n": 1.0}
    for each in (model, target):
        each(jnp.ones((4, 2)))
    moved = jnp.copy(model.norm.mean[...])
    new = {"model": model, "mean": target.norm.mean, "n": 2.0}
    for state, mean, number in ((APPLIED, moved, 2.0), (SKIPPED, jnp.zeros(2), 1.0)):
        kept = ols.where_applied(state, new, old)
        assert kept["model"] is model
        assert kept["mean"] is target.norm.mean
        assert kept["n"] == number
        np.testing.assert_array_equal(model.norm.mean[...], mean)
        np.testing.assert_array_equal(target.norm.mean[...], mean)


def test_a_tree_that_holds_the_loss_scale_is_refused():
    # It would put back the scale and the counts of every skipped step.
    optimizer = nnx.Optimizer(Net(width=2), TX, wrt=nnx.Param)
    cases = [
        (optimizer, (1.0, optimizer), (1.0, nnx.clone(optimizer))),
        (SKIPPED, (jnp.ones(2), SKIPPED), (jnp.zeros(2), APPLIED)),
    ]
    for case in cases:
        with pytest.raises(ValueError, match="`new` must not hold the loss scale"):
            ols.where_applied(*case)


def test_another_structure_of_an_nnx_model_is_refused_with_a_cure():
    model = Net(width=2)
    old = nnx.clone(model)
    model(jnp.ones((4, 2)))
    model.seen = nnx.Intermediate(jnp.ones(2))  # As `sow` adds it.
    message = r"(?s)`new` and `old` must have the same structure.*nnx.pop\(model, nnx"
    with pytest.raises(ValueError, match=message):
        ols.where_applied(SKIPPED, model, old)
    nnx.pop(model, nnx.Intermediate)
    ols.where_applied(SKIPPED, model, old)
    np.testing.assert_array_equal(model.norm.mean[...], [0.0, 0.0])
    statistics = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
    with pytest.raises(ValueError, match=r"(?s)same structure.*old=nnx.clone\(model\)"):
        ols.where_applied(SKIPPED, model, statistics)
