"""Finding, getting and setting a loss scale in any pytree."""

import ast
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compat import enable_x64
from helpers.inner import adam

PARAMS = {"loss_scale": jnp.ones((2, 3)), "b": jnp.zeros(3)}
TX = ols.loss_scaled(adam(), ols.dynamic_loss_scale(2.0**10))


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize(
    ("rule", "dtypes"),
    [
        (ols.dynamic_loss_scale(), [jnp.int32, jnp.int32]),
        (ols.headroom_loss_scale(), [jnp.float32, jnp.float32]),
        (ols.static_loss_scale(8.0), []),
        (ols.static_loss_scale(8.0, skip_nonfinite=False), []),
        (ols.no_loss_scale(), []),
    ],
    ids=lambda rule: repr(rule).split("(")[0],
)
def test_a_state_has_strong_types_that_are_the_same_in_x64(rule, dtypes, x64):
    of_all = [jnp.float32, jnp.bool_, jnp.int32, jnp.int32, jnp.int32]
    with enable_x64(x64):
        state = rule.init()
        jitted = jax.jit(rule.adjust)(state, False, 1.0)
        for each in (state, rule.adjust(state, True, 1.0), jitted):
            leaves = jax.tree.leaves(each)
            assert [leaf.dtype for leaf in leaves] == [*of_all, *dtypes]
            assert not any(leaf.weak_type for leaf in leaves)
            assert jax.tree.structure(each) == jax.tree.structure(state)


def test_find_returns_the_very_arrays_of_a_restored_state():
    state = jax.device_get(ols.dynamic_loss_scale().init())
    for tree in (state, {"restored": state}):
        found = ols.find_loss_scale_state(tree)
        assert all(map(operator.is_, jax.tree.leaves(found), jax.tree.leaves(state)))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.identity(), tx, optax.scale(1.0)),
        lambda tx: optax.masked(tx, {"loss_scale": True, "b": False}),
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        lambda tx: optax.partition(
            {"on": tx, "off": optax.set_to_zero()}, {"loss_scale": "on", "b": "off"}
        ),
    ],
    ids=["bare", "chain", "masked", "multi_steps", "partition"],
)
def test_find_works_inside_optax_and_beside_a_parameter_called_loss_scale(wrap):
    opt_state = wrap(TX).init(PARAMS)
    assert ols.get_loss_scale(opt_state) == 2.0**10


def nnx_optimizer(tx):
    return nnx.Optimizer(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)


def test_find_unwraps_and_set_rewraps_the_arrays_of_an_nnx_optimizer():
    optimizer = nnx_optimizer(TX)
    for tree in (optimizer, optimizer.opt_state):
        state = ols.find_loss_scale_state(tree)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        assert_same_bits(state, TX.init(PARAMS).loss_scale_state)
    optimizer.opt_state = ols.set_loss_scale(optimizer.opt_state, 8.0)
    wrapped = optimizer.opt_state.loss_scale_state.loss_scale
    assert isinstance(wrapped, nnx.Variable)
    assert ols.get_loss_scale(optimizer) == 8.0


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": jnp.ones(2)}, r"in a tree of type dict\. .*`loss_scaled\("),
        (nnx_optimizer(optax.sgd(0.1)), r"got none in a tree of type Optimizer\."),
        (nnx.state(nnx_optimizer(TX)), r"`nnx.split`, `nnx.state`.*flatten"),
        (TX, r"Pass the state that its `init` returns"),
        (ols.dynamic_loss_scale(), r"Pass the state that its `init` returns"),
        (optax.MultiSteps(TX, 2), r"Pass the state that its `init` returns"),
    ],
    ids=["dict", "plain NNX", "split NNX", "optimizer", "rule", "MultiSteps"],
)
def test_find_without_a_state_says_what_to_do(tree, message):
    with pytest.raises(ValueError, match=message):
        ols.find_loss_scale_state(tree)


def two_states():
    return {"gen": TX.init(PARAMS), "critic": (ols.set_loss_scale(TX.init(PARAMS), 8),)}


@pytest.mark.parametrize(
    "path", ["critic", "critic/", "critic/0", "critic/0/loss_scale_state"]
)
def test_a_path_or_the_beginning_of_one_picks_a_state(path):
    assert ols.find_loss_scale_state(two_states(), path=path).loss_scale == 8


@pytest.mark.parametrize("path", [None, "a"])
def test_several_states_are_refused_with_their_paths(path):
    tree = {"a": two_states()}
    message = r"got 2, at `\['a'\]\['critic'\]\[0\].loss_.*path='a/critic'"
    with pytest.raises(ValueError, match=message):
        ols.find_loss_scale_state(tree, path=path)
    with pytest.raises(ValueError, match=message):
        ols.set_loss_scale(tree, 4, path=path)


