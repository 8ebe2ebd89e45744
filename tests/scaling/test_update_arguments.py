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
from helpers.nodes import Foreign
from helpers.steps import recorder

# Keras's parts use Optax's own, which need it.
pytestmark = pytest.mark.usefixtures("standard_promotion")
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


@pytest.mark.parametrize("name", WRAPPERS)
def test_update_names_its_arguments_as_optax_does(name):
    tx = WRAPPERS[name](adam())
    ours, optaxs = (
        list(inspect.signature(each.update).parameters.values())[:3]
        for each in (tx, optax.adam(1.0))
    )
    assert [p.name for p in ours] == [p.name for p in optaxs]
    assert [p.default for p in ours] == [p.default for p in optaxs]
    state = tx.init(params=PARAMS)
    by_keyword = tx.update(updates=GRADS, state=state, params=PARAMS)
    assert_same_bits(by_keyword, tx.update(GRADS, state, PARAMS))


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
    "array of another library": Foreign(),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_extra_arguments_of_any_other_name_are_passed_on_as_they_are(name):
    arrays = {"grads": GRADS, "grad": GRADS, "value": jnp.asarray(2.0)}
    seen = []
    tx = WRAPPERS[name](recorder(seen))

    @jax.jit
    def step(grads, state, extra):
        updates, _ = tx.update(grads, state, PARAMS, **extra, **CONSTANTS)
        return updates, {key: seen[-1][2][key] for key in extra}

    _, passed_on = step(GRADS, tx.init(PARAMS), arrays)
    assert_same_bits(passed_on, arrays)
    for key, constant in CONSTANTS.items():
        assert type(seen[-1][2][key]) is type(constant)
        assert seen[-1][2][key] == constant


def test_arrays_inside_an_extra_argument_are_zero_on_a_bad_step():
    seen = []
    tx = ols.loss_scaled(recorder(seen))
    batch = {"x": jnp.asarray([1.0, jnp.nan]), "y": jnp.arange(2), "name": "train"}
    tx.update(BAD_GRADS, tx.init(PARAMS), PARAMS, batch=batch)
    expected = {"x": jnp.zeros(2), "y": jnp.arange(2), "name": "train"}
    seen = seen[-1][2]["batch"]
    assert seen.pop("name") == expected.pop("name")
    assert_same_bits(seen, expected)
