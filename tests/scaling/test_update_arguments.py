"""Arguments of `update`: Optax's own names, and extra arguments passed on."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam

PARAMS = {"w": jnp.asarray([1.0, -2.0])}
GRADS = {"w": jnp.asarray([0.5, 0.25])}
BAD_GRADS = {"w": jnp.asarray([jnp.nan, 0.25])}
KERAS_OPTIONS = {
    "clipnorm": 1.0,
    "weight_decay": 0.1,
    "learning_rate": 0.1,
    "use_ema": True,
    "gradient_accumulation_steps": 1,
}
WRAPPERS = {
    "loss_scaled": ols.loss_scaled,
    "unchecked": lambda inner: ols.loss_scaled(
        inner, ols.static_loss_scale(8.0, skip_nonfinite=False)
    ),
    "no_loss_scale": lambda inner: ols.loss_scaled(inner, ols.no_loss_scale()),
    "master_weights": ols.master_weights,
    "masters outside": lambda inner: ols.master_weights(ols.loss_scaled(inner)),
    "loss_scale_optimizer": lambda inner: ols.loss_scale_optimizer(
        inner, **KERAS_OPTIONS
    ),
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Keras's parts use Optax's own, which need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def recorder(seen):
    """An optimizer that records its extra arguments."""

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize("name", WRAPPERS)
def test_update_names_its_arguments_as_optax_does(name):
    ours, optaxs = (
        list(inspect.signature(tx.update).parameters.values())[:3]
        for tx in (WRAPPERS[name](optax.sgd(0.1)), optax.adam(1.0))
    )
    assert [p.name for p in ours] == [p.name for p in optaxs]
    assert [p.default for p in ours] == [p.default for p in optaxs]


@pytest.mark.parametrize("name", WRAPPERS)
def test_update_by_keyword_gives_the_same_bits(name):
    tx = WRAPPERS[name](adam())
    state = tx.init(params=PARAMS)
    by_keyword = tx.update(updates=GRADS, state=state, params=PARAMS)
    assert_same_bits(by_keyword, tx.update(GRADS, state, PARAMS))


@pytest.mark.parametrize("name", WRAPPERS)
def test_extra_arguments_of_any_other_name_reach_the_inner_optimizer(name):
    extra = {"grads": GRADS, "grad": GRADS, "value": jnp.asarray(2.0), "new": 1}
    seen = []
    tx = WRAPPERS[name](recorder(seen))
    tx.update(updates=GRADS, state=tx.init(PARAMS), params=PARAMS, **extra)
    assert_same_bits(seen[-1], extra)


CONSTANTS = {
    "integer": 3,
    "bool": True,
    "number": 1.5,
    "complex number": 1j,
    "number of NumPy": np.float64(2.5),
    "text": "cosine",
    "nothing": None,
    "function": jnp.sum,
    "class": jnp.float16,
    "dtype": np.dtype("float32"),
    "module": nn.Dense(2, dtype=jnp.float16),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_extra_arguments_that_are_no_arrays_are_passed_on_as_they_are(name):
    seen = []
    tx = WRAPPERS[name](recorder(seen))

    @jax.jit
    def step(grads, state):
        return tx.update(grads, state, PARAMS, **CONSTANTS)[0]

    step(GRADS, tx.init(PARAMS))
    for key, constant in CONSTANTS.items():
        assert type(seen[-1][key]) is type(constant)
        assert seen[-1][key] == constant


@pytest.mark.parametrize("is_jitted", [False, True])
def test_an_inner_optimizer_may_branch_on_a_number_among_its_extra_arguments(
    is_jitted,
):
    def update(updates, state, params=None, *, strength, **extra_args):
        return (updates if strength > 1.0 else optax.tree.zeros_like(updates)), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = ols.loss_scaled(inner, ols.static_loss_scale(1.0))

    def step(grads, state):
        return tx.update(grads, state, strength=2.0)[0]

    step = jax.jit(step) if is_jitted else step
    assert_same_bits(step(GRADS, tx.init(PARAMS)), GRADS)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), np.float32("nan")])
def test_a_nonfinite_number_among_extra_arguments_is_zero_on_a_bad_step(value):
    seen = []
    tx = ols.loss_scaled(recorder(seen))
    tx.update(BAD_GRADS, tx.init(PARAMS), PARAMS, value=value)
    assert seen[-1]["value"] == 0.0


def test_arrays_inside_an_extra_argument_are_zero_on_a_bad_step():
    seen = []
    tx = ols.loss_scaled(recorder(seen))
    batch = {"x": jnp.asarray([1.0, jnp.nan]), "y": jnp.arange(2), "name": "train"}
    tx.update(BAD_GRADS, tx.init(PARAMS), PARAMS, batch=batch)
    expected = {"x": jnp.zeros(2), "y": jnp.arange(2), "name": "train"}
    assert seen[-1]["batch"].pop("name") == expected.pop("name")
    assert_same_bits(seen[-1]["batch"], expected)


class ForeignArray:
    dtype = "float32"

    def __array__(self, dtype=None, copy=None):
        return np.asarray([np.nan])


def test_an_array_of_another_library_is_refused_as_a_gradient_and_passed_on_as_extra():
    seen = []
    tx = ols.loss_scaled(recorder(seen))
    state, foreign = tx.init(PARAMS), ForeignArray()
    with pytest.raises(TypeError, match="one of JAX or NumPy, got one of type Foreign"):
        tx.update({"w": foreign}, state, PARAMS)
    tx.update(GRADS, state, PARAMS, target=foreign)
    assert seen[-1]["target"] is foreign


def test_update_says_updates_when_they_do_not_match_the_parameters():
    tx = ols.loss_scaled(optax.sgd(0.1))
    with pytest.raises(ValueError, match="`updates` must have the tree structure of"):
        tx.update(updates=[jnp.ones(2)], state=tx.init(PARAMS), params=PARAMS)
