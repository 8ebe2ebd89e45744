"""`loss_scaled`: steps, refused arguments, and what the inner optimizer is given."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types
from helpers.compat import enable_x64
from helpers.inner import adam, lenient
from helpers.steps import assert_skipped, eager_and_jitted, recorder, with_scale

PARAMS = {"w": jnp.asarray([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.asarray([0.1, -0.0])}
GRADS = jax.tree.map(lambda p: 0.25 * p + 0.5, PARAMS)
SCALE = 2.0**10
RULE = ols.dynamic_loss_scale(SCALE)
STATIC = ols.static_loss_scale(SCALE)
UNCHECKED = ols.static_loss_scale(SCALE, skip_nonfinite=False)


def scaled(grads, factor=SCALE):
    return jax.tree.map(lambda g: g * factor, grads)


def poisoned(grads, value=jnp.nan):
    return {**grads, "b": grads["b"].at[1].set(value)}


@pytest.mark.slow
def test_gradients_that_overflow_on_unscaling_are_caught():
    # With a scale below 1, scaled gradients can be finite and true ones infinite.
    tx = ols.loss_scaled(adam(), ols.dynamic_loss_scale(2.0**-20))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 2.0**120), PARAMS)
    state = tx.init(PARAMS)
    assert_skipped(PARAMS, state, *tx.update(grads, state, PARAMS))


def test_a_step_on_which_the_scale_grows_unscales_by_the_old_scale():
    # A bug of mpx: gradients were divided by the new scale.
    tx = ols.loss_scaled(
        optax.sgd(1.0), ols.dynamic_loss_scale(SCALE, growth_interval=1)
    )
    updates, state = tx.update(scaled(GRADS), tx.init(PARAMS), PARAMS)
    assert_same_bits(updates, jax.tree.map(lambda g: -g, GRADS))
    assert ols.get_loss_scale(state) == 2 * SCALE


@pytest.mark.parametrize(
    ("poison", "verdicts"),
    [(jnp.nan, {}), (1.0, {"grads_finite": False}), (1.0, {"accept": False})],
    ids=["nonfinite gradients", "nonfinite verdict", "not accepted"],
)
def test_on_a_bad_step_the_inner_optimizer_sees_zeros_and_no_nan(poison, verdicts):
    seen = []
    grads = poisoned(scaled(GRADS), poison)
    for check_updates in (True, False):
        tx = ols.loss_scaled(recorder(seen), RULE, check_updates=check_updates)
        tx.update(grads, tx.init(PARAMS), PARAMS, value=jnp.nan, **verdicts)
        given, _, extra_args = seen.pop()
        assert not any(np.any(g) for g in jax.tree.leaves(given))
        assert extra_args == {"value": 0.0}


@pytest.mark.parametrize("rule", [UNCHECKED, ols.no_loss_scale()])
def test_of_a_step_that_is_not_accepted_no_nan_is_seen_under_any_rule(rule):
    seen = []
    tx = ols.loss_scaled(recorder(seen), rule)
    state, bad = tx.init(PARAMS), poisoned(GRADS)
    tx.update(bad, state, PARAMS, value=jnp.nan, accept=False)
    grads, _, extra_args = seen[0]
    assert not any(np.any(g) for g in jax.tree.leaves(grads))
    assert extra_args == {"value": 0.0}


@pytest.mark.parametrize("skips", [True, False])
def test_a_rule_that_needs_the_largest_gradient_is_given_the_unscaled_one(skips):
    seen = []

    def adjust(state, grads_finite, grads_max=None):
        seen.append((bool(grads_finite), float(grads_max)))
        return state

    rule = ols.LossScale(
        ols.static_loss_scale(SCALE).init, adjust, skips=skips, needs_grads_max=True
    )
    tx = ols.loss_scaled(optax.sgd(1.0), rule)
    state = tx.init(PARAMS)
    tx.update(scaled(GRADS), state, PARAMS)
    tx.update(scaled(GRADS, SCALE * 2.0**-20), state, PARAMS, grads_finite=True)
    updates, _ = tx.update(poisoned(scaled(GRADS)), state, PARAMS)
    assert seen == [(True, 1.25), (True, 1.25 * 2.0**-20), (False, np.inf)]
    assert jnp.isnan(updates["b"][1]) == (not skips)
    if skips:  # The verdict from outside is an overflow for the rule.
        tx.update(scaled(GRADS), state, PARAMS, grads_finite=False)
        assert seen[-1] == (False, np.inf)


@pytest.mark.parametrize("make", [ols.dynamic_loss_scale, ols.headroom_loss_scale])
def test_all_members_of_a_named_axis_skip_if_one_member_does(make):
    inner = bad_updates_above(0.5)
    tx = ols.loss_scaled(inner, make(SCALE), axis_name="i", check_updates=True)
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, None, None), axis_name="i"))
    for bad in (jnp.inf, 1.0):  # Of 1.0 only the update is nonfinite.
        grads = jnp.asarray([[0.25, 0.25], [0.25, bad]])
        updates, state = step(scaled(grads), tx.init(grads[0]), grads[0])
        assert not updates.any()
        assert state.loss_scale_state.total_notfinite.tolist() == [1, 1]


def test_no_loss_scale_passes_everything_on_untouched():
    seen = []
    tx = ols.loss_scaled(recorder(seen), ols.no_loss_scale(), check_updates=True)
    grads = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    state = tx.init(PARAMS)
    updates, after = tx.update(grads, state, PARAMS, grads_finite=False, value=1.0)
    assert seen[0][0] is updates is grads
    assert seen[0][2] == {"value": 1.0}
    assert_same_bits(after.loss_scale_state, state.loss_scale_state)
    assert after.inner_state.tolist() == [1.0, 1.0]


def test_no_loss_scale_starts_with_the_state_of_the_bare_optimizer():
    params = {"half": jnp.ones(2, jnp.float16), "weak": jnp.asarray(0.5)}
    state = ols.loss_scaled(adam(), ols.no_loss_scale()).init(params)
    assert types(state.inner_state) == types(adam().init(params))


def compiled_text(update, *args):
    """The optimized program without source positions."""
    text = jax.jit(update).lower(*args).compile().as_text()
    computations = re.search(r"^(%|ENTRY).*", text, flags=re.MULTILINE | re.DOTALL)[0]
    return re.sub(r", metadata=\{[^}]*\}", "", computations)


@pytest.mark.parametrize(
    ("make", "dtype"), [(optax.adamw, jnp.float32), (optax.sgd, jnp.float16)]
)
def test_no_loss_scale_compiles_to_the_program_of_the_bare_optimizer(make, dtype):
    bare = lenient(make(0.1))
    grads = jax.tree.map(lambda g: g.astype(dtype), GRADS)

    def program(rule):
        tx = ols.loss_scaled(bare, rule)

        def update(grads, inner_state, params):
            state = ols.LossScaledState(rule.init(), inner_state)
            updates, state = tx.update(grads, state, params)
            return updates, state.inner_state

        return compiled_text(update, grads, bare.init(PARAMS), PARAMS)

    def update(grads, inner_state, params):
        return bare.update(grads, inner_state, params)

    bare_program = compiled_text(update, grads, bare.init(PARAMS), PARAMS)
    assert "fusion" in bare_program
    assert program(ols.no_loss_scale()) == bare_program
    assert program(ols.static_loss_scale(1.0)) != bare_program


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        # They divide a zero gradient by an `eps` that float16 rounds to zero:
        # https://github.com/google-deepmind/optax/issues/1754, 1784 and 1789.
        (optax.adam, jnp.float16),
        pytest.param(optax.adafactor, jnp.float16, marks=pytest.mark.slow),
        (optax.lion, jnp.bfloat16),
    ],
)
def test_the_state_of_half_precision_parameters_is_and_stays_float32(make, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    tx = ols.loss_scaled(lenient(make(0.1)), RULE)
    state = first = tx.init(params)
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}
    update = jax.jit(tx.update)
    for size in (0.0, 1.0, np.nan, 0.0, 2.0):
        grads = jax.tree.map(lambda g, s=size: (g * SCALE * s).astype(dtype), GRADS)
        updates, state = update(grads, state, params)
        assert types(state) == types(first)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(updates))
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, state)))
    assert update._cache_size() == 1
    assert state.loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize(
    ("wrap", "dtype"),
    [(lambda tx: tx, jnp.float32), (ols.master_weights, jnp.float16)],
    ids=["bare", "masters"],
)
def test_only_an_optimizer_that_holds_masters_sees_half_precision_parameters(
    wrap, dtype
):
    seen = []
    inner = wrap(recorder([]))

    def update(updates, state, params):
        seen.append(params)
        return inner.update(updates, state, params)

    params = {"half": jnp.ones(2, jnp.float16), "int": jnp.arange(2), "none": None}
    tx = ols.loss_scaled(optax.GradientTransformation(inner.init, update), RULE)
    tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert_same_bits(seen[0], {"half": jnp.ones(2, dtype), "int": None, "none": None})


def test_init_accepts_abstract_parameters():
    abstract = jax.eval_shape(
        lambda: jax.tree.map(lambda p: p.astype("bfloat16"), PARAMS)
    )
    tx = ols.loss_scaled(adam(), RULE)
    assert types(tx.init(abstract)) == types(tx.init(PARAMS))
    assert jax.eval_shape(tx.init, abstract).inner_state[0].mu["w"].dtype == jnp.float32


def test_optax_can_map_over_the_parameters_in_the_state():
    tx = ols.loss_scaled(adam(), RULE)
    state = optax.tree.map_params(tx, lambda x: x + 1, tx.init(PARAMS))
    assert state.inner_state[0].mu["w"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert ols.get_loss_scale(state) == SCALE


def test_a_weakly_typed_parameter_or_inner_state_makes_no_weakly_typed_state():
    first = {
        "count": jnp.asarray(0),
        "mean": jnp.asarray(0.0),
        "norms": jnp.full(4, 0.0),
        "period": 7,
    }
    inner = optax.GradientTransformation(lambda params: first, lambda g, s, p: (g, s))
    tx = ols.loss_scaled(inner)
    state = tx.init(0.5)
    assert state.inner_state["period"] is first["period"]
    _, after = tx.update(jnp.ones(()), state, 0.5)
    for strong in (state, after):
        inner_state = [strong.inner_state[name] for name in ("count", "mean", "norms")]
        dtypes = [leaf.dtype for leaf in inner_state]
        assert dtypes == [jnp.int32, jnp.float32, jnp.float32]
        counts = strong.loss_scale_state[:5]
        assert not any(leaf.weak_type for leaf in (*inner_state, *counts))


@pytest.mark.parametrize("check_updates", [False, True])
def test_leaves_that_the_mask_excludes_are_neither_unscaled_nor_checked(check_updates):
    mask = {"w": True, "b": False}
    for unscale_mask in (mask, lambda grads: {name: name == "w" for name in grads}):
        tx = ols.loss_scaled(
            optax.identity(),
            RULE,
            unscale_mask=unscale_mask,
            check_updates=check_updates,
        )
        grads = {"w": GRADS["w"] * SCALE, "b": jnp.asarray([jnp.inf, 2.0])}
        updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert_same_bits(updates, {"w": GRADS["w"], "b": grads["b"]})
        assert state.loss_scale_state.last_finite
        bad = {**grads, "w": grads["w"].at[0].set(jnp.nan)}
        updates, state = tx.update(bad, state, PARAMS)
        assert not any(np.any(u) for u in jax.tree.leaves(updates))


def bad_updates_above(threshold, value=jnp.inf):
    """An optimizer whose updates are nonfinite for some finite gradients."""

    def update(updates, state, params=None):
        return (
            jax.tree.map(lambda g: jnp.where(g > threshold, value, g), updates),
            state + 1,
        )

    return optax.GradientTransformation(lambda params: jnp.zeros(2), update)


@eager_and_jitted
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_check_updates_skips_and_counts_the_step_but_keeps_the_scale(value, run):
    rule = ols.dynamic_loss_scale(SCALE, growth_interval=2)
    inner = bad_updates_above(100.0, value)
    update = run(ols.loss_scaled(inner, rule, check_updates=True).update)
    unchecked = ols.loss_scaled(inner, rule)
    _, before = update(scaled(GRADS), unchecked.init(PARAMS), PARAMS)
    large = scaled(GRADS, SCALE * 1000)
    updates, after = update(large, before, PARAMS)
    assert_skipped(PARAMS, before, updates, after)
    old, new = before.loss_scale_state, after.loss_scale_state
    assert new.loss_scale == SCALE
    assert_same_bits(new.rule_state, old.rule_state)
    assert new.step_count == 2
    _, after = update(poisoned(large), before, PARAMS)  # The gradients are to blame.
    assert ols.get_loss_scale(after) == SCALE / 2
    updates, _ = unchecked.update(large, before, PARAMS)
    assert not jnp.isfinite(updates["w"]).all()


def test_check_updates_looks_at_no_state_which_may_be_infinite_by_design():
    plateau = optax.contrib.reduce_on_plateau(accumulation_size=4)
    inner = lenient(optax.chain(optax.sgd(1.0), plateau))
    tx = ols.loss_scaled(inner, RULE, check_updates=True)
    state = tx.init(PARAMS)
    assert jnp.isinf(state.inner_state[1].best_value)
    updates, _ = tx.update(scaled(GRADS), state, PARAMS, value=jnp.float32(1.0))
    assert_same_bits(updates, jax.tree.map(lambda g: -g, GRADS))


def test_check_updates_skips_nothing_under_a_rule_that_never_skips():
    rule = UNCHECKED
    tx = ols.loss_scaled(bad_updates_above(100.0), rule, check_updates=True)
    large = scaled(GRADS, SCALE * 1000)
    updates, state = tx.update(large, tx.init(PARAMS), PARAMS)
    assert not jnp.isfinite(updates["w"]).all()
    assert state.loss_scale_state.total_notfinite == 0


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("accept", [True, False])
def test_no_loss_scale_casts_nothing_where_a_step_may_be_rejected(accept):
    """The bare optimizer may have its state and updates in any dtype."""
    inner = optax.GradientTransformation(
        lambda params: jnp.ones(2, jnp.float16),
        lambda grads, state, params: (grads, state.astype(jnp.float32) + 1),
    )
    tx = ols.loss_scaled(inner, ols.no_loss_scale())
    params = grads = jnp.ones(2, jnp.float16)
    updates, state = tx.update(grads, tx.init(params), params, accept=accept)
    assert_same_bits(updates, grads if accept else -jnp.zeros(2, jnp.float16))
    expected = jnp.full(2, 2.0 if accept else 1.0)
    assert_same_bits(state.inner_state, expected.astype(state.inner_state.dtype))
    assert state.inner_state.dtype == jnp.float32


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("check_updates", [True, False])
@pytest.mark.parametrize("finite", [True, False])
def test_an_inner_state_keeps_the_dtype_that_it_has_at_first(finite, check_updates):
    inner = optax.GradientTransformation(
        lambda params: jnp.ones(2, jnp.float16),
        lambda grads, state, params: (grads, state.astype(jnp.float32) + 1),
    )
    tx = ols.loss_scaled(inner, RULE, check_updates=check_updates)
    grads = jnp.ones(2) if finite else jnp.full(2, jnp.nan)
    _, state = tx.update(grads, tx.init(jnp.ones(2)), jnp.ones(2))
    expected = jnp.full(2, 2.0 if finite else 1.0, jnp.float16)
    assert_same_bits(state.inner_state, expected)


def test_a_mask_that_is_a_function_is_given_the_gradients():
    def is_half(grads):
        return jax.tree.map(lambda g: g.dtype == jnp.float16, grads)

    tx = ols.loss_scaled(optax.identity(), RULE, unscale_mask=is_half)
    grads = {"w": jnp.full(2, SCALE, jnp.float16), "b": jnp.ones(2)}
    params = jax.tree.map(jnp.ones_like, grads)
    for target in (params, jax.tree.map(lambda p: p.astype(jnp.float32), params)):
        updates, _ = tx.update(grads, tx.init(target), target)
        assert_same_bits(updates, {"w": jnp.ones(2), "b": jnp.ones(2)})
    with_int = {**grads, "n": np.zeros(3, jax.dtypes.float0)}
    target = {**params, "n": jnp.arange(3)}
    updates, _ = jax.jit(lambda s: tx.update(with_int, s, target))(tx.init(target))
    assert_same_bits(updates["w"], jnp.ones(2))
    bad = bad_updates_above(0.5)
    tx = ols.loss_scaled(bad, RULE, unscale_mask=is_half, check_updates=True)
    _, state = tx.update(grads, tx.init(params), params)
    assert not state.loss_scale_state.last_finite  # The update of `w` is checked.


class SlowFast(NamedTuple):
    slow: jax.Array
    fast: jax.Array


def test_parameters_may_have_the_name_that_those_of_lookahead_have():
    params = SlowFast(jnp.ones(2), jnp.ones(3))
    tx = ols.loss_scaled(optax.sgd(1.0), RULE)
    updates, _ = tx.update(scaled(params), tx.init(params), params)
    assert_same_bits(updates, jax.tree.map(lambda p: -p, params))


def test_an_optimizer_is_made_without_computing_anything():
    """So a module may make one before `jax.distributed.initialize`."""
    are_traced = []

    def init():
        state = STATIC.init()
        are_traced.append(isinstance(state.loss_scale, jax.core.Tracer))
        return state

    ols.loss_scaled(adam(), ols.LossScale(init, STATIC.adjust))
    assert all(are_traced)


def test_finite_gradients_that_are_unscaled_already_are_not_checked_as_scaled_ones():
    tx = ols.loss_scaled(optax.identity(), ols.static_loss_scale(2.0**-24))
    grads = jnp.full(2, 2.0**105)
    updates, state = tx.update(grads, tx.init(grads), grads, grads_unscaled=True)
    assert state.loss_scale_state.last_finite
    assert_same_bits(updates, grads)


@pytest.mark.parametrize(
    ("rule", "other"),
    [
        (ols.no_loss_scale(), ols.static_loss_scale(8.0)),
        (RULE, ols.no_loss_scale()),
        (ols.presets.torch(), ols.presets.deepspeed()),
    ],
    ids=lambda rule: repr(rule).split("(")[0],
)
def test_a_state_of_another_rule_is_refused(rule, other):
    # Otherwise gradients scaled by one rule would not be unscaled by the other.
    tx, saved = ols.loss_scaled(adam(), rule), ols.loss_scaled(adam(), other)
    state = saved.init(PARAMS)
    got = re.escape(str(state.loss_scale_state.rule_state))
    message = rf"`state` must be .* own rule, got {got}\. \(To change the rule:"
    with pytest.raises(ValueError, match=message):
        tx.update(GRADS, state, PARAMS)
    tx.update(GRADS, ols.adopt_inner_state(state.inner_state, rule), PARAMS)


WRONG_STATES = [
    (lambda s: None, "got <class 'NoneType'>"),
    (lambda s: s._asdict(), "got <class 'dict'>"),
    (lambda s: s.loss_scale_state, r"Pass what `init` or the last `update` return"),
    (lambda s: s.inner_state, r"`adopt_inner_state\(state, loss_scale\)`"),
    (lambda s: (s, ()), r"Did you mean `state\[0\]`\?"),
    (lambda s: {"a": s, "b": s}, r"mean `state\['a'\]` or `state\['b'\]`\?"),
]


@pytest.mark.parametrize(("wrap", "hint"), WRONG_STATES)
def test_a_wrong_state_is_refused_with_a_hint_that_fits_it(wrap, hint):
    tx = ols.loss_scaled(adam(), RULE)
    with pytest.raises(ValueError, match="`state` must be a LossScaledState .*" + hint):
        tx.update(GRADS, wrap(tx.init(PARAMS)), PARAMS)


WRONG_RULES = [
    (ols.dynamic_loss_scale, r"Did you mean `dynamic_loss_scale\(\)`"),
    (ols.presets.torch, r"Did you mean `presets.torch\(\)`"),
    (functools.partial(ols.static_loss_scale, 8.0), r"mean `loss_scale\(\)`"),
    (lambda: ols.no_loss_scale(), r"Did you mean `loss_scale\(\)`"),
    (8.0, r"Did you mean `static_loss_scale"),
    (0, "got 0 of type int"),
    (False, "got False of type bool"),
    ("dynamic", "got 'dynamic'"),
]


@pytest.mark.parametrize(("rule", "hint"), WRONG_RULES)
@pytest.mark.parametrize("call", [ols.loss_scaled, ols.adopt_inner_state])
def test_what_is_no_rule_is_refused_with_the_call_that_makes_one(call, rule, hint):
    with pytest.raises(TypeError, match="`loss_scale` must be a LossScale.*" + hint):
        call(adam(), rule)


@pytest.mark.parametrize("call", [ols.loss_scaled, ols.master_weights])
@pytest.mark.parametrize(
    ("inner", "hint"),
    [
        (1e-3, "Call the factory"),
        (optax.adam, "Call the factory"),
        (RULE, r"`loss_scaled\(optimizer, rule\)`"),
    ],
)
def test_an_inner_optimizer_of_the_wrong_type_is_refused(call, inner, hint):
    message = f"`inner` must be an optimizer with `init` and.*{hint}"
    with pytest.raises(TypeError, match=message):
        call(inner)


@pytest.mark.parametrize(
    ("call", "flag"),
    [
        (ols.loss_scaled, "check_updates"),
        (ols.loss_scaled, "grads_unscaled"),
        (ols.master_weights, "compact"),
    ],
)
def test_a_flag_must_be_true_or_false(call, flag):
    with pytest.raises(TypeError, match=f"`{flag}` must be True or False, got 'yes'"):
        call(adam(), **{flag: "yes"})


def test_what_is_already_loss_scaled_is_refused():
    # Gradients would be unscaled twice. tf.keras refuses this, too.
    inner = optax.chain(ols.loss_scaled(optax.sgd(0.1)), optax.scale(1.0))
    with pytest.raises(ValueError, match="`inner` must not be loss-scaled itself"):
        ols.loss_scaled(inner).init(jnp.ones(1))
    state = inner.init(jnp.ones(1))
    for saved in (state, state[0].loss_scale_state):
        with pytest.raises(ValueError, match="`inner_state` must not be loss-scaled"):
            ols.adopt_inner_state(saved)


def test_differentiating_through_a_bad_step_gives_no_nan():
    inner = lenient(optax.adam(0.1, eps_root=1e-8))  # Without it, sqrt at 0 gives NaN.
    tx = ols.loss_scaled(inner, RULE)

    @jax.jit
    def after_step(x, poison):
        grads = jax.tree.map(lambda p: x * p + poison, PARAMS)
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    assert jax.grad(after_step)(2.0, 0.0) != 0.0
    assert jax.grad(after_step)(2.0, jnp.inf) == 0.0


@pytest.mark.parametrize(
    ("inner", "value"), [(optax.adam(0.1), jnp.nan), (optax.contrib.muon(0.1), jnp.inf)]
)
def test_debug_nans_accepts_a_jitted_bad_step(inner, value):
    tx = ols.loss_scaled(lenient(inner), RULE)
    state, grads = tx.init(PARAMS), poisoned(scaled(GRADS), value)
    with jax.debug_nans(True):
        updates, _ = jax.jit(tx.update)(grads, state, PARAMS)
    assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
    assert not np.any(updates["w"])


@eager_and_jitted
def test_debug_nans_accepts_a_damaged_scale_which_skips_the_step(run):
    tx = ols.loss_scaled(adam(), RULE)
    good = tx.init(PARAMS)
    damaged = with_scale(good, np.nan)
    with jax.debug_nans(True):
        updates, after = run(tx.update)(scaled(GRADS), damaged, PARAMS)
    assert not np.any(updates["w"])
    assert_same_bits(after.inner_state, good.inner_state)


RULES_THAT_SKIP = [RULE, ols.static_loss_scale(SCALE), ols.headroom_loss_scale(SCALE)]


@pytest.mark.parametrize("rule", RULES_THAT_SKIP)
def test_debug_infs_accepts_a_bad_step_of_finite_gradients_or_of_nan(rule):
    # The infinity that stands for the NaN is ours.
    tx = ols.loss_scaled(adam(), rule)
    state = tx.init(PARAMS)
    with jax.debug_infs(True):
        skipped = [
            tx.update(scaled(GRADS), state, PARAMS, grads_finite=False),
            tx.update(poisoned(scaled(GRADS)), state, PARAMS),
        ]
        assert ols.max_magnitude(poisoned(GRADS)) == jnp.inf
    for updates, after in skipped:
        assert_skipped(PARAMS, state, updates, after)


def test_types_stay_the_same_in_x64():
    with enable_x64(True):
        params = {"f32": jnp.ones(2, jnp.float32), "f64": jnp.ones(2, jnp.float64)}
        tx = ols.loss_scaled(adam(), RULE)
        state = tx.init(params)
        _, after = jax.jit(tx.update)(params, state, params)
        assert types(after) == types(state)
        assert state.loss_scale_state.step_count.dtype == jnp.int32


def test_integers_are_held_fixed_whatever_gradient_jax_gives_them():
    params = {"w": jnp.ones(2), "steps": jnp.arange(3)}
    grads = {"w": jnp.ones(2) * SCALE, "steps": np.zeros(3, jax.dtypes.float0)}
    tx = ols.loss_scaled(optax.identity(), RULE)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["w"].tolist() == [1.0, 1.0]
    assert optax.apply_updates(params, updates)["steps"].tolist() == [0, 1, 2]
    bad = {**grads, "w": grads["w"].at[0].set(jnp.nan)}
    assert not np.any(tx.update(bad, tx.init(params), params)[0]["w"])


@pytest.mark.parametrize("make", [optax.sgd, optax.lamb])
@pytest.mark.parametrize("rule", [STATIC, ols.no_loss_scale()], ids=["scaled", "none"])
def test_an_optimizer_sees_no_integers_under_any_rule(rule, make):
    bare = lenient(make(0.1))
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.arange(2.0)}
    expected, _ = bare.update(grads, bare.init(params), params)
    tx = ols.loss_scaled(bare, rule)
    params["steps"] = jnp.arange(3)
    state = tx.init(params)
    grads = {
        "w": grads["w"] * ols.get_loss_scale(state),
        "steps": np.zeros(3, jax.dtypes.float0),
    }
    assert_same_bits(tx.update(grads, state, params)[0]["w"], expected["w"])
    if make is optax.sgd:  # It needs no parameters.
        assert_same_bits(tx.update(grads, state)[0]["w"], expected["w"])


def test_while_all_is_finite_a_rule_that_never_skips_takes_the_steps_of_one_that_does():
    params = {
        "half": jnp.full(10_000, 3.0, jnp.float16),  # Its squares sum up to 90,000.
        "float8": jnp.ones(2, jnp.float8_e4m3fn),
        "weak": jnp.asarray(0.5),
        "not scaled": jnp.ones(2),
    }
    mask = {name: name != "not scaled" for name in params}
    states, updates = [], []
    for rule in (STATIC, UNCHECKED):
        tx = ols.loss_scaled(lenient(optax.lamb(0.1)), rule, unscale_mask=mask)
        grads = jax.tree.map(lambda p: jnp.full_like(p, 2.0), params)
        after = tx.update(grads, tx.init(params), params)
        updates.append(after[0])
        states.append((tx.init(params), after[1]))
    assert_same_bits(updates[1], updates[0])
    assert_same_bits(states[1], states[0])
    assert types((states[1], updates[1])) == types((states[0], updates[0]))
    assert all(jnp.isfinite(each).all() for each in jax.tree.leaves(updates[1]))


@pytest.mark.parametrize(
    "grads",
    [
        {"w": GRADS["w"]},
        {**GRADS, "extra": jnp.ones(2)},
        [GRADS["w"], GRADS["b"]],
        GRADS["w"],
        {**GRADS, "w": {"inner": GRADS["w"]}},
    ],
    ids=["missing", "extra", "list", "leaf", "deeper"],
)
def test_gradients_of_another_tree_structure_are_refused_at_trace_time(grads):
    tx = ols.loss_scaled(optax.sgd(0.1), RULE)  # SGD itself accepts any tree.
    with pytest.raises(
        ValueError, match=r"^`updates` must have the tree structure of `params`, "
    ) as e:
        jax.eval_shape(tx.update, grads, tx.init(PARAMS), PARAMS)
    is_leaf = not isinstance(grads, dict | list)
    assert is_leaf == (", got a leaf where there is a subtree. (Do" in str(e.value))


def test_gradients_can_be_absent_for_some_parameters():
    tx = ols.loss_scaled(optax.sgd(0.1), RULE)
    for absent in (None, optax.MaskedNode()):
        grads = {"w": GRADS["w"] * SCALE, "b": absent}
        updates, state = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert_same_bits(updates, {"w": -0.1 * GRADS["w"], "b": absent})
        assert state.loss_scale_state.last_finite


def test_lookahead_takes_the_gradients_of_its_fast_parameters():
    inner = lenient(optax.lookahead(optax.sgd(0.05), 2, 0.5))
    tx = ols.loss_scaled(inner, ols.static_loss_scale(SCALE))
    pairs = optax.LookaheadParams(fast=PARAMS, slow=PARAMS)
    expected = inner.update(GRADS, inner.init(pairs), pairs)
    updates, state = tx.update(scaled(GRADS), tx.init(pairs), pairs)
    assert_same_bits((updates, state.inner_state), expected)


def test_the_updates_of_lookahead_are_checked_inside_the_mask():
    tx = ols.loss_scaled(
        lenient(optax.lookahead(optax.sgd(2.0**30), 2, 0.5)),
        RULE,
        unscale_mask={"w": True, "b": False},
        check_updates=True,
    )
    pairs = optax.LookaheadParams(fast=PARAMS, slow=PARAMS)
    grads = {"w": scaled(GRADS["w"]), "b": jnp.asarray([jnp.inf, 1.0])}
    updates, state = tx.update(grads, tx.init(pairs), pairs)
    assert_same_bits(updates.fast["w"], -(2.0**30) * GRADS["w"])
    _, state = tx.update({**grads, "w": jnp.full((2, 2), 1e38)}, state, pairs)
    assert not state.loss_scale_state.last_finite


@pytest.mark.slow
def test_in_an_ensemble_only_the_bad_member_skips():
    tx = ols.loss_scaled(optax.sgd(1.0), RULE)
    params = jax.tree.map(lambda p: jnp.stack([p, p + 1, p - 1]), PARAMS)
    states = jax.vmap(tx.init)(params)
    grads = jax.tree.map(lambda p: p * SCALE, params)
    grads["b"] = grads["b"].at[1, 0].set(jnp.inf)
    updates, states = jax.jit(jax.vmap(tx.update))(grads, states, params)
    assert states.loss_scale_state.last_finite.tolist() == [True, False, True]
    assert states.loss_scale_state.total_notfinite.tolist() == [0, 1, 0]
    assert ols.get_loss_scale(states).tolist() == [SCALE, SCALE / 2, SCALE]
    expected = params["w"] * jnp.asarray([-1.0, 0.0, -1.0])[:, None, None]
    np.testing.assert_array_equal(updates["w"], expected)


@pytest.mark.parametrize("over", [lambda function: function, jax.vmap])
def test_a_second_step_outside_jit_compiles_nothing(over, caplog):
    tx = ols.loss_scaled(adam(), RULE)
    params = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
    state, update = over(tx.init)(params), over(tx.update)
    _, state = update(params, state, params)
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(params["w"])
        assert "Compiling" in caplog.text
        caplog.clear()
        update(params, state, params)
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize(
    "rule", [*RULES_THAT_SKIP, ols.headroom_loss_scale(SCALE, history=4, recent=4)]
)
def test_every_donated_buffer_is_reused(rule):
    # A GPU is slower if results have other addresses than those of the last step.
    tx = ols.loss_scaled(adam(), rule)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, poison):
        grads = jax.tree.map(lambda p: p * poison, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    for poison in (1.0, np.nan, 1.0):
        old = jax.tree.leaves((params, state))
        params, state = step(params, state, poison)
        assert all(leaf.is_deleted() for leaf in old)
    assert state.loss_scale_state.total_notfinite == 1
