"""What `loss_scaled` promises of a step; `test_step.py` combines all of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, assert_within_ulp, types
from helpers.inner import adam, lenient
from helpers.steps import apply, assert_skipped

SCALE = 2.0**10
RULE = ols.dynamic_loss_scale(SCALE, growth_interval=2)
PARAMS = {"w": jnp.asarray([[1.0, -2.0], [0.5, 4.0]]), "b": jnp.asarray([0.5, -0.0])}
GRADS = jax.tree.map(lambda p: 0.25 * p + 0.5, PARAMS)
RULES = {
    "dynamic": RULE,
    "headroom": ols.headroom_loss_scale(SCALE),
    "static": ols.static_loss_scale(SCALE),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def poisoned(state, value=jnp.nan, name="b"):
    grads = ols.scale(GRADS, state)
    return {**grads, name: grads[name] * value}


# --- What a skipped step keeps -------------------------------------------------------


@each_rule
def test_a_bad_step_changes_no_bit_and_a_good_one_is_the_bare_one(rule):
    tx = ols.loss_scaled(adam(), rule)
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for value, name in ((jnp.nan, "b"), (jnp.inf, "w"), (-jnp.inf, "b")):
        bad = poisoned(state, value, name)
        assert_skipped(PARAMS, state, *update(bad, state, PARAMS))
    updates, after = update(ols.scale(GRADS, state), state, PARAMS)
    expected = jax.jit(adam().update)(GRADS, adam().init(PARAMS), PARAMS)
    assert_within_ulp((updates, after.inner_state), expected)
    assert after.loss_scale_state.last_finite


def test_accumulation_inside_never_notices_a_bad_step():
    inner = lenient(optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation())
    tx = ols.loss_scaled(inner, RULE)
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    bare, expected_state = jax.jit(inner.update), inner.init(PARAMS)
    for i in range(3):
        bad = poisoned(state)
        assert_skipped(PARAMS, state, *update(bad, state, PARAMS))
        grads = jax.tree.map(lambda g, i=i: g * (i + 1), GRADS)
        updates, state = update(ols.scale(grads, state), state, PARAMS)
        expected, expected_state = bare(grads, expected_state, PARAMS)
    assert state.inner_state.gradient_step == 1
    assert_within_ulp(updates, expected, 8)


def recorder(seen):
    """An optimizer that records its arguments, and counts its updates."""

    def update(updates, state, params=None, **extra_args):
        seen.append((updates, params, extra_args))
        return updates, state + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(2), update)


@pytest.mark.parametrize("verdicts", [{}, {"accept": False}, {"grads_finite": False}])
def test_on_a_bad_step_the_inner_optimizer_sees_zeros_and_no_nan(verdicts):
    seen = []
    tx = ols.loss_scaled(recorder(seen), RULE)
    state = tx.init(PARAMS)
    tx.update(poisoned(state), state, PARAMS, **verdicts)
    ((grads, _, _),) = seen
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads))


def test_debug_nans_accepts_a_bad_step():
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(PARAMS)
    grads = poisoned(state)
    with jax.debug_nans(True):
        _, after = jax.jit(tx.update)(grads, state, PARAMS)
    assert ols.get_loss_scale(after) == SCALE / 2


# --- The scale -----------------------------------------------------------------------


def test_a_step_on_which_the_scale_grows_unscales_by_the_old_scale():
    # mpx unscales by the next one.
    tx = ols.loss_scaled(optax.sgd(1.0), RULE)
    state, scales = tx.init(PARAMS), []
    for _ in range(3):
        updates, state = tx.update(ols.scale(GRADS, state), state, PARAMS)
        assert_same_bits(updates, jax.tree.map(lambda g: -g, GRADS))
        scales.append(float(ols.get_loss_scale(state)))
    assert scales == [SCALE, 2 * SCALE, 2 * SCALE]


def test_gradients_that_overflow_only_when_they_are_unscaled_are_caught():
    # torch checks scaled gradients.
    tx = ols.loss_scaled(optax.sgd(1.0), ols.dynamic_loss_scale(2.0**-10))
    state = tx.init(PARAMS)
    huge = jax.tree.map(lambda p: jnp.full_like(p, 1e38), PARAMS)
    assert_skipped(PARAMS, state, *tx.update(huge, state, PARAMS))


def test_every_step_of_a_nan_scale_is_skipped_and_a_stall_is_said():
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(PARAMS)
    damaged = state.loss_scale_state._replace(loss_scale=jnp.float32(jnp.nan))
    state = state._replace(loss_scale_state=damaged)
    for grads in (GRADS, jax.tree.map(jnp.zeros_like, GRADS)):
        before = state
        updates, state = tx.update(grads, before, PARAMS)
        assert_skipped(PARAMS, before, updates, state)
    with pytest.raises(ols.LossScaleStalledError, match=r"is NaN.*set_loss_scale"):
        ols.raise_if_stalled(state)


def test_a_static_scale_without_a_check_lets_nan_through():
    rule = ols.static_loss_scale(SCALE, skip_nonfinite=False)
    tx = ols.loss_scaled(optax.sgd(1.0), rule)
    state = tx.init(PARAMS)
    updates, after = tx.update(poisoned(state), state, PARAMS)
    assert jnp.isnan(updates["b"]).all()
    assert_same_bits(updates["w"], -GRADS["w"])
    assert [*map(int, after.loss_scale_state[1:5])] == [1, 0, 0, 1]


def test_a_rule_of_ones_own_is_told_the_verdict_and_the_largest_gradient():
    static, told = ols.static_loss_scale(8.0), []

    def adjust(state, grads_finite, grads_max=None):
        told.append((bool(grads_finite), float(grads_max)))
        return state._replace(loss_scale=state.loss_scale * 2)

    rule = ols.LossScale(static.init, adjust, needs_grads_max=True)
    tx = ols.loss_scaled(optax.sgd(1.0), rule)
    _, state = tx.update(jnp.asarray([16.0, -24.0]), tx.init(jnp.ones(2)))
    _, state = tx.update(jnp.asarray([jnp.nan, 1.0]), state)
    assert told == [(True, 3.0), (False, np.inf)]
    assert [*map(float, state.loss_scale_state[:5])] == [32.0, 0.0, 1.0, 1.0, 2.0]


# --- Its arguments -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("poison", "verdicts", "scale", "finite"),
    [
        (1.0, {"grads_finite": np.bool_(False)}, 2.0**9, False),
        (1.0, {"grads_finite": True, "accept": True}, 2.0**10, True),
        (1.0, {"accept": jnp.bool_(False)}, 2.0**10, False),
        (jnp.inf, {"accept": False}, 2.0**9, False),
        (jnp.inf, {"grads_finite": True, "accept": True}, 2.0**9, False),
        (1.0, {"grads_finite": False, "accept": False}, 2.0**9, False),
    ],
)
def test_grads_finite_is_an_overflow_and_accept_is_not(poison, verdicts, scale, finite):
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(PARAMS)
    _, new = tx.update(poisoned(state, poison), state, PARAMS, **verdicts)
    assert ols.get_loss_scale(new) == scale
    assert ols.where_applied(new, True, False) == finite
    assert new.loss_scale_state.total_notfinite == int(not finite)


@pytest.mark.parametrize("rule", [ols.no_loss_scale(), ols.static_loss_scale(
    8.0, skip_nonfinite=False)], ids=["none", "unchecked"])  # fmt: skip
def test_a_step_may_be_rejected_under_a_rule_that_never_skips(rule):
    tx = ols.loss_scaled(adam(), rule)
    state = tx.init(PARAMS)
    bad = poisoned(state)
    assert_skipped(PARAMS, state, *tx.update(bad, state, PARAMS, accept=False))


INFINITE = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / 0.0, grads))


def test_nonfinite_updates_skip_a_step_if_they_are_checked():
    inner = optax.chain(optax.trace(0.9), INFINITE)
    for check_updates in (True, False):
        tx = ols.loss_scaled(inner, RULE, check_updates=check_updates)
        state = tx.init(PARAMS)
        updates, new = jax.jit(tx.update)(ols.scale(GRADS, state), state, PARAMS)
        assert ols.get_loss_scale(new) == SCALE
        if check_updates:
            assert_skipped(PARAMS, state, updates, new)
        else:
            assert not jnp.isfinite(updates["w"]).any()


@pytest.mark.parametrize(
    "mask", [{"w": True, "b": False}, lambda g: jax.tree.map(lambda x: x.ndim > 1, g)]
)
def test_what_the_mask_excludes_is_neither_unscaled_nor_checked(mask):
    tx = ols.loss_scaled(optax.sgd(1.0), RULE, unscale_mask=mask)
    state = tx.init(PARAMS)
    grads = {"w": GRADS["w"] * SCALE, "b": GRADS["b"]}
    updates, _ = tx.update(grads, state, PARAMS)
    assert_same_bits(updates, jax.tree.map(lambda g: -g, GRADS))
    bad = {**grads, "b": jnp.full(2, jnp.nan)}
    assert tx.update(bad, state, PARAMS)[1].loss_scale_state.last_finite
    bad = {**grads, "w": grads["w"] * jnp.nan}
    assert_skipped(PARAMS, state, *tx.update(bad, state, PARAMS))


def test_updates_that_the_mask_excludes_are_not_checked():
    mask = {"w": True, "b": False}
    tx = ols.loss_scaled(
        optax.scale(2.0**10), RULE, unscale_mask=mask, check_updates=True
    )
    big = jnp.full(2, 2.0**120)
    for name, is_applied in (("b", True), ("w", False)):  # Its update is infinite.
        grads = {"w": jnp.ones(2), "b": jnp.ones(2), name: big}
        _, state = tx.update(grads, tx.init(grads), grads, grads_unscaled=True)
        assert state.loss_scale_state.last_finite == is_applied


@pytest.mark.filterwarnings("ignore:.*master_weights")
def test_a_mask_that_is_a_function_is_given_the_gradients_as_they_are():
    grads = {"w": jnp.full((2, 2), SCALE), "b": jnp.ones(2, jnp.float16)}
    tx = ols.loss_scaled(
        optax.sgd(1.0),
        RULE,
        unscale_mask=lambda g: jax.tree.map(lambda x: x.dtype == jnp.float32, g),
    )
    updates, _ = tx.update(grads, tx.init(grads))
    assert_same_bits(updates, {"w": -jnp.ones((2, 2)), "b": -grads["b"]})


@pytest.mark.parametrize("where", ["at the start", "in the step"])
def test_gradients_that_are_unscaled_already_are_not_unscaled_again(where):
    by_default = {"grads_unscaled": where == "at the start"}
    in_a_step = {} if where == "at the start" else {"grads_unscaled": True}
    tx = ols.loss_scaled(optax.sgd(1.0), RULE, **by_default)
    state = tx.init(PARAMS)
    updates, _ = tx.update(GRADS, state, PARAMS, **in_a_step)
    assert_same_bits(updates, jax.tree.map(lambda g: -g, GRADS))
    bad = {**GRADS, "b": GRADS["b"] * jnp.nan}
    _, new = tx.update(bad, state, PARAMS, **in_a_step)
    assert ols.get_loss_scale(new) == SCALE / 2


@pytest.mark.filterwarnings("ignore:.*master_weights")
def test_extra_arguments_and_parameters_reach_the_inner_optimizer():
    seen = []
    tx = ols.loss_scaled(recorder(seen), RULE)
    params = {"w": jnp.ones(2, jnp.float16), "i": jnp.arange(2), "none": None}
    grads = {"w": jnp.ones(2, jnp.float16) * 16, "i": None, "none": None}
    extra = {"value": 3.0, "grad_fn": jnp.sum, "accepted": None}
    tx.update(grads, tx.init(params), params, **extra)
    ((grads, given, passed_on),) = seen
    assert_same_bits(grads, {"w": jnp.full(2, 16 / SCALE), "i": None, "none": None})
    assert_same_bits(given, {"w": jnp.ones(2), "i": None, "none": None})
    assert passed_on == extra


def test_without_an_optimizer_it_is_a_link_of_a_chain():
    tx = optax.chain(ols.loss_scaled(None, RULE), optax.trace(0.9))
    state = tx.init(PARAMS)
    updates, after = tx.update(ols.scale(GRADS, state), state)
    assert_same_bits(updates, GRADS)
    updates, after = tx.update(poisoned(after), after)
    for one, grad in zip(*map(jax.tree.leaves, (updates, GRADS)), strict=True):
        np.testing.assert_allclose(one, 0.9 * grad, rtol=1e-6)


def test_gradients_may_be_absent_and_integers_stay():
    params = {"w": jnp.ones(2), "n": None, "i": jnp.arange(2), "u": jnp.ones(2)}
    params["of NumPy"] = np.arange(2)
    tx = ols.loss_scaled(optax.masked(optax.sgd(1.0), {k: k == "w" for k in params}))
    state = tx.init(params)
    grads = {"w": jnp.ones(2) * 2.0**15, "n": None, "u": None}
    grads["i"] = grads["of NumPy"] = np.zeros(2, jax.dtypes.float0)
    updates, _ = tx.update(grads, state, params)
    assert updates["w"].tolist() == [-1.0, -1.0]
    assert updates["i"].tolist() == updates["of NumPy"].tolist() == [0, 0]
    assert updates["u"] is None


# --- Programs ------------------------------------------------------------------------


@each_rule
def test_a_step_compiles_once_and_reuses_every_donated_buffer(rule):
    tx = ols.loss_scaled(adam(), rule)

    def step(carry, poison):
        params, state = carry
        grads = jax.tree.map(lambda p: p * poison, params)
        updates, state = tx.update(grads, state, params)
        return (apply(params, updates), state), None

    first = carry = jax.tree.map(jnp.copy, (PARAMS, tx.init(PARAMS)))
    types_at_first, poisons = types(first), np.float32([1.0, np.nan, 1.0])
    scanned, _ = jax.lax.scan(step, first, poisons)
    jitted = jax.jit(step, donate_argnums=0)
    for poison in poisons:
        old = jax.tree.leaves(carry)
        carry, _ = jitted(carry, poison)
        # Whether the last step was applied is not read.
        assert sum(leaf.is_deleted() for leaf in old) >= len(old) - 1
        assert types(carry) == types_at_first
    assert jitted._cache_size() == 1
    assert_within_ulp(scanned, carry)
    assert [*map(int, carry[1].loss_scale_state[1:5])] == [1, 0, 1, 3]


def test_a_second_step_outside_jit_compiles_nothing(caplog):
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(PARAMS)
    for _ in range(2):
        _, state = tx.update(poisoned(state), state, PARAMS)
    grads = poisoned(state)
    with jax.log_compiles(True):
        tx.update(grads, state, PARAMS)
    assert not [record for record in caplog.records if "ompil" in record.message]


@pytest.mark.filterwarnings("ignore:.*master_weights")
def test_no_loss_scale_compiles_to_the_program_of_the_bare_optimizer():
    bare, rule = lenient(optax.sgd(0.1, momentum=0.9)), ols.no_loss_scale()
    params, grads = optax.tree.cast((PARAMS, GRADS), "float16")

    def update(grads, state, params):
        state = ols.LossScaledState(rule.init(), state)
        updates, state = ols.loss_scaled(bare, rule).update(grads, state, params)
        return updates, state.inner_state

    def text(update):
        program = jax.jit(update).lower(grads, bare.init(params), params).compile()
        # Without source positions.
        computations = re.search(r"^(%|ENTRY).*", program.as_text(), re.M | re.S)[0]
        return re.sub(r", metadata=\{[^}]*\}", "", computations)

    assert text(update) == text(bare.update)


@pytest.mark.filterwarnings("ignore:.*master_weights")
def test_no_loss_scale_passes_everything_on_untouched():
    seen = []
    tx = ols.loss_scaled(recorder(seen), ols.no_loss_scale())
    grads = {"w": jnp.asarray([jnp.nan, 1.0], jnp.float16)}
    updates, state = tx.update(grads, tx.init(grads), grads)
    assert updates["w"] is grads["w"]
    assert seen[0][1]["w"] is grads["w"]
    assert state.loss_scale_state.last_finite


def test_an_ensemble_skips_member_by_member():
    tx = ols.loss_scaled(adam(), RULE)
    params = jnp.ones((3, 2))
    states = jax.vmap(tx.init)(params)
    grads = jnp.ones((3, 2)).at[1].set(jnp.nan)
    updates, states = jax.jit(jax.vmap(tx.update))(grads, states, params)
    assert states.loss_scale_state.loss_scale.tolist() == [SCALE, SCALE / 2, SCALE]
    assert updates.any(axis=1).tolist() == [True, False, True]


@pytest.mark.parametrize("rule", ["dynamic", "headroom"])
def test_all_members_of_a_named_axis_skip_a_step_together(rule):
    tx = ols.loss_scaled(
        optax.scale(1e20), RULES[rule], axis_name="i", check_updates=True
    )

    @jax.jit
    @functools.partial(jax.vmap, axis_name="i")
    def update(bad, accept, grads_finite):
        grads = jnp.ones(2).at[1].set(bad)
        verdicts = {"accept": accept, "grads_finite": grads_finite}
        return tx.update(grads, tx.init(grads), **verdicts)

    good = 1.0, True, True
    for other, is_applied in [
        (good, True),
        ((jnp.nan, True, True), False),
        ((1e30, True, True), False),  # Its update is infinite.
        ((1.0, False, True), False),
        ((1.0, True, False), False),
    ]:
        args = (jnp.asarray(pair) for pair in zip(good, other, strict=True))
        updates, after = update(*args)
        assert bool(updates.any()) == is_applied
        assert after.loss_scale_state.last_finite.tolist() == [is_applied] * 2
        first, second = after.loss_scale_state.loss_scale
        assert first == second


@each_rule
def test_steps_with_nonfinite_updates_leave_the_rule_alone(rule):
    tx = ols.loss_scaled(INFINITE, rule, check_updates=True)
    first = state = tx.init(PARAMS)
    for _ in range(2):  # The dynamic rule would grow.
        _, state = tx.update(ols.scale(GRADS, state), state, PARAMS)
    new, old = state.loss_scale_state, first.loss_scale_state
    assert_same_bits((new.loss_scale, new.rule_state), (old.loss_scale, old.rule_state))


@each_rule
def test_an_update_branches_nowhere(rule):
    # jax #40823: under shard_map the branches of a cond diverge silently.
    tx = ols.loss_scaled(optax.sgd(0.1), rule, check_updates=True)
    program = jax.make_jaxpr(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
    assert "cond[" not in str(program)
