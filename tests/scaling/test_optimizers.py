"""Every optimizer of `optax` and `optax.contrib`: eager, jit, loops, and a bad step.

So it is with this library, and with its core as `docs/for_maintainers.md` sketches it.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, assert_within_ulp, types
from helpers.inner import lenient, standard_promotion
from helpers.pages import run_section
from helpers.steps import assert_skipped

# Optax warns of optimizers that it will remove; until then they are tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")

SCALE = 2.0**10
PARAMS = {
    "w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3),
    "b": jnp.asarray([0.5, -0.25, 1.5]),
}
TARGET = jax.tree.map(lambda p: 0.5 - 0.3 * p, PARAMS)
LABELS = {"w": "on", "b": "off"}
MASK = {"w": True, "b": False}
PARTS = {"on": optax.adam(0.05), "off": optax.set_to_zero()}
SCHEDULE = optax.linear_schedule(0.1, 0.01, 10)


def loss_fn(params):
    """A bowl: every optimizer takes a sensible step on it."""
    errors = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, TARGET)
    return sum(jax.tree.leaves(errors))


# How to make the optimizers that need more than a learning rate.
MAKE = {
    "adaptive_grad_clip": lambda make: make(0.1),
    "add_noise": lambda make: make(0.1, 0.5, key=jax.random.key(0)),
    "apply_if_finite": lambda make: make(optax.adam(0.05), 3),
    "chain": lambda make: make(optax.clip(0.1), optax.adam(0.05)),
    "clip": lambda make: make(0.1),
    "clip_by_block_rms": lambda make: make(0.1),
    "clip_by_global_norm": lambda make: make(0.1),
    "conditionally_mask": lambda make: make(optax.adam(0.05), lambda n: n % 2 == 0),
    "conditionally_transform": lambda make: make(optax.adam(0.05), lambda n: n < 2),
    "ema": lambda make: make(0.9),
    "flatten": lambda make: make(optax.adam(0.05)),
    "freeze": lambda make: make(MASK),
    "inject_hyperparams": lambda make: make(optax.adam)(SCHEDULE),
    "inject_stateful_hyperparams": lambda make: make(optax.adam)(0.05),
    "masked": lambda make: make(optax.adam(0.05), MASK),
    "mechanize": lambda make: make(optax.sgd(0.05)),
    "multi_transform": lambda make: make(PARTS, LABELS),
    "named_chain": lambda make: make(("clip", optax.clip(0.1)), ("o", optax.adam(0.1))),
    "noisy_sgd": lambda make: make(0.05, key=jax.random.key(0)),
    "partition": lambda make: make(PARTS, LABELS),
    "sam": lambda make: make(optax.sgd(0.05), optax.sgd(0.01)),
    "scale": lambda make: make(-0.1),
    "scale_by_backtracking_linesearch": lambda make: make(5),
    "scale_by_schedule": lambda make: make(SCHEDULE),
    "scale_by_zoom_linesearch": lambda make: make(5),
    "schedule_free": lambda make: make(optax.sgd(0.05), 0.05),
    "selective_transform": lambda make: make(optax.adam(0.05), freeze_mask=MASK),
    "split_real_and_imaginary": lambda make: make(optax.adam(0.05)),
    "stateless": lambda make: make(lambda updates, params: updates),
    "stateless_with_tree_map": lambda make: make(lambda g, p: 0.1 * g),
    "trace": lambda make: make(0.9),
    "with_extra_args_support": lambda make: make(optax.adam(0.05)),
}

# Not of the form (grads, state, params), or not an optimizer; with the reason.
LEFT_OUT = {
    "differentially_private_aggregate": "a gradient per example: tested below in dpsgd",
    "dpsgd": "takes a gradient per example: tested below",
    "lookahead": "its parameters are pairs: tested in test_transform.py",
    "measure_with_ema": "it measures, and emits no update",
    "monitor": "its state changes structure in the first update, bare as well",
    "scale_by_muon": "needs dimension numbers, which `muon` makes",
    "snapshot": "it measures, and emits no update",
}

# Arguments of line searches, Polyak's step and estimates of the Hessian.
LINE_SEARCH = ("value", "grad", "value_fn")
EXTRA_ARGS = {
    "hutchinson_estimator_diag_hessian": ("obj_fn",),
    "lbfgs": LINE_SEARCH,
    "momo": ("value",),
    "momo_adam": ("value",),
    "polyak_sgd": ("value",),
    "reduce_on_plateau": ("value",),
    "scale_by_backtracking_linesearch": LINE_SEARCH,
    "scale_by_polyak": ("value",),
    "scale_by_zoom_linesearch": LINE_SEARCH,
    "sophia": ("obj_fn",),
}

# Two compiled programs may differ in the last bit. Newton-Schulz iterations, and the
# differences of nearly equal losses in line searches, amplify it, and so does a
# parameter that lands near zero.
MAX_ULP = {
    "muon": 128,
    "lbfgs": 256,
    "scale_by_zoom_linesearch": 256,
    "simplified_ademamix": 8,
}

NOT_ANNOTATED = {
    "dog",
    "dowg",
    "hutchinson_estimator_diag_hessian",
    "monitor",
    "scale_by_factored_rms",
}

PUBLIC = {
    name: function
    for module in (optax, optax.contrib)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if not name.startswith("_")
}
FACTORIES = {
    name
    for name, function in PUBLIC.items()
    if "GradientTransformation" in str(inspect.signature(function).return_annotation)
    or name in NOT_ANNOTATED
}
MATRIX = sorted(FACTORIES - LEFT_OUT.keys())
assert len(MATRIX) > 100
INJECTABLE = [
    name
    for name in MATRIX
    if name not in MAKE
    and "learning_rate" in inspect.signature(PUBLIC[name]).parameters
]
assert len(INJECTABLE) > 40


def make(name):
    factory = PUBLIC[name]
    parameters = inspect.signature(factory).parameters
    if name in MAKE:
        return lenient(MAKE[name](factory))
    needs_rate = "learning_rate" in parameters
    return lenient(factory(learning_rate=0.05) if needs_rate else factory())


def extra_args(name, params, grads):
    everything = {
        "value": loss_fn(params),
        "grad": grads,
        "value_fn": loss_fn,
        "obj_fn": loss_fn,
    }
    return {key: everything[key] for key in EXTRA_ARGS.get(name, ())}


def bare_step(name, tx, params, state):
    grads = jax.grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params, **extra_args(name, params, grads))
    return optax.apply_updates(params, updates), state


def scaled_step(name, tx, params, state, poison=1.0):
    """The same step with a loss scale; `poison` may make it a bad one."""
    scaled = ols.scaled_grad(lambda p: loss_fn(p) * poison, state)(params)
    extra = extra_args(name, params, ols.unscale(scaled, state))
    updates, state = tx.update(scaled, state, params, **extra)
    return optax.apply_updates(params, updates), state


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_eager_a_good_step_gives_the_bits_of_the_bare_optimizer_and_a_bad_one_none(
    name,
):
    bare, tx = make(name), ols.loss_scaled(make(name), ols.dynamic_loss_scale(SCALE))
    expected = bare_step(name, bare, PARAMS, bare.init(PARAMS))
    first = tx.init(PARAMS)
    params, good = scaled_step(name, tx, PARAMS, first)
    assert_same_bits((params, good.inner_state), expected)
    assert types(good) == types(first)
    bad_params, bad = scaled_step(name, tx, params, good, jnp.nan)
    assert_same_bits((bad_params, bad.inner_state), (params, good.inner_state))
    assert ols.get_loss_scale(bad) == SCALE / 2


def assert_jitted_steps_equal_the_bare_ones(name, bare):
    tx = ols.loss_scaled(bare, ols.dynamic_loss_scale(SCALE))
    bare_jitted = jax.jit(lambda p, s: bare_step(name, bare, p, s))
    expected = bare_jitted(*bare_jitted(PARAMS, bare.init(PARAMS)))

    step = jax.jit(lambda p, s, x: scaled_step(name, tx, p, s, x))
    params, state = step(PARAMS, tx.init(PARAMS), 1.0)
    bad_params, bad_state = step(params, state, np.nan)
    assert_same_bits((bad_params, bad_state.inner_state), (params, state.inner_state))
    params, after = step(bad_params, bad_state, 1.0)
    two_steps = 2 * MAX_ULP.get(name, 4)
    assert_within_ulp((params, after.inner_state), expected, two_steps)
    assert types(after) == types(tx.init(PARAMS))


@pytest.mark.parametrize("name", MATRIX)
def test_jitted_steps_equal_the_bare_optimizer_that_never_saw_the_bad_step(name):
    assert_jitted_steps_equal_the_bare_ones(name, make(name))


@pytest.mark.parametrize("name", INJECTABLE)
def test_a_schedule_that_inject_hyperparams_keeps_does_not_see_the_bad_step(name):
    others = inspect.signature(PUBLIC[name]).parameters.keys() - {"learning_rate"}
    inject = optax.inject_hyperparams(PUBLIC[name], static_args=others)
    bare = lenient(inject(learning_rate=SCHEDULE))
    assert_jitted_steps_equal_the_bare_ones(name, bare)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", MATRIX)
def test_a_loop_carries_half_precision_parameters_and_a_wide_state(name):
    tx = ols.loss_scaled(make(name), ols.dynamic_loss_scale(SCALE))

    def train(params):
        def body(carry, poison):
            return scaled_step(name, tx, *carry, poison), None

        return jax.lax.scan(body, (params, tx.init(params)), jnp.ones(3))[0]

    half = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    params, state = jax.eval_shape(train, half)
    assert all(leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(params))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state.inner_state)]
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    assert all(jnp.finfo(dtype).bits >= 32 for dtype in floating)


@pytest.fixture(scope="module")
def sketch():
    """The wrapper that a page proposes for `optax.contrib`."""
    with standard_promotion():
        heading = "What `optax.contrib` would need"
        return run_section("docs/for_maintainers.md", heading)["loss_scaled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_the_sketch_for_optax_takes_the_steps_of_the_bare_optimizer(name, sketch):
    bare = make(name)
    tx = lenient(sketch(bare, SCALE))

    def step(params, state, poison=1.0):
        grads = jax.grad(loss_fn)(params)
        scaled = jax.tree.map(lambda g: g * SCALE * poison, grads)
        extra = extra_args(name, params, grads)
        updates, state = tx.update(scaled, state, params, **extra)
        return optax.apply_updates(params, updates), state

    first = tx.init(PARAMS)
    params, good = step(PARAMS, first)
    expected = bare_step(name, bare, PARAMS, bare.init(PARAMS))
    assert_same_bits((params, good.inner_state), expected)
    # Optax's line searches are weakly typed at first.
    own, own_first = (state._replace(inner_state=()) for state in (good, first))
    assert types(own) == types(own_first)
    bad_params, bad = step(params, good, jnp.nan)
    assert_same_bits((bad_params, bad.inner_state), (params, good.inner_state))
    assert bad.loss_scale == SCALE / 2


@pytest.mark.slow
def test_an_optimizer_that_takes_a_gradient_per_example_works():
    tx = lenient(optax.contrib.dpsgd(0.05, 1.0, 0.1, seed=0))
    wrapped = ols.loss_scaled(tx, ols.static_loss_scale(SCALE))
    grads = jax.tree.map(lambda g: jnp.stack([g, -2 * g]), jax.grad(loss_fn)(PARAMS))
    expected = tx.update(grads, tx.init(PARAMS), PARAMS)
    scaled = jax.tree.map(lambda g: g * SCALE, grads)
    updates, state = wrapped.update(scaled, wrapped.init(PARAMS), PARAMS)
    assert_same_bits((updates, state.inner_state), expected)
    scaled["w"] = scaled["w"].at[1, 0, 0].set(jnp.nan)
    assert_skipped(PARAMS, state, *wrapped.update(scaled, state, PARAMS))
