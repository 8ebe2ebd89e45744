"""Verdicts from outside: `grads_finite=`, `accept=`; gradients unscaled by the user."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam
from helpers.steps import assert_skipped, with_scale

PARAMS = jnp.asarray([1.0, -2.0])
GRADS = jnp.asarray([0.5, 0.25])


RULES = {
    "dynamic": ols.dynamic_loss_scale(2.0**10, growth_interval=2),
    "headroom": ols.headroom_loss_scale(2.0**10),
    "static": ols.static_loss_scale(2.0**10),
    "unchecked": ols.static_loss_scale(2.0**10, skip_nonfinite=False),
    "none": ols.no_loss_scale(),
}


def make(name, **options):
    tx = ols.loss_scaled(adam(), RULES[name], **options)
    return tx, tx.init(PARAMS)


@pytest.mark.parametrize("name", RULES)
def test_a_step_that_is_not_accepted_is_skipped_and_leaves_the_scale_alone(name):
    tx, old = make(name)
    grads = ols.scale(GRADS, old)
    updates, new = tx.update(grads, old, PARAMS, accept=False)
    assert_skipped(PARAMS, old, updates, new)
    before, after = old.loss_scale_state, new.loss_scale_state
    assert_same_bits(after.loss_scale, before.loss_scale)
    assert_same_bits(after.rule_state, before.rule_state)
    updates, new = tx.update(grads, old, PARAMS, accept=True)
    expected, as_ever = tx.update(grads, old, PARAMS)
    assert_same_bits(updates, expected)
    assert_same_bits(new.inner_state, as_ever.inner_state)
    assert_same_bits(ols.get_loss_scale(new), ols.get_loss_scale(as_ever))


@pytest.mark.parametrize(
    ("poison", "verdicts", "expected"),
    [
        (1.0, {"grads_finite": np.bool_(False)}, 2.0**9),
        (1.0, {"accept": jnp.bool_(False)}, 2.0**10),
        (jnp.inf, {"accept": False}, 2.0**9),
        (jnp.inf, {"grads_finite": True, "accept": True}, 2.0**9),
    ],
)
def test_grads_finite_is_an_overflow_and_accept_is_not(poison, verdicts, expected):
    tx, opt_state = make("dynamic")
    grads = ols.scale(GRADS, opt_state) * poison
    _, new = tx.update(grads, opt_state, PARAMS, **verdicts)
    assert ols.get_loss_scale(new) == expected
    assert new.loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize(
    ("verdict", "name"),
    [
        ("accept", "dynamic"),
        ("accept", "none"),
        ("accept", "unchecked"),
        ("grads_finite", "dynamic"),
        ("grads_finite", "headroom"),
    ],
)
def test_devices_skip_together_if_the_verdict_of_one_is_false(verdict, name):
    tx, opt_state = make(name, axis_name="batch")

    def step(opt_state, given):
        grads = ols.scale(GRADS, opt_state)
        return tx.update(grads, opt_state, PARAMS, **{verdict: given})

    given = jnp.asarray([True, False, True])
    mapped = jax.jit(jax.vmap(step, (None, 0), axis_name="batch"))
    updates, new = mapped(opt_state, given)
    np.testing.assert_array_equal(updates, np.zeros((3, 2)))
    np.testing.assert_array_equal(new.loss_scale_state.total_notfinite, [1, 1, 1])
    assert len(set(ols.get_loss_scale(new).tolist())) == 1


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("name", ["dynamic", "headroom", "static"])
def test_devices_skip_together_if_the_scale_of_one_is_damaged(name, skips):
    rule = RULES[name]._replace(skips=skips)
    tx = ols.loss_scaled(adam(), rule, axis_name="batch")
    opt_state = tx.init(PARAMS)
    scales = jnp.asarray([2.0**10, jnp.nan, 2.0**10])

    def step(opt_state, scale):
        grads = ols.scale(GRADS, opt_state)
        return tx.update(grads, with_scale(opt_state, scale), PARAMS)

    updates, new = jax.vmap(step, (None, 0), axis_name="batch")(opt_state, scales)
    np.testing.assert_array_equal(updates, np.zeros((3, 2)))
    assert not new.loss_scale_state.last_finite.any()


@pytest.mark.parametrize("skips", [True, False])
def test_devices_have_one_scale_under_a_rule_of_the_largest_gradient(skips):
    rule = RULES["headroom"]._replace(skips=skips)
    tx = ols.loss_scaled(optax.identity(), rule, axis_name="batch")
    update = jax.vmap(lambda g: tx.update(g, tx.init(g))[1], axis_name="batch")
    states = update(jnp.asarray([[1.0], [2.0**17]]))
    scale, other = ols.get_loss_scale(states).tolist()
    assert scale == other


def own_rule(init_scale, *, skips=True, needs_grads_max=False):
    """A rule whose `rule_state` is the verdict and the magnitude that it was told."""
    static = ols.static_loss_scale(init_scale)
    told = jnp.asarray(True), jnp.float32(0.0)

    def adjust(state, grads_finite, grads_max=0.0):
        told = grads_finite, jnp.asarray(grads_max, jnp.float32)
        return static.adjust(state, grads_finite)._replace(rule_state=told)

    init = lambda: static.init()._replace(rule_state=told)  # noqa: E731
    return ols.LossScale(init, adjust, skips=skips, needs_grads_max=needs_grads_max)


@pytest.mark.parametrize("scale", [0.0, np.nan])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"needs_grads_max": True}, (False, np.inf)),
        ({"skips": False}, (False, 0.0)),
        ({}, (False, 0.0)),
    ],
)
def test_a_rule_is_told_of_an_unusable_scale_as_of_an_overflow(
    scale, settings, expected
):
    tx = ols.loss_scaled(adam(), own_rule(8.0, **settings))
    _, new = tx.update(GRADS, with_scale(tx.init(PARAMS), scale), PARAMS)
    assert tuple(map(float, new.loss_scale_state.rule_state)) == expected
    assert not new.loss_scale_state.last_finite


def test_a_rule_is_told_the_largest_magnitude_inside_the_mask():
    rule, mask = own_rule(8.0, needs_grads_max=True), {"w": True, "amax": False}
    tx = ols.loss_scaled(optax.identity(), rule, unscale_mask=mask)
    grads = {"w": jnp.asarray([16.0, -24.0]), "amax": jnp.asarray([jnp.nan])}
    _, new = tx.update(grads, tx.init(grads), grads)
    assert new.loss_scale_state.rule_state[1] == 3.0


@pytest.mark.parametrize(
    ("name", "meant"),
    [("accept", "loss < threshold"), ("grads_finite", r"jnp.isfinite\(loss\)")],
)
def test_the_error_for_a_verdict_that_is_no_bool_says_what_it_may_be(name, meant):
    tx, opt_state = make("dynamic")
    message = rf"`{name}` must be a bool, got .*\(Did you mean `{meant}`\?\)$"
    for value in (1.0, jnp.float32(1.0), lambda: True, "bool", [True]):
        with pytest.raises(TypeError, match=message):
            tx.update(GRADS, opt_state, PARAMS, **{name: value})
    with pytest.raises(ValueError, match=f"`{name}` must be a scalar, got sha"):
        tx.update(GRADS, opt_state, PARAMS, **{name: jnp.ones(2, bool)})


@pytest.mark.parametrize("name", RULES)
def test_gradients_that_are_unscaled_already_are_not_unscaled_again(name):
    tx, opt_state = make(name)
    scaled = ols.scale(GRADS, opt_state)

    def by_hand(grads, opt_state):
        grads = ols.unscale(grads, opt_state)
        return tx.update(grads, opt_state, PARAMS, grads_unscaled=True)

    for grads in (scaled, scaled.at[0].set(jnp.inf)):
        by_update = tx.update(grads, opt_state, PARAMS)
        assert_same_bits(by_hand(grads, opt_state), by_update)
    _, new = by_hand(scaled, with_scale(opt_state, 0.0))
    assert new.loss_scale_state.last_finite == (name == "none")


def test_half_precision_gradients_that_are_unscaled_are_widened_all_the_same():
    tx, opt_state = make("dynamic")
    grads = GRADS.astype(jnp.float16)
    updates, _ = tx.update(grads, opt_state, PARAMS, grads_unscaled=True)
    assert updates.dtype == jnp.float32


def test_leaves_outside_unscale_mask_are_left_alone_if_gradients_are_unscaled():
    tx = ols.loss_scaled(optax.identity(), unscale_mask={"w": True, "other": False})
    grads = {"w": GRADS, "other": jnp.asarray(jnp.nan)}
    updates, new = tx.update(grads, tx.init(grads), grads_unscaled=True)
    assert ols.loss_scale_metrics(new)["last_finite"]
    np.testing.assert_array_equal(updates["w"], GRADS)


def test_grads_unscaled_must_be_true_or_false():
    tx, opt_state = make("dynamic")
    for value in (1, None, jnp.asarray(True)):
        with pytest.raises(TypeError, match="`grads_unscaled` must be True or False"):
            tx.update(GRADS, opt_state, PARAMS, grads_unscaled=value)


def test_a_step_with_verdicts_can_be_scanned():
    tx, opt_state = make("dynamic")

    def step(opt_state, accept):
        grads = ols.scale(GRADS, opt_state)
        _, opt_state = tx.update(grads, opt_state, PARAMS, accept=accept)
        return opt_state, ols.get_loss_scale(opt_state)

    accepts = jnp.asarray([True, False, True, True])
    opt_state, scales = jax.lax.scan(step, opt_state, accepts)
    np.testing.assert_array_equal(scales, [2.0**10, 2.0**10, 2.0**11, 2.0**11])
    assert ols.loss_scale_metrics(opt_state)["total_notfinite"] == 1


def that_reports(last_finite, **fields):
    """A rule of one's own that reports the same verdict whatever happened."""

    def adjust(state, grads_finite, grads_max=None):
        return state._replace(last_finite=jnp.asarray(last_finite))

    return ols.LossScale(ols.static_loss_scale(2.0**10).init, adjust, **fields)