def test_a_path_is_text_that_is_compared_by_whole_names():
    tree = {"gen": TX.init(PARAMS), "generator": ols.set_loss_scale(TX.init(PARAMS), 8)}
    assert ols.find_loss_scale_state(tree, path="gen").loss_scale == 2.0**10
    with pytest.raises(ValueError, match=r"at `path` 'g', got none there, but some at"):
        ols.find_loss_scale_state(tree, path="g")
    with pytest.raises(TypeError, match="`path` must be a string"):
        ols.find_loss_scale_state(tree, path=("gen", 0))


def test_a_path_picks_a_state_inside_optax_partition():
    groups = {"a": TX, "b": TX}
    tx = optax.partition(groups, {"w": "a", "v": "b"})
    opt_state = tx.init({"w": jnp.ones(2), "v": jnp.ones(2)})
    changed = ols.set_loss_scale(opt_state, 8, path="inner_states/b")
    for path, loss_scale in (("inner_states/a", 2.0**10), ("inner_states/b", 8)):
        state = ols.find_loss_scale_state(changed, path=path)
        assert ols.get_loss_scale(state) == loss_scale


def test_set_at_a_path_leaves_every_other_state_alone():
    state = TX.init(PARAMS)
    for states in (two_states(), {"gen": state, "critic": state}):
        changed = ols.set_loss_scale(states, 4, path="gen")
        assert ols.find_loss_scale_state(changed, path="gen").loss_scale == 4
        assert_same_bits(changed["critic"], states["critic"])


def test_set_changes_only_the_scale():
    opt_state = TX.init(PARAMS)
    changed = ols.set_loss_scale(opt_state, 4)
    assert ols.get_loss_scale(changed) == 4.0
    assert types(changed) == types(opt_state)
    assert_same_bits(ols.set_loss_scale(changed, 2.0**10), opt_state)
    rule = ols.dynamic_loss_scale(2.0**10)
    state = ols.set_loss_scale(rule.adjust(rule.init(), True), 8)
    assert (state.loss_scale, state.rule_state.growth_count) == (8, 1)


def test_set_keeps_the_weak_type_and_the_device_of_the_scale():
    state = ols.static_loss_scale(8.0).init()
    weak = state._replace(loss_scale=jnp.asarray(8.0))
    assert ols.set_loss_scale(weak, 4).loss_scale.weak_type
    elsewhere = jax.device_put(state, jax.devices()[-1])
    changed = ols.set_loss_scale(elsewhere, 4).loss_scale
    assert changed.sharding == elsewhere.loss_scale.sharding


def test_set_works_under_jit_and_keeps_the_old_scale_for_an_unusable_value():
    state = ols.dynamic_loss_scale(2.0**10).init()
    set_scale = jax.jit(lambda state, value: ols.set_loss_scale(state, value))
    for value in (8.0, 8, jnp.int32(8), jnp.float16(8)):
        assert set_scale(state, value).loss_scale == 8.0
    for value in (2.0**-126, 2.0**126):
        assert set_scale(state, value).loss_scale == value
    for value in (0.0, -1.0, np.nan, np.inf, 2.0**127):
        assert set_scale(state, value).loss_scale == 2.0**10


