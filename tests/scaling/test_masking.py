"""A bad step changes nothing, however the inner update is masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers import strategies
from helpers.compare import assert_same_bits, assert_within_ulp
from helpers.inner import standard_promotion
from optax_lossscale._scaling.early_masks import run_masked
from optax_lossscale._scaling.masking import (
    cast_like,
    mask_inputs,
    mask_results,
    mask_state,
    mask_updates,
)

GOOD, BAD = jnp.asarray(True), jnp.asarray(False)
LEAVES = {
    "f32": jnp.asarray([1.5, -0.0, jnp.nan]),
    "f16": jnp.asarray([1.5, jnp.inf], jnp.float16),
    "complex": jnp.asarray([1 + 2j]),
    "int": jnp.arange(3),
    "bool": jnp.asarray([True, False]),
    "float0": np.zeros(2, jax.dtypes.float0),
    "empty": jnp.zeros((0, 2)),
    "none": None,
    "masked": optax.MaskedNode(),
}
KEY = {"key": jax.random.key(0)}


@pytest.mark.slow
def test_a_good_step_changes_no_bit_and_a_bad_one_keeps_those_of_the_old_state():
    other = jax.tree.map(lambda leaf: leaf[::-1], LEAVES)
    assert_same_bits(mask_inputs(GOOD, LEAVES), LEAVES)
    assert_same_bits(mask_updates(GOOD, LEAVES), LEAVES)
    assert_same_bits(mask_state(GOOD, LEAVES, other), LEAVES)
    assert_same_bits(mask_state(BAD, other, LEAVES), LEAVES)
    assert_same_bits(mask_state(BAD, {"key": jax.random.key(1)}, KEY), KEY)
    assert mask_state(BAD, 2, 1) == 1
    seen = mask_inputs(BAD, LEAVES)
    assert not any(np.any(seen[name]) for name in ("f32", "f16", "complex"))
    assert seen["int"] is LEAVES["int"]


@pytest.mark.several_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_bad_step_keeps_a_sharded_state_that_the_optimizer_resets(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    old = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
    masked = jax.jit(lambda old: mask_state(BAD, jnp.zeros(8), old))(old)
    assert_same_bits(masked, old)


@pytest.mark.several_devices
@pytest.mark.parametrize("other", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("finite", [GOOD, BAD])
def test_on_an_explicit_mesh_the_masked_state_is_sharded_as_the_new_one(finite, other):
    types = AxisType.Explicit, other
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    state = ols.dynamic_loss_scale().init()._replace(last_finite=finite)
    with jax.set_mesh(mesh):
        new = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
        for spec in (P(None), P("model")):
            old = jax.device_put(jnp.zeros(8), NamedSharding(mesh, spec))
            for function, given in ((mask_state, finite), (ols.where_applied, state)):
                masked = jax.jit(function)(given, new, old)
                assert masked.sharding == new.sharding
                assert_same_bits(masked, new if finite else old)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.complex64])
def test_the_update_of_a_bad_step_keeps_positive_and_negative_zeros(dtype):
    params = jnp.asarray([0.0, -0.0, 1.0], dtype)
    if dtype == jnp.complex64:
        params = jax.lax.complex(params.real, -params.real)
    updates = mask_updates(BAD, jnp.full_like(params, jnp.nan))
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(jax.jit(optax.apply_updates)(params, updates), params)


def test_the_update_of_a_bad_step_is_zero_for_integers_too():
    updates = [jnp.arange(3), jnp.asarray([True, False]), jnp.arange(2, dtype="uint8")]
    expected = [jnp.zeros_like(update) for update in updates]
    assert_same_bits(mask_updates(BAD, updates), expected)


@pytest.mark.parametrize("old", [3, jnp.asarray(3), np.asarray(3)])
def test_a_count_that_becomes_floating_keeps_the_value_it_had(old):
    new = jnp.float16(0.5)
    assert_same_bits(mask_state(BAD, new, old), jnp.float16(3))
    assert_same_bits(mask_state(GOOD, new, old), new)
    assert cast_like(new, old) is new


def test_what_an_update_adds_to_the_state_keeps_its_dtype():
    new = {"old": jnp.ones(2), "bool": jnp.asarray(True), "int": jnp.asarray(3)}
    cast = cast_like(new, {"old": jnp.zeros(2)})
    assert_same_bits(cast, new)
    nothing = jax.tree.map(jnp.zeros_like, new)
    assert_same_bits(mask_state(BAD, new, {"old": jnp.zeros(2)}), nothing)


@pytest.mark.parametrize("old", [{"m": jnp.ones(2)}, {"m": 1.0, "old": 2.0}])
def test_a_state_that_loses_an_array_is_refused_by_its_path(old):
    new = {"n": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"held before, got one without \['m'\]"):
        mask_state(GOOD, new, old)


def test_cast_like_leaves_what_had_no_dtype():
    for old in (1, None, "text"):
        assert cast_like([jnp.int8(3)], [old])[0].dtype == jnp.int8


def test_cast_like_restores_dtypes_and_leaves_the_rest():
    count = jnp.zeros((), jnp.int32)
    age = jnp.ones(2, jnp.int8)
    old = {"f16": jnp.ones(2, jnp.float16), "count": count, "number": 1, **KEY}
    new = {**old, "f16": jnp.ones(2, jnp.float32), "count": 3, "number": 2}
    old["age"], new["age"] = age, age.astype(jnp.int32)
    cast = cast_like(new, old)
    expected = {**old, "count": jnp.int32(3), "number": 2}
    assert_same_bits(cast, expected)
    assert cast["key"] is old["key"]


OLD = {
    "moment": jnp.asarray([1.0, -2.0]),
    "twin": jnp.asarray([5.0, 6.0]),
    "grads": jnp.asarray([7.0, 8.0]),
    "constant": jnp.asarray([9.0, 9.0]),
    "same": jnp.asarray([3.0, 4.0]),
    "half": jnp.asarray([1.0, 2.0], jnp.float16),
    "ints": jnp.arange(2),
    "keys": jax.random.split(jax.random.key(0), 2),
    "count": jnp.asarray(3),
    "none": None,
}
GRADS = jnp.asarray([0.5, 0.25])


def update(grads, state):
    """An update that reads its new state, which has leaves of every kind."""
    moment = jax.jit(lambda m: m + grads)(state["moment"])
    moment = jax.lax.fori_loop(0, 2, lambda _, m: m * 2, moment)
    moment, _ = jax.lax.scan(lambda m, _: (m + 1, None), moment, length=2)
    moment = moment + 1
    count = state["count"] + 1
    new = {
        "moment": moment,
        "twin": moment,  # One value in two places.
        "grads": grads,  # An input of the update.
        "constant": jnp.zeros(2),  # Depends on no input.
        "same": state["same"],
        "half": state["half"] * 2,
        "ints": state["ints"] + 1,
        "keys": jax.vmap(lambda key: jax.random.split(key)[0])(state["keys"]),
        "count": count,
        "none": None,
    }
    return {"w": moment / count.astype(jnp.float32), "b": None}, new


def masked(finite, grads, state, update=update):
    return run_masked(finite, lambda: update(grads, state), state)


WAYS = {
    "jit": jax.jit(masked),
    "vmap in jit": jax.jit(
        lambda finite, grads, state: jax.tree.map(
            lambda leaf: leaf[1],
            jax.vmap(masked, in_axes=(0, None, None))(
                jnp.stack([~finite, finite]), grads, state
            ),
        )
    ),
    "scan": lambda finite, grads, state: jax.lax.scan(
        lambda state, finite: masked(finite, grads, state)[::-1], state, finite[None]
    )[::-1],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_good_step_that_runs_masked_is_the_plain_one_and_a_bad_one_changes_nothing(
    way,
):
    updates, state = WAYS[way](BAD, GRADS, OLD)
    assert_same_bits(state, OLD)
    assert_same_bits(updates["w"].reshape(2), -jnp.zeros(2))
    updates, state = WAYS[way](GOOD, GRADS, OLD)
    expected_updates, expected = jax.jit(update)(GRADS, OLD)
    assert_same_bits(state, expected)
    assert_same_bits(updates["w"].reshape(2), expected_updates["w"])


@pytest.mark.slow
@given(strategies.optimizers, strategies.similar_trees(2))
def test_an_update_masked_early_equals_one_that_is_masked_afterwards(inner, trees):
    with strategies.x64_for(trees), standard_promotion():
        params, grads = jax.tree.map(jnp.asarray, trees)
        old = jax.tree.map(jnp.ones_like, inner.init(params))

        def run(grads, old):
            updates, new = inner.update(grads, old, params)
            return updates, cast_like(new, old)

        # Else XLA rounds float16 within a fusion or not, as the fusion is.
        options = {"xla_allow_excess_precision": False}

        @functools.partial(jax.jit, compiler_options=options)
        def early(is_applied, grads, old):
            return run_masked(is_applied, lambda: run(grads, old), old)

        @functools.partial(jax.jit, compiler_options=options)
        def plain(is_applied, grads, old):
            return mask_results(is_applied, *run(grads, old), old)

        new = plain(GOOD, grads, old)
        assert_within_ulp(early(GOOD, grads, old), new)
        assert_same_bits(early(BAD, grads, old), plain(BAD, grads, old))
        for is_applied in (GOOD, BAD):  # Outside `jit`.
            expected = mask_results(is_applied, *new, old)
            assert_same_bits(run_masked(is_applied, lambda: new, old), expected)


@pytest.mark.parametrize("applied", [GOOD, BAD])
def test_if_jax_writes_down_a_call_in_another_way_results_are_masked_late(
    applied, monkeypatch
):
    make_jaxpr, old = jax.make_jaxpr, jnp.ones(3)

    def without_calls(fun, return_shape):
        closed, shapes = make_jaxpr(fun, return_shape=return_shape)()
        return lambda: (closed.replace(jaxpr=closed.jaxpr.replace(eqns=[])), shapes)

    @jax.jit
    def step(is_applied):
        return run_masked(is_applied, lambda: (old * 2, old * 3), old)

    monkeypatch.setattr(jax, "make_jaxpr", without_calls)
    updates, new = step(applied)
    assert updates.tolist() == ([2.0] * 3 if applied else [-0.0] * 3)
    assert new.tolist() == ([3.0] * 3 if applied else [1.0] * 3)


@pytest.mark.parametrize("way", [jax.vmap, jax.lax.map, None])
def test_an_update_is_traced_once(way):
    # Tracing it takes most of the time that it takes to trace a step.
    calls = []

    def counted(grads, state):
        calls.append(None)
        return update(grads, state)

    def run(finite):
        return masked(finite, GRADS, OLD, counted)

    if way is None:
        jax.jit(run).trace(GOOD)
    elif way is jax.vmap:
        jax.jit(jax.vmap(run)).trace(jnp.asarray([True, False]))
    else:
        jax.jit(lambda finite: way(run, finite)).trace(jnp.asarray([True, False]))
    assert len(calls) == 1


def test_an_update_that_reads_arrays_from_outside_is_masked():
    rate, state = jnp.asarray(0.5), OLD["moment"]

    def run(grads):
        new = state + grads
        return run_masked(BAD, lambda: (rate * new, (new, jnp.asarray(1))), (state, 0))

    updates, (moment, count) = jax.jit(run)(GRADS)
    assert_same_bits(updates, -jnp.zeros(2))
    assert_same_bits(moment, OLD["moment"])
    assert count == 0


def test_differentiating_a_bad_first_step_of_an_ensemble_gives_no_nan():
    # Counts in an array look like moments; the gradient of 0 / 0 would be NaN.
    inner = optax.adam(0.1)

    def loss(params):
        state = jax.vmap(inner.init)(params)
        state = optax.tree.set(state, mu=params)
        for finite in (BAD, GOOD):
            updates, state = masked(
                finite, params, state, lambda g, s: jax.vmap(inner.update)(g, s)
            )
        return updates.sum()

    with standard_promotion():
        slope = jax.jit(jax.grad(loss))(jnp.ones((3, 4)))
    assert jnp.isfinite(slope).all()


@pytest.mark.parametrize("ordered", [True, False])
def test_an_update_that_prints_runs_exactly_once(ordered, capfd):
    def printing(grads, state):
        updates, new = update(grads, state)
        jax.debug.print("moment {}", new["moment"][0], ordered=ordered)
        return updates, new

    run = jax.jit(lambda *args: masked(*args, printing))
    assert_same_bits(run(BAD, GRADS, OLD)[1], OLD)
    jax.effects_barrier()
    computed = 4 * (OLD["moment"] + GRADS)[0] + 3
    assert capfd.readouterr().out == f"moment {computed}\n"


@pytest.mark.slow
def test_an_update_that_is_staged_while_jit_is_disabled_is_masked_too():
    with jax.disable_jit():
        program = jax.make_jaxpr(masked)(BAD, GRADS, OLD)
    flat = jax.jit(jax.extend.core.jaxpr_as_fun(program))(
        *jax.tree.leaves((BAD, GRADS, OLD))
    )
    assert_same_bits(list(flat), jax.tree.leaves(masked(BAD, GRADS, OLD)))


def test_an_update_keeps_the_order_of_what_it_prints(capfd):
    def printing(grads, state):
        jax.debug.print("moment {}", state["moment"][0], ordered=True)
        jax.debug.print("constant", ordered=True)
        return update(grads, state)

    jax.jit(lambda *args: masked(*args, printing))(GOOD, GRADS, OLD)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == ["moment 1.0", "constant"]


def test_a_choice_of_the_optimizer_is_not_taken_for_a_mask():
    """What it reads besides is the array before the choice."""

    def choosing(grads, state):
        moment = state + grads
        return {"a": jnp.where(state > 2, moment, 0.0), "b": moment * 2}, moment

    run = jax.jit(lambda *args: masked(*args, choosing))
    state = jnp.asarray([1.0, 3.0])
    updates, _ = run(GOOD, GRADS, state)
    assert_same_bits(updates, choosing(GRADS, state)[0])


def test_a_state_that_becomes_floating_is_masked_where_its_old_value_is_known():
    def averaging(grads, state):
        new = state.astype(grads.dtype) + grads
        return new * 2, new

    run = jax.jit(lambda *args: masked(*args, averaging))
    state = jnp.arange(2)
    assert_same_bits(run(GOOD, GRADS, state), averaging(GRADS, state))
    updates, kept = run(BAD, GRADS, state)
    assert_same_bits((updates, kept), (-jnp.zeros(2), jnp.asarray([0.0, 1.0])))


@pytest.mark.parametrize("constant", [0.5, jnp.float32(0.5), np.float32(0.5)])
def test_a_number_may_be_the_update(constant):
    def run(finite, state):
        return run_masked(finite, lambda: (jnp.asarray(constant), state + 1), state)

    state = jnp.float32(1.0)
    assert_same_bits(jax.jit(run)(GOOD, state), (jnp.float32(0.5), jnp.float32(2.0)))
    assert_same_bits(jax.jit(run)(BAD, state), (jnp.float32(-0.0), state))


@pytest.mark.parametrize(
    "count", [jnp.int32(0), jnp.zeros(2, jnp.int32), jnp.zeros(1), jnp.zeros(())]
)
def test_the_bias_correction_of_a_bad_first_step_divides_nothing_by_zero(count):
    def corrected(grads, state):
        moment, count = state
        moment = 0.9 * moment + 0.1 * grads
        count = count + 1
        decay = 0.9 ** count.astype(jnp.float32)
        return moment / (1 - decay), (moment, count)

    def step(finite, grads, state):
        return run_masked(finite, lambda: corrected(grads, state), state)

    checked = checkify.checkify(jax.jit(step), checkify.float_checks)
    error, _ = checked(BAD, GRADS, (jnp.zeros(2), count))
    assert error.get() is None


def test_a_program_that_is_staged_without_jit_is_not_taken_for_the_update():
    def wrapped(grads, state):
        moment = jax.checkpoint(jnp.add)(state, grads)
        return moment * 2, moment

    state = jnp.ones(2)
    with jax.disable_jit():
        program = jax.make_jaxpr(lambda *args: masked(*args, wrapped))(
            GOOD, GRADS, state
        )
    assert_same_bits(
        tuple(jax.extend.core.jaxpr_as_fun(program)(GOOD, GRADS, state)),
        wrapped(GRADS, state),
    )


def test_an_error_of_the_update_is_raised_unchanged():
    def broken(grads, state):
        raise KeyError("no such moment")

    with pytest.raises(KeyError, match="no such moment"):
        jax.jit(lambda *args: masked(*args, broken))(GOOD, GRADS, OLD)


def test_a_profile_shows_the_names_of_the_update():
    def named(grads, state):
        with jax.named_scope("first_moment"):
            return grads, state * 2 + grads

    run = jax.jit(lambda *args: masked(*args, named))
    lowered = run.lower(GOOD, GRADS, OLD["moment"])
    assert "first_moment" in lowered.as_text(debug_info=True)


def test_finite_numbers_stay_numbers_and_others_are_masked():
    numbers = {"a": 1.5, "b": 2 - 1j, "c": np.float64(3), "d": 4, "e": True}
    assert mask_inputs(BAD, numbers) == numbers
    assert all(mask_inputs(GOOD, numbers)[k] is numbers[k] for k in numbers)
    others = [float("inf"), float("nan"), complex(0, float("nan")), np.float32(1)]
    assert mask_inputs(BAD, others) == [0.0, 0.0, 0.0, 0.0]
