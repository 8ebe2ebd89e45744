"""The examples on the pages of other systems, and the recipes for them, as tests.

tf.keras's page of `LossScaleOptimizer`, and recipes. PyTorch's page is in
`test_pytorch_page.py`. The pages in docs/migration show the same to read, and train the
LeNet of MindSpore's guide.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.usefixtures("standard_promotion")


# https://www.tensorflow.org/api_docs/python/tf/keras/mixed_precision/LossScaleOptimizer.
# The comments are the lines of the page; below each is what to type here. The numbers
# are those that the page prints.

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


@pytest.mark.slow
def test_each_loss_can_have_a_scale_of_its_own():
    # apex: num_losses, loss_id. One optimizer skips when any loss overflowed; each
    # scale backs off only for its own loss.
    rule = ols.presets.apex(2.0**15, scale_window=2)
    states = [rule.init(), rule.init()]
    tx = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2**31 - 1)
    params = jnp.ones(2)
    opt_state = tx.init(params)

    loss_fns = [
        lambda params, factor: jnp.sum(params**2),
        lambda params, factor: factor * jnp.sum(params),
    ]
    for factor, moves in ((1e-3, True), (jnp.inf, False), (1e-3, True)):
        grads = [
            ols.unscale(ols.scaled_grad(loss_fn, state)(params, factor), state)
            for loss_fn, state in zip(loss_fns, states, strict=True)
        ]
        total = optax.tree.add(*grads)
        updates, opt_state = tx.update(total, opt_state, params)
        states = [
            rule.adjust(state, ols.all_finite(grad))
            for state, grad in zip(states, grads, strict=True)
        ]
        moved = optax.apply_updates(params, updates)
        np.testing.assert_allclose(moved, params - total if moves else params)
        params = moved
    assert [float(state.loss_scale) for state in states] == [2.0**16, 2.0**14]


def penalty_loss(params, state, loss_fn):
    """The loss plus the norm of its gradient, which is computed with a loss scale."""
    scaled = jax.grad(lambda p: ols.scale(loss_fn(p), state))(params)
    grads = ols.unscale(scaled, state)
    return loss_fn(params) + optax.tree.norm(grads)


def test_a_gradient_penalty_is_exact():
    # torch's amp_examples: unscale out of place, in the graph, then scale the sum.
    def loss_fn(params):
        return 0.5 * jnp.sum(jnp.asarray([9.0, 16.0]) * params**2)

    state = ols.presets.torch().init()
    params = jnp.asarray([1.0 / 3.0, 0.25])
    loss, grads = ols.scaled_value_and_grad(penalty_loss, state)(params, state, loss_fn)
    # grad = H p = (3, 4), its norm 5; the penalty's gradient is H (3, 4) / 5.
    np.testing.assert_allclose(loss, 1.0 + 5.0, rtol=1e-6)
    expected = np.asarray([3.0 + 27.0 / 5.0, 4.0 + 64.0 / 5.0])
    np.testing.assert_allclose(ols.unscale(grads, state), expected, rtol=1e-6)


def test_a_gradient_penalty_survives_float16():
    # tensorflow #48662, apex #654: there the penalty collapses.
    def loss_fn(params):
        weight = params.astype(jnp.float16) * jnp.float16(2.0**-14)
        return jnp.sum(weight.astype(jnp.float32) ** 2)

    params = jnp.asarray([1.0, 2.0])
    exact = jax.grad(lambda p: jnp.sum(p**2) * 2.0**-28)(params)
    unscaled, scaled = (
        rule.init() for rule in (ols.no_loss_scale(), ols.dynamic_loss_scale())
    )
    grads = ols.scaled_grad(penalty_loss, scaled)(params, scaled, loss_fn)
    norm = jnp.linalg.norm(exact)
    expected = exact + 2.0**-27 * exact / norm
    np.testing.assert_allclose(ols.unscale(grads, scaled), expected, rtol=1e-3)
    lost = ols.scaled_grad(penalty_loss, unscaled)(params, unscaled, loss_fn)
    assert not np.any(lost > 0.0)