def test_set_gives_every_member_of_a_stacked_state_the_scale():
    states = jax.vmap(lambda _: ols.dynamic_loss_scale().init())(jnp.arange(3))
    assert ols.set_loss_scale(states, 8.0).loss_scale.tolist() == [8.0] * 3
    each = [8.0, 16.0, 32.0]
    assert ols.set_loss_scale(states, jnp.asarray(each)).loss_scale.tolist() == each
    values = jnp.asarray([8.0, jnp.nan, 32.0])
    changed = jax.jit(lambda *args: ols.set_loss_scale(*args))(states, values)
    assert changed.loss_scale.tolist() == [8.0, 2.0**15, 32.0]
    kept = jax.jit(lambda *args: ols.set_loss_scale(*args))(changed, jnp.nan)
    assert kept.loss_scale.tolist() == [8.0, 2.0**15, 32.0]


@pytest.mark.parametrize(
    ("error", "value", "message"),
    [
        *(
            (ValueError, value, "positive, finite, and from")
            for value in (0, -1.0, np.nan, np.inf, 2.0**127, 1e-45, jnp.float32(np.inf))
        ),
        *((TypeError, value, "a number, got") for value in (True, "8", None, 1j)),
    ],
)
def test_set_refuses_an_unusable_value(error, value, message):
    state = ols.dynamic_loss_scale().init()
    with pytest.raises(error, match=f"`value` must be {message}"):
        ols.set_loss_scale({"state": state}, value)


def test_a_fraction_can_be_set_where_a_whole_number_was_restored():
    state = ols.dynamic_loss_scale().init()._replace(loss_scale=8)
    for value in (0.5, 2.0**20):
        assert ols.get_loss_scale(ols.set_loss_scale(state, value)) == value


def test_set_refuses_a_state_whose_gradients_are_never_unscaled():
    opt_state = ols.loss_scaled(adam(), ols.no_loss_scale()).init(PARAMS)
    with pytest.raises(ValueError, match=r"`value` must not be set on a state of `no_"):
        ols.set_loss_scale(opt_state, 8.0)


def test_the_paths_in_the_error_pick_one_even_if_names_hold_slashes():
    state = TX.init(PARAMS).loss_scale_state
    for tree in (
        {"gan": state, "gan/critic": state},
        {"a/b": state, "a": {"b": state}},
        {"a": {"b": state}, "a/b": 1, "a/b/c": [state] * 2},
    ):
        with pytest.raises(ValueError, match="path=") as caught:
            ols.find_loss_scale_state(tree)
        (suggested,) = re.findall(r"path=(.*?)\)`", str(caught.value))
        listed = re.findall(r"`(\[.*?\])`", str(caught.value))
        assert listed
        for path in (ast.literal_eval(suggested), *listed):
            ols.find_loss_scale_state(tree, path=path)


def test_a_weakly_typed_scale_is_read_as_a_strong_one():
    state = ols.dynamic_loss_scale().init()._replace(loss_scale=jnp.asarray(8.0))
    assert not ols.get_loss_scale(state).weak_type


def test_the_scale_of_gradients_that_are_never_unscaled_is_one():
    state = ols.no_loss_scale().init()
    assert ols.get_loss_scale(state._replace(loss_scale=jnp.float32(8.0))) == 1.0


@pytest.mark.parametrize("count", [3, np.int64(3), np.asarray(3), jnp.asarray(3)])
def test_a_restored_count_of_steps_goes_on_as_int32(count):
    rule = ols.dynamic_loss_scale()
    state = rule.adjust(rule.init()._replace(step_count=count), True)
    assert_same_bits(state.step_count, jnp.int32(4))
    metrics = ols.loss_scale_metrics(state._replace(total_notfinite=count))
    assert metrics["skip_rate"] == 0.75
