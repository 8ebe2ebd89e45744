"""The code of tf.keras's page of `LossScaleOptimizer`, line by line.

https://www.tensorflow.org/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer.
The comments are the lines of the page; below each is what to type here. The numbers are
those that the page prints.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Users have JAX's standard promotion, which Optax needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


WRAPPERS = {
    "loss_scaled": lambda opt: ols.loss_scaled(opt, ols.presets.tf_keras()),
    "loss_scale_optimizer": ols.loss_scale_optimizer,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_first_example_of_the_page_prints_0_5_and_the_second_0_25(name):
    # opt = tf.keras.optimizers.SGD(0.25)
    opt = optax.sgd(0.25)
    # opt = tf.keras.mixed_precision.LossScaleOptimizer(opt)
    opt = WRAPPERS[name](opt)
    # var = tf.Variable(1.)
    var = jnp.asarray(1.0)
    opt_state = opt.init(var)
    # loss_fn = lambda: var ** 2
    loss_fn = lambda var: var**2  # noqa: E731
    # opt.minimize(loss_fn, var_list=var)
    loss, grad = ols.scaled_value_and_grad(loss_fn, opt_state)(var)
    updates, opt_state = opt.update(grad, opt_state, var)
    var = optax.apply_updates(var, updates)
    # var.numpy()
    assert var == 0.5
    assert (loss, grad) == (1.0, 2.0 * 2.0**15)

    # with tf.GradientTape() as tape:
    #   loss = loss_fn()
    #   scaled_loss = opt.get_scaled_loss(loss)
    def scaled_loss_fn(var):
        loss = loss_fn(var)
        return ols.scale(loss, opt_state)

    # scaled_grad = tape.gradient(scaled_loss, var)
    scaled_grad = jax.grad(scaled_loss_fn)(var)
    # (grad,) = opt.get_unscaled_gradients([scaled_grad])
    (grad,) = ols.unscale([scaled_grad], opt_state)
    assert (scaled_grad, grad) == (2.0**15, 1.0)
    # opt.apply_gradients([(grad, var)])  # Loss scale is updated here
    updates, opt_state = opt.update(grad, opt_state, var, grads_unscaled=True)
    var = optax.apply_updates(var, updates)
    # var.numpy()
    assert var == 0.25
    assert ols.find_loss_scale_state(opt_state).step_count == 2


def test_apply_gradients_with_a_nonfinite_gradient_skips_and_halves():
    opt = ols.loss_scaled(optax.sgd(0.25), ols.presets.tf_keras())
    var = jnp.asarray(1.0)
    opt_state = opt.init(var)
    (grad,) = ols.unscale([jnp.asarray(jnp.inf)], opt_state)
    updates, opt_state = opt.update(grad, opt_state, var, grads_unscaled=True)
    assert optax.apply_updates(var, updates) == 1.0
    assert ols.get_loss_scale(opt_state) == 2.0**14


def test_get_unscaled_gradients_divides_and_ignores_none():
    opt = ols.loss_scaled(optax.sgd(1.0), ols.presets.tf_keras(initial_scale=4.0))
    params = [jnp.ones(1), jnp.ones(1)]
    opt_state = opt.init(params)
    grads = ols.unscale([jnp.full(1, 8.0), None], opt_state)
    assert grads == [2.0, None]
    updates, _ = opt.update(grads, opt_state, params, grads_unscaled=True)
    assert updates == [-2.0, None]


def test_get_scaled_loss_of_a_callable_is_the_gradient_of_the_callable():
    state = ols.presets.tf_keras(initial_scale=4.0).init()
    loss_fn = lambda var: var**2  # noqa: E731
    assert ols.scale(loss_fn(3.0), state) == 36.0
    assert ols.scaled_value_and_grad(loss_fn, state)(3.0) == (9.0, 24.0)


def make_adam():
    # opt = tf.keras.optimizers.Adam(beta_1=0.8, epsilon=1e-5)
    opt = optax.inject_hyperparams(optax.adam)(1e-3, b1=0.8, eps=1e-5)
    # opt = tf.keras.mixed_precision.LossScaleOptimizer(opt)
    return ols.loss_scaled(opt, ols.presets.tf_keras())


def test_a_hyperparameter_is_read_and_set_in_the_state():
    opt = make_adam()
    opt_state = opt.init(jnp.ones(1))
    # opt.beta_1  # Equivalent to `opt.inner_optimizer.beta_1`
    assert np.float32(0.8) == optax.tree.get(opt_state, "b1")
    # opt.beta_1 = 0.7  # Equivalent to `opt.inner_optimizer.beta_1 = 0.7`
    opt_state = optax.tree.set(opt_state, b1=0.7)
    # opt.beta_1
    assert optax.tree.get(opt_state, "b1") == 0.7
    # opt.inner_optimizer.beta_1
    assert opt_state.inner_state.hyperparams["b1"] == 0.7


def test_every_numeric_setting_is_a_hyperparameter_epsilon_too():
    # On the page `opt.epsilon` raises, and setting it has no effect on training.
    opt = make_adam()
    opt_state = opt.init(jnp.ones(1))
    # opt.inner_optimizer.epsilon
    assert np.float32(1e-5) == optax.tree.get(opt_state, "eps")
    # opt.epsilon = 1e-4
    opt_state = optax.tree.set(opt_state, eps=1e-4)
    assert optax.tree.get(opt_state, "eps") == 1e-4


@pytest.mark.parametrize("name", ["learning_rate", "b1", "eps"])
def test_a_hyperparameter_that_was_set_is_used(name):
    # As if the optimizer had been made with it.
    value = {"learning_rate": 0.5, "b1": 0.7, "eps": 1.0}[name]
    opt, params = make_adam(), jnp.ones(2)
    opt_state = optax.tree.set(opt.init(params), **{name: value})
    settings = {"learning_rate": 1e-3, "b1": 0.8, "eps": 1e-5} | {name: value}
    other = ols.loss_scaled(optax.inject_hyperparams(optax.adam)(**settings))
    other_state = other.init(params)
    for scaled in (3.0, -8.0):
        grads = jnp.asarray([scaled, 1.0]) * 2.0**15
        updates, opt_state = opt.update(grads, opt_state, params)
        expected, other_state = other.update(grads, other_state, params)
        assert_same_bits(updates, expected)


def test_a_setting_that_is_not_injected_is_not_found():
    # `optax.tree.get` returns None then, where tf.keras raises an AttributeError.
    opt_state = ols.loss_scaled(optax.adam(1e-3)).init(jnp.ones(1))
    assert optax.tree.get(opt_state, "b1") is None


def test_the_properties_of_the_page_are_in_the_state_and_in_the_rule():
    rule = ols.presets.tf_keras(initial_scale=8.0, dynamic_growth_steps=2)
    opt = ols.loss_scaled(optax.inject_hyperparams(optax.sgd)(0.25), rule)
    var = jnp.asarray(1.0)
    opt_state = opt.init(var)
    _, opt_state = opt.update(jnp.asarray(8.0), opt_state, var)
    # opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps
    settings = {"dynamic": True, "initial_scale": 8.0, "dynamic_growth_steps": 2}
    assert rule.settings == settings
    # opt.dynamic_counter
    assert ols.find_loss_scale_state(opt_state).rule_state.growth_count == 1
    # opt.loss_scale
    loss_scale = ols.get_loss_scale(opt_state)
    assert (loss_scale, loss_scale.dtype, loss_scale.shape) == (8.0, jnp.float32, ())
    # opt.learning_rate, opt.lr
    assert optax.tree.get(opt_state, "learning_rate") == 0.25
    # opt.inner_optimizer
    assert opt_state.inner_state.hyperparams["learning_rate"] == 0.25


def test_the_counter_returns_to_zero_as_the_page_says():
    rule = ols.presets.tf_keras(initial_scale=8.0, dynamic_growth_steps=3)
    state = rule.init()
    counted = []
    for finite in (True, True, True, True, False):
        state = rule.adjust(state, finite)
        count = int(state.rule_state.growth_count)
        counted.append((count, float(state.loss_scale)))
    assert counted == [(1, 8), (2, 8), (0, 16), (1, 16), (0, 8)]


def test_a_fixed_scale_has_no_counter_and_stays():
    rule = ols.presets.tf_keras(dynamic=False, initial_scale=8.0)
    state = rule.adjust(rule.init(), False)
    # opt.dynamic_counter, opt.dynamic_growth_steps, opt.initial_scale
    assert getattr(state.rule_state, "growth_count", None) is None
    assert rule.settings["dynamic_growth_steps"] is None
    assert rule.settings["initial_scale"] == 8.0
    assert state.loss_scale == 8.0


def test_the_first_scale_and_the_growth_steps_of_the_default_rule_are_numbers():
    # opt.initial_scale, opt.dynamic_growth_steps: 32768 and 2000 in tf.keras.
    rule = ols.presets.tf_keras()
    settings = {
        "dynamic": True,
        "initial_scale": 32768.0,
        "dynamic_growth_steps": 2000,
    }
    assert rule.settings == settings
    shown = "initial_scale=32768.0, dynamic_growth_steps=2000)"
    assert repr(rule) == f"presets.tf_keras(dynamic=True, {shown}"


@pytest.mark.parametrize(
    "options",
    [
        {"dynamic": False},
        {"dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": 5},
        {"initial_scale": 0.0},
        {"initial_scale": -1.0},
        {"dynamic_growth_steps": 0},
    ],
)
def test_an_invalid_argument_raises_a_value_error(options):
    with pytest.raises(ValueError, match="must be"):
        ols.presets.tf_keras(**options)
    with pytest.raises(ValueError, match="must be"):
        ols.loss_scale_optimizer(optax.sgd(0.25), **options)


def test_no_array_of_the_optimizer_changes_when_a_step_is_skipped():
    # "the trainable variables will not change that step"
    opt = make_adam()
    params = jnp.ones(2)
    opt_state = opt.init(params)
    _, opt_state = opt.update(params, opt_state, params)
    updates, skipped = opt.update(params * jnp.nan, opt_state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(skipped.inner_state, opt_state.inner_state)
