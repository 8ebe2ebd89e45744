"""Verdicts from outside: `grads_finite=`, `accept=`; gradients unscaled by the user."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam
from helpers.steps import assert_skipped, eager_and_jitted

PARAMS = jnp.asarray([1.0, -2.0])
GRADS = jnp.asarray([0.5, 0.25])


def rule_that_reports(last_finite):
    """A rule of one's own that reports the same verdict whatever happened."""
    static = ols.static_loss_scale(2.0**10)

    def adjust(state, grads_finite, grads_max=None):
        return state._replace(last_finite=jnp.asarray(last_finite))

    return static.init, adjust


RULES = {
    "dynamic": ols.dynamic_loss_scale(2.0**10, growth_interval=2),
    "smooth": ols.smooth_loss_scale(2.0**10),
    "headroom": ols.headroom_loss_scale(2.0**10),
    "static": ols.static_loss_scale(2.0**10),
    "unchecked": ols.static_loss_scale(2.0**10, skip_nonfinite=False),
    "none": ols.no_loss_scale(),
}


def make(name, **options):
    tx = ols.loss_scaled(adam(), RULES[name], **options)
    return tx, tx.init(PARAMS)


@pytest.mark.parametrize("check_updates", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_step_that_is_not_accepted_is_skipped_and_leaves_the_scale_alone(
    name, check_updates
):
    tx, old = make(name, check_updates=check_updates)
    updates, new = tx.update(ols.scale(GRADS, old), old, PARAMS, accept=False)
    assert_skipped(PARAMS, old, updates, new)
    before, after = old.loss_scale_state, new.loss_scale_state
    assert_same_bits(after.loss_scale, before.loss_scale)
    assert_same_bits(after.rule_state, before.rule_state)


@pytest.mark.parametrize("name", RULES)
def test_a_step_that_is_accepted_is_the_same_as_without_a_verdict(name):
    tx, opt_state = make(name)
    grads = ols.scale(GRADS, opt_state)
    updates, new = tx.update(grads, opt_state, PARAMS, accept=True)
    expected, as_ever = tx.update(grads, opt_state, PARAMS)
    assert_same_bits(updates, expected)
    assert_same_bits(new.inner_state, as_ever.inner_state)
    assert_same_bits(ols.get_loss_scale(new), ols.get_loss_scale(as_ever))


@pytest.mark.parametrize(
    ("poison", "verdicts", "expected"),
    [
        (1.0, {"grads_finite": False}, 2.0**9),
        (1.0, {"accept": False}, 2.0**10),
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


@pytest.mark.parametrize("name", ["dynamic", "none"])
def test_devices_skip_together_if_one_of_them_does_not_accept(name):
    tx, opt_state = make(name, axis_name="batch")

    def step(accept):
        return tx.update(ols.scale(GRADS, opt_state), opt_state, PARAMS, accept=accept)

    accept = jnp.asarray([True, False, True])
    updates, new = jax.vmap(step, axis_name="batch")(accept)
    np.testing.assert_array_equal(updates, np.zeros((3, 2)))
    np.testing.assert_array_equal(new.loss_scale_state.total_notfinite, [1, 1, 1])


@pytest.mark.parametrize(
    ("name", "meant"),
    [("accept", "loss < threshold"), ("grads_finite", r"jnp.isfinite\(loss\)")],
)
@pytest.mark.parametrize("value", [1.0, jnp.float32(1.0), lambda: True, "bool", [True]])
def test_the_error_for_a_verdict_that_is_no_bool_says_what_it_may_be(
    name, meant, value
):
    tx, opt_state = make("dynamic")
    message = rf"`{name}` must be a bool, got .*\(Did you mean `{meant}`\?\)$"
    with pytest.raises(TypeError, match=message):
        tx.update(GRADS, opt_state, PARAMS, **{name: value})


@pytest.mark.parametrize("name", ["accept", "grads_finite"])
@pytest.mark.parametrize("kind", [bool, np.bool_, jnp.bool_])
def test_a_verdict_may_be_a_bool_of_python_numpy_or_jax(name, kind):
    tx, opt_state = make("dynamic")
    _, new = tx.update(GRADS, opt_state, PARAMS, **{name: kind(False)})
    assert new.loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize("name", ["accept", "grads_finite"])
def test_a_verdict_that_is_no_scalar_is_refused_by_its_name(name):
    tx, opt_state = make("dynamic")
    with pytest.raises(ValueError, match=f"`{name}` must be a scalar, got sha"):
        tx.update(GRADS, opt_state, PARAMS, **{name: jnp.ones(2, bool)})


@eager_and_jitted
@pytest.mark.parametrize("name", RULES)
def test_gradients_that_are_unscaled_already_are_not_unscaled_again(name, run):
    tx, opt_state = make(name)
    scaled = ols.scale(GRADS, opt_state)

    @run
    def by_hand(grads):
        grads = ols.unscale(grads, opt_state)
        return tx.update(grads, opt_state, PARAMS, grads_unscaled=True)

    @run
    def by_update(grads):
        return tx.update(grads, opt_state, PARAMS)

    for grads in (scaled, scaled.at[0].set(jnp.inf)):
        assert_same_bits(by_hand(grads), by_update(grads))


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


@pytest.mark.parametrize("value", [1, None, "yes", jnp.asarray(True)])
def test_grads_unscaled_must_be_true_or_false(value):
    tx, opt_state = make("dynamic")
    with pytest.raises(TypeError, match="`grads_unscaled` must be True or False"):
        tx.update(GRADS, opt_state, PARAMS, grads_unscaled=value)


def test_an_unusable_scale_skips_a_step_whose_gradients_are_unscaled_already():
    tx, opt_state = make("dynamic")
    damaged = opt_state.loss_scale_state._replace(loss_scale=jnp.float32(0.0))
    opt_state = opt_state._replace(loss_scale_state=damaged)
    updates, new = tx.update(GRADS, opt_state, PARAMS, grads_unscaled=True)
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert ols.get_loss_scale(new) == 2.0**9


def test_a_step_with_verdicts_can_be_scanned():
    tx, opt_state = make("dynamic")

    def step(carry, accept):
        params, opt_state = carry
        grads = ols.scale(GRADS, opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, accept=accept)
        return (optax.apply_updates(params, updates), opt_state), ols.get_loss_scale(
            opt_state
        )

    accepts = jnp.asarray([True, False, True, True])
    (_, opt_state), scales = jax.lax.scan(step, (PARAMS, opt_state), accepts)
    np.testing.assert_array_equal(scales, [2.0**10, 2.0**10, 2.0**11, 2.0**11])
    assert ols.loss_scale_metrics(opt_state)["total_notfinite"] == 1


TELLING = {
    **RULES,
    "own, says finite": ols.LossScale(*rule_that_reports(True)),
    "own, says nonfinite": ols.LossScale(*rule_that_reports(False)),
    "own, never skips": ols.LossScale(*rule_that_reports(False), skips=False),
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


@pytest.mark.parametrize(
    ("check_updates", "run"), [(False, lambda f: f), (True, jax.jit)]
)
@pytest.mark.parametrize("name", TELLING)
def test_the_state_tells_whether_the_step_was_applied(name, check_updates, run):
    tx = ols.loss_scaled(counting(), TELLING[name], check_updates=check_updates)
    first = tx.init(PARAMS)

    @run
    def step(opt_state, params, grads, accept, finite):
        kwargs = {} if accept is None else {"accept": accept}
        kwargs |= {} if finite is None else {"grads_finite": finite}
        return tx.update(grads, opt_state, params, **kwargs)[1]

    for case in STEPS.values():
        scale_state = first.loss_scale_state
        if "scale" in case and name != "none":
            scale = jnp.asarray(case["scale"], jnp.float32)
            scale_state = scale_state._replace(loss_scale=scale)
        old = first._replace(loss_scale_state=scale_state)
        grads, params = case.get("grads", GRADS), case.get("params", PARAMS)
        new = step(old, params, grads, case.get("accept"), case.get("grads_finite"))
        was_applied = bool(new.inner_state == 1)
        state = new.loss_scale_state
        assert ols.where_applied(new, True, False) == was_applied, case
        if name == "none" and "accept" not in case:
            continue  # Nothing is counted then.
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