TELLING = {
    **RULES,
    "own, says finite": that_reports(True),
    "own, says nonfinite": that_reports(False),
    "own, never skips": that_reports(False, skips=False),
}
STEPS = {
    "sound": {},
    "nonfinite gradients": {"grads": GRADS * jnp.nan},
    "nonfinite verdict": {"grads_finite": False},
    "finite verdict only": {"grads": GRADS * jnp.nan, "grads_finite": True},
    "not accepted": {"accept": False},
    "nonfinite and not accepted": {"grads": GRADS * jnp.inf, "accept": False},
    "a scale of zero": {"scale": 0.0},
    "a scale of NaN": {"scale": jnp.nan},
    "nonfinite updates": {"params": PARAMS * jnp.inf},
}


def counting():
    """An optimizer that counts its updates, which are nonfinite if parameters are."""

    def update(grads, count, params=None):
        return grads - params, count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


@pytest.mark.parametrize("check_updates", [False, True])
@pytest.mark.parametrize("name", TELLING)
def test_the_state_tells_whether_the_step_was_applied(name, check_updates):
    tx = ols.loss_scaled(counting(), TELLING[name], check_updates=check_updates)
    first = tx.init(PARAMS)

    @jax.jit
    def step(opt_state, params, grads, verdicts):
        return tx.update(grads, opt_state, params, **verdicts)[1]

    for case in STEPS.values():
        is_damaged = "scale" in case and name != "none"
        old = with_scale(first, case["scale"]) if is_damaged else first
        grads, params = case.get("grads", GRADS), case.get("params", PARAMS)
        verdicts = {key: case.get(key, True) for key in ("accept", "grads_finite")}
        new = step(old, params, grads, verdicts)
        was_applied = bool(new.inner_state == 1)
        state = new.loss_scale_state
        assert ols.where_applied(new, True, False) == was_applied, case
        assert ols.loss_scale_metrics(new)["last_finite"] == was_applied, case
        assert (state.notfinite_count == 0) == was_applied, case
        assert state.total_notfinite == int(not was_applied), case
        assert state.step_count == 1, case


def test_a_link_in_a_chain_tells_whether_it_let_the_gradients_through():
    tx = optax.chain(ols.loss_scaled(), optax.trace(0.9))
    opt_state = tx.init(PARAMS)
    for grads, is_passed in ((GRADS, True), (GRADS * jnp.nan, False)):
        _, new = tx.update(ols.scale(grads, opt_state), opt_state)
        assert ols.where_applied(new, True, False) == is_passed
        assert np.any(new[1].trace != 0) == is_passed


def test_a_rule_that_never_skips_is_told_that_every_step_is_finite():
    def adjust(state, grads_finite, grads_max=None):
        return state._replace(loss_scale=jnp.where(grads_finite, 2.0, 4.0))

    init = ols.static_loss_scale(1.0).init
    tx = ols.loss_scaled(optax.sgd(0.1), ols.LossScale(init, adjust, skips=False))
    _, opt_state = tx.update(GRADS * jnp.nan, tx.init(PARAMS), PARAMS)
    assert ols.get_loss_scale(opt_state) == 2.0
