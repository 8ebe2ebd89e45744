"""What a newcomer passes wrongly in the first hour is an error that says what to do."""

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.nodes import Foreign

PARAMS = {"w": jnp.ones((3, 1))}
TX = ols.loss_scaled(optax.sgd(1e-3))
STATE = TX.init(PARAMS)
SGD = optax.sgd(0.1)
LOSS = jnp.float32(1.0)
HEADROOM = ols.loss_scaled(SGD, ols.headroom_loss_scale())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        # What is wrapped.
        (lambda: ols.loss_scaled(optax.adam), TypeError, "`inner` must be"),
        (lambda: ols.loss_scaled(TX).init(PARAMS), ValueError, "unscaled twice"),
        (
            lambda: ols.loss_scaled(ols.dynamic_loss_scale(), optax.adam(1e-2)),
            TypeError,
            "swapped",
        ),
        (
            lambda: ols.loss_scaled(SGD, ols.dynamic_loss_scale),
            TypeError,
            r"mean `dynamic_loss_scale\(\)`",
        ),
        (
            lambda: ols.loss_scaled(SGD, ols.presets.torch),
            TypeError,
            r"mean `presets.torch\(\)`",
        ),
        (
            lambda: ols.loss_scaled(SGD, 2.0**10),
            TypeError,
            r"mean `static_loss_scale\(...\)`",
        ),
        (
            lambda: ols.loss_scaled(SGD, check_updates=1),
            TypeError,
            "`check_updates` must be True or False",
        ),
        # What `update` is given.
        (
            lambda: TX.update((LOSS, PARAMS), STATE, PARAMS),
            (TypeError, ValueError),
            "pass the gradients alone",
        ),
        (
            lambda: TX.update(PARAMS, SGD.init(PARAMS), PARAMS),
            ValueError,
            r"saved without loss scaling: `adopt_inner_state",
        ),
        (
            lambda: TX.update(PARAMS, (STATE, 1), PARAMS),
            ValueError,
            r"Did you mean `state\[0\]`",
        ),
        (
            lambda: TX.update(PARAMS, STATE, PARAMS, accept=jnp.float32(1.0)),
            TypeError,
            "`accept` must be a bool.*`loss < threshold`",
        ),
        (
            lambda: TX.update(PARAMS, STATE, PARAMS, grads_finite=1.0),
            TypeError,
            r"`grads_finite` must be a bool.*isfinite\(loss\)",
        ),
        (
            lambda: TX.update(PARAMS, STATE, PARAMS, grads_unscaled=1),
            TypeError,
            "`grads_unscaled` must be True or False",
        ),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (None, "dynamic_loss_scale or a preset"),
        (ols.static_loss_scale(8.0), "static_loss_scale"),
        (ols.no_loss_scale(), "no_loss_scale"),
        (ols.presets.fairseq(), "presets.fairseq"),
    ],
)
def test_the_error_for_a_state_of_another_rule_names_both_rules(rule, name):
    state = ols.loss_scaled(SGD, rule).init(PARAMS)
    message = rf"of the rule headroom_loss_scale\(.*got that of {name}\. \(.*`adopt_inn"
    with pytest.raises(ValueError, match=message):
        HEADROOM.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("grad_finite", "grads_finite"),
        ("acept", "accept"),
        ("grads_unscale", "grads_unscaled"),
    ],
)
@pytest.mark.parametrize("inner", [SGD, optax.chain(optax.ema(0.9), SGD)])
def test_a_misspelt_argument_of_update_is_refused(inner, misspelt, meant):
    # Optax passes extra arguments on silently.
    tx = ols.loss_scaled(inner)
    with pytest.raises(TypeError, match=meant):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, **{misspelt: jnp.asarray(True)})


RULE = ols.dynamic_loss_scale()


def test_gradients_of_another_library_are_refused():
    grads = {"w": Foreign(), "b": jnp.ones(2)}
    with pytest.raises(TypeError, match="one of JAX or NumPy, got one of type Foreign"):
        ols.loss_scaled(SGD).update(grads, ols.loss_scaled(SGD).init(grads["b"]))


def test_float8_parameters_are_refused():
    with pytest.raises(TypeError, match="at least 16 bits, got float8"):
        ols.loss_scaled(SGD).init({"w": jnp.ones(2, jnp.float8_e4m3fn)})


BIG = jnp.ones((40, 50))
MODEL = nnx.Linear(40, 50, rngs=nnx.Rngs(0))
WHOLE = ols.loss_scaled(SGD).init(BIG)


PRINTING = {
    "inner, a module": lambda: ols.loss_scaled(MODEL),
    "rule, a module": lambda: ols.loss_scaled(SGD, MODEL),
    "rule, an array": lambda: ols.loss_scaled(SGD, BIG),
    "accept": lambda: ols.loss_scaled(SGD).update(BIG, WHOLE, BIG, accept=BIG),
    "state, a module": lambda: ols.loss_scaled(SGD).update(BIG, MODEL, BIG),
    "state of another rule": lambda: HEADROOM.update(BIG, WHOLE, BIG),
    "state of a gradient": lambda: ols.scaled_grad(jnp.sum, {"a": BIG, "b": MODEL}),
    "get_loss_scale": lambda: ols.get_loss_scale(MODEL),
    "set_loss_scale": lambda: ols.set_loss_scale(WHOLE, BIG),
    "grads_finite of adjust": lambda: RULE.adjust(RULE.init(), BIG),
    "adopt_inner_state": lambda: ols.adopt_inner_state(WHOLE),
    "state of masters": lambda: ols.master_weights(SGD).update(BIG, WHOLE, BIG),
}


@pytest.mark.parametrize("name", PRINTING)
def test_no_error_prints_a_whole_module_or_array(name):
    with pytest.raises((TypeError, ValueError)) as caught:
        PRINTING[name]()
    message = str(caught.value)
    assert len(message) < 500
    for part in ("Array(", "array(", "[[", "Linear(", "1. 1."):
        assert part not in message
