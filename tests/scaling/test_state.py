"""Find the state of a loss scale in any pytree; set its scale; adopt a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.inner import adam

PARAMS = {"w": jnp.ones(2), "loss_scale": jnp.full(2, 0.5)}
TX = ols.loss_scaled(adam(), ols.dynamic_loss_scale(2.0**10))
STATE = TX.init(PARAMS)
OTHER = ols.set_loss_scale(STATE, 8.0)


def in_nnx():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return nnx.Optimizer(model, TX, wrt=nnx.Param)


TREES = {
    "the state itself": lambda: STATE.loss_scale_state,
    "an optimizer state": lambda: STATE,
    "a chain": lambda: optax.chain(TX, optax.scale(0.5)).init(PARAMS),
    "a mask": lambda: optax.masked(TX, {"w": True, "loss_scale": False}).init(PARAMS),
    "a TrainState": lambda: TrainState.create(apply_fn=None, params=PARAMS, tx=TX),
    "an nnx.Optimizer": in_nnx,
    "its opt_state": lambda: in_nnx().opt_state,
    "a dict": lambda: {"params": PARAMS, "opt": [STATE, None, "text"]},
}


@pytest.mark.parametrize("name", TREES)
def test_the_state_is_found_by_its_type_in_any_tree(name):
    tree = TREES[name]()
    found = ols.find_loss_scale_state(tree)
    assert isinstance(found, ols.LossScaleState)
    assert_same_bits(found, STATE.loss_scale_state)
    assert ols.get_loss_scale(tree) == 2.0**10


@pytest.mark.parametrize("name", [name for name in TREES if "nnx.Opt" not in name])
def test_set_changes_nothing_but_the_scale(name):
    tree = TREES[name]()
    changed = ols.set_loss_scale(tree, 8)
    assert ols.get_loss_scale(changed) == 8.0
    assert ols.get_loss_scale(tree) == 2.0**10
    back = ols.set_loss_scale(changed, 2.0**10)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for leaf, other in zip(*map(jax.tree.leaves, (back, tree)), strict=True):
        assert np.all(leaf == other)
    assert types(ols.find_loss_scale_state(changed)) == types(STATE.loss_scale_state)


def test_the_next_gradients_and_the_next_update_have_the_scale_that_was_set():
    state = ols.set_loss_scale(STATE, 4.0)
    grads = ols.scaled_grad(lambda p: jnp.sum(p["w"]), state)(PARAMS)
    assert grads["w"].tolist() == [4.0, 4.0]
    bad = jax.tree.map(lambda g: g * jnp.nan, grads)
    assert ols.get_loss_scale(TX.update(bad, state, PARAMS)[1]) == 2.0


def test_one_of_several_states_is_picked_by_its_path():
    several = {"generator": STATE, "critic": {"tx": OTHER}}
    for path in ("critic", "critic/tx", "critic/tx/loss_scale_state"):
        assert ols.get_loss_scale(ols.find_loss_scale_state(several, path=path)) == 8.0
    changed = ols.set_loss_scale(several, 2.0, path="critic")
    assert_same_bits(changed["generator"], STATE)
    assert ols.get_loss_scale(changed["critic"]) == 2.0


@pytest.mark.parametrize(
    "use",
    [
        ols.find_loss_scale_state,
        ols.get_loss_scale,
        lambda tree: ols.set_loss_scale(tree, 8.0),
        lambda tree: ols.scale(jnp.float32(1.0), tree),
        lambda tree: ols.scaled_grad(jnp.sum, tree),
        lambda tree: ols.where_applied(tree, 1, 2),
        ols.loss_scale_metrics,
    ],
)
def test_several_states_are_refused_with_their_paths(use):
    message = r"got 2, at \['a/loss.*', 'b/loss.*Pick one by its path.*path='a/loss_"
    with pytest.raises(ValueError, match=message):
        use({"a": STATE, "b": OTHER})


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        (optax.adam(0.1).init(PARAMS), r"wrapped: `loss_scaled\(optim"),
        (TX, "Pass the state that its `init` returns"),
        (None, "restore into a target"),
    ],
)
def test_a_tree_without_a_state_is_refused_with_a_hint(tree, hint):
    with pytest.raises(ValueError, match=f"got none in a tree of type.*{hint}"):
        ols.find_loss_scale_state(tree)


def test_a_path_that_leads_nowhere_is_refused_with_those_that_lead_to_a_state():
    with pytest.raises(ValueError, match=r"at `path` 'c', got none there, but some at"):
        ols.find_loss_scale_state({"a": STATE, "b": OTHER}, path="c")
    with pytest.raises(TypeError, match="`path` must be a string"):
        ols.find_loss_scale_state(STATE, path=0)


def test_set_works_under_jit_and_keeps_the_old_scale_for_an_unusable_value():
    set_scale = jax.jit(ols.set_loss_scale)
    assert ols.get_loss_scale(set_scale(STATE, 16.0)) == 16.0
    for value in (0.0, -1.0, np.nan, np.inf):
        assert ols.get_loss_scale(set_scale(STATE, value)) == 2.0**10


@pytest.mark.parametrize(
    ("value", "error"),
    [(0.0, ValueError), (np.nan, ValueError), (2.0**127, ValueError), ("8", TypeError)],
)
def test_set_refuses_an_unusable_value(value, error):
    with pytest.raises(error, match="`value` must be"):
        ols.set_loss_scale(STATE, value)


def test_the_scale_of_gradients_that_are_never_unscaled_is_one():
    state = ols.loss_scaled(adam(), ols.no_loss_scale()).init(PARAMS)
    assert ols.get_loss_scale(state) == 1.0
    with pytest.raises(ValueError, match=r"use `static_loss_scale\(1.0\)`"):
        ols.set_loss_scale(state, 8.0)


# --- A run that began without loss scaling -------------------------------------------


def test_an_adopted_state_goes_on_with_the_moments_of_the_bare_run():
    bare = adam()
    grads = jax.tree.map(lambda p: 0.25 * p, PARAMS)
    _, saved = bare.update(grads, bare.init(PARAMS), PARAMS)
    state = ols.adopt_inner_state(saved, ols.dynamic_loss_scale(2.0**10))
    assert_same_bits(state.loss_scale_state, STATE.loss_scale_state)
    assert_same_bits(state.inner_state, saved)
    expected = bare.update(grads, saved, PARAMS)
    updates, after = TX.update(ols.scale(grads, state), state, PARAMS)
    assert_same_bits((updates, after.inner_state), expected)
    assert ols.get_loss_scale(ols.adopt_inner_state(saved)) == 2.0**15
    # So a run can go on under a rule of another kind.
    rule = ols.headroom_loss_scale(history=4)
    adopted = ols.adopt_inner_state(after.inner_state, rule)
    _, goes_on = ols.loss_scaled(bare, rule).update(grads, adopted, PARAMS)
    assert goes_on.inner_state[0].count == 3


def test_what_is_no_state_of_an_optimizer_is_not_adopted():
    with pytest.raises(ValueError, match="must not be loss-scaled itself"):
        ols.adopt_inner_state(STATE)
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=adam())
    with pytest.raises(TypeError, match="Did you mean its `opt_state`"):
        ols.adopt_inner_state(train_state)
    optimizer = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), adam(), wrt=nnx.Param)
    with pytest.raises(TypeError, match="got NNX variables"):
        ols.adopt_inner_state(optimizer.opt_state)
