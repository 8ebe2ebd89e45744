"""Optimizers: a good step is that of the bare one, and a bad one changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_lossscale as ols
import sketch_for_optax
from helpers.cases import slow_except
from helpers.compare import assert_same_bits, assert_within_ulp, types
from helpers.inner import lenient

SCALE = 2.0**10
PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3),
    "b": jnp.asarray([0.5, -0.0, 1.5]),
}
TARGET = jax.tree.map(lambda p: 0.5 - 0.3 * p, PARAMS)
SCHEDULE = optax.linear_schedule(0.1, 0.01, 10)


def loss_fn(params):
    """A bowl: every optimizer takes a sensible step on it."""
    errors = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, TARGET)
    return sum(jax.tree.leaves(errors))


PLAIN = {
    name: getattr(module, name)
    for module, names in (
        (optax, "adadelta adafactor adagrad adam adamax adamw adan amsgrad lamb lars "
         "lion nadam novograd optimistic_adam_v2 radam rmsprop rprop sgd sm3 yogi"),
        (optax.contrib, "muon prodigy schedule_free_adamw simplified_ademamix"),
    )
    for name in names.split()
}  # fmt: skip
MAKE = {
    name: lambda make=make: make(learning_rate=0.05) for name, make in PLAIN.items()
} | {
    "accumulated": lambda: optax.MultiSteps(
        optax.adam(0.05), 2
    ).gradient_transformation(),
    "chained": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05)),
    "noisy": lambda: optax.noisy_sgd(0.05, key=jax.random.key(0)),
    "scheduled": lambda: optax.adam(SCHEDULE),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "masked": lambda: optax.masked(optax.adam(0.05), {"w": True, "b": False}),
    "partitioned": lambda: optax.partition(
        {"on": optax.adam(0.05), "off": optax.set_to_zero()}, {"w": "on", "b": "off"}
    ),
    "averaged": lambda: optax.chain(optax.sgd(0.05), optax.ema(0.9)),
    "polyak": lambda: optax.polyak_sgd(),
    "plateau": lambda: optax.chain(
        optax.adam(0.05), optax.contrib.reduce_on_plateau(patience=1)
    ),
}
# Of those that are much alike, the others run in the slow command.
FAST = {
    "accumulated", "adafactor", "adamw", "injected", "lion", "muon", "noisy",
    "partitioned", "plateau", "prodigy", "rprop",
}  # fmt: skip
# Newton-Schulz iterations amplify the last bit.
MAX_ULP = {"muon": 128, "simplified_ademamix": 8}


def extra_args(name, params):
    return {"value": loss_fn(params)} if name in ("polyak", "plateau") else {}


def optimizer(name):
    return lenient(MAKE[name]())


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", slow_except(FAST, MAKE))
def test_steps_equal_the_bare_optimizer_that_never_saw_the_bad_ones(name):
    bare = optimizer(name)
    tx = ols.loss_scaled(bare, ols.dynamic_loss_scale(SCALE))

    @jax.jit
    def bare_step(params, state):
        grads = jax.grad(loss_fn)(params)
        extra = extra_args(name, params)
        updates, state = bare.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step(params, state, poison):
        scaled = ols.scaled_grad(lambda p: loss_fn(p) * poison, state)(params)
        extra = extra_args(name, params)
        updates, state = tx.update(scaled, state, params, **extra)
        return optax.apply_updates(params, updates), state

    first = tx.init(PARAMS)
    params, skipped = step(PARAMS, first, np.nan)
    assert_same_bits((params, skipped.inner_state), (PARAMS, first.inner_state))
    params, state = step(PARAMS, skipped, 1.0)
    bad_params, bad_state = step(params, state, np.inf)
    assert_same_bits((bad_params, bad_state.inner_state), (params, state.inner_state))
    assert ols.get_loss_scale(bad_state) == SCALE / 4
    params, after = step(bad_params, bad_state, 1.0)
    expected = bare_step(*bare_step(PARAMS, bare.init(PARAMS)))
    ulp = 2 * MAX_ULP.get(name, 4)
    assert_within_ulp((params, after.inner_state), expected, ulp)
    assert types(after) == types(first)
    assert step._cache_size() == 1


def test_a_line_search_whose_state_is_weakly_typed_compiles_once():
    search = optax.scale_by_backtracking_linesearch(3)
    inner = lenient(optax.lbfgs(memory_size=2, linesearch=search))
    tx = ols.loss_scaled(inner, ols.dynamic_loss_scale(SCALE))

    @jax.jit
    def step(params, state):
        loss, grads = ols.scaled_value_and_grad(loss_fn, state)(params)
        # The line search needs true gradients.
        extra = {"value": loss, "grad": ols.unscale(grads, state), "value_fn": loss_fn}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, first = PARAMS, tx.init(PARAMS)
    assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(first))
    state = first
    for _ in range(2):
        params, state = step(params, state)
    assert step._cache_size() == 1
    assert types(state) == types(first)
    assert loss_fn(params) < loss_fn(PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "chained", "plateau"])
def test_the_sketch_for_optax_takes_the_steps_of_the_bare_optimizer(name):
    bare, grads = optimizer(name), jax.grad(loss_fn)(PARAMS)
    tx, extra = (
        lenient(sketch_for_optax.loss_scaled(bare, SCALE)),
        extra_args(name, PARAMS),
    )
    first = tx.init(PARAMS)
    scaled = jax.tree.map(lambda g: g * SCALE, grads)
    updates, good = tx.update(scaled, first, PARAMS, **extra)
    expected = bare.update(grads, bare.init(PARAMS), PARAMS, **extra)
    assert_same_bits((updates, good.inner_state), expected)
    assert types(good) == types(first)
    bad = {**scaled, "b": scaled["b"] * jnp.nan}
    updates, skipped = tx.update(bad, good, PARAMS, **extra)
    assert_same_bits(optax.apply_updates(PARAMS, updates), PARAMS)
    assert_same_bits(skipped.inner_state, good.inner_state)
    assert skipped.loss_scale == SCALE / 2


def test_outside_jit_a_good_step_has_the_bits_of_the_bare_optimizer():
    bare, params = optimizer("adam"), PARAMS
    tx = ols.loss_scaled(bare, ols.dynamic_loss_scale(SCALE))
    grads, state = jax.grad(loss_fn)(params), tx.init(params)
    scaled = ols.scale(grads, state)
    updates, after = tx.update(scaled, state, params)
    assert_same_bits((updates, after.inner_state), bare.update(grads, state[1], params))


@pytest.mark.filterwarnings("ignore:.*master_weights")
def test_half_precision_parameters_have_a_float32_state_over_a_scan():
    # Of Adam's zero gradient by an `eps` that float16 rounds to zero: optax #1754.
    half = {"w": PARAMS["w"].astype("float16"), "b": PARAMS["b"].astype("bfloat16")}
    tx = ols.loss_scaled(optimizer("adam"), ols.dynamic_loss_scale(SCALE))

    def body(carry, size):
        params, state = carry
        grads = jax.tree.map(lambda p: p * size.astype(p.dtype), params)
        updates, state = tx.update(grads, state, params)
        with jax.numpy_dtype_promotion("standard"):
            return (optax.apply_updates(params, updates), state), None

    first = tx.init(half)
    sizes = jnp.asarray([0.0, 1.0, jnp.nan, 2.0])
    (params, state), _ = jax.lax.scan(body, (half, first), sizes)
    assert types(params) == types(half)
    moments = jax.tree.leaves((state.inner_state[0].mu, state.inner_state[0].nu))
    assert all(leaf.dtype == jnp.float32 for leaf in moments)
    assert all(jnp.isfinite(leaf).all() for leaf in (*moments, *params.values()))
    assert state.loss_scale_state.total_notfinite == 1
