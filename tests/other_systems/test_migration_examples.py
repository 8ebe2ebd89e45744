"""The examples on the pages of other systems, and the recipes for them, as tests.

Keras 3 and R's keras3, tf.keras, PyTorch's GradScaler and MindSpore's guide. The
notebook 06_coming_from shows the same to read.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import optax_lossscale as ols
from helpers.compare import assert_same_bits


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Users have JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def square(var):
    return var**2


def test_tf_keras_minimize_and_scaling_by_hand_give_the_values_of_the_page():
    # The page prints 0.5 after `minimize`, and 0.25 after the step by hand.
    rule = ols.presets.tf_keras()
    tx = ols.loss_scaled(optax.sgd(0.25), rule)
    var = jnp.asarray(1.0)
    opt_state = tx.init(var)
    grad = ols.scaled_grad(square, opt_state)(var)
    updates, opt_state = tx.update(grad, opt_state, var)
    var = optax.apply_updates(var, updates)
    assert var == 0.5

    state = ols.find_loss_scale_state(opt_state)
    scaled_grad = jax.grad(lambda var: ols.scale(square(var), state))(var)
    assert scaled_grad == 2.0**15
    grad = ols.unscale(scaled_grad, state)
    var = var - 0.25 * grad
    state = rule.adjust(state, ols.all_finite(grad))
    assert var == 0.25
    assert (state.step_count, state.rule_state.growth_count) == (2, 2)


def test_tf_keras_get_unscaled_gradients_ignores_none():
    # tf_keras's own test: [3, None, -4 in float16] at a scale of 2.
    state = ols.static_loss_scale(2.0).init()
    grads = [jnp.float32(3.0), None, jnp.float16(-4.0)]
    unscaled = ols.unscale(grads, state)
    assert unscaled == [1.5, None, -2.0]
    assert ols.all_finite(grads)


def test_a_loss_function_is_differentiated_as_scale_refuses_a_callable():
    # tf.keras scales a callable; here a function is differentiated instead.
    state = ols.static_loss_scale(2.0).init()
    get_scaled_loss = lambda loss_fn: lambda *args: ols.scale(loss_fn(*args), state)  # noqa: E731
    assert get_scaled_loss(lambda: jnp.float16(5.0))() == 10.0
    assert ols.scaled_value_and_grad(square, state)(3.0) == (9.0, 12.0)
    with pytest.raises(TypeError, match="`tree` must hold arrays, got the function"):
        ols.scale(square, state)


def test_tf_keras_hyperparameters_are_read_and_set_on_the_inner_optimizer():
    tx = ols.loss_scaled(optax.inject_hyperparams(optax.adam)(1e-3, b1=0.8))
    opt_state = tx.init(jnp.ones(1))
    assert np.isclose(optax.tree.get(opt_state, "b1"), 0.8)
    opt_state = optax.tree.set(opt_state, b1=0.7)
    _, opt_state = tx.update(jnp.ones(1), opt_state, jnp.ones(1))
    assert np.isclose(optax.tree.get(opt_state, "b1"), 0.7)


def test_the_first_steps_of_a_high_initial_scale_are_skipped_as_in_keras():
    # tf.keras's page: the first 2 to 15 steps are skipped, as the first scale is high.
    tx = ols.loss_scaled(optax.sgd(0.1), ols.presets.keras(2.0**24))
    weight = jnp.asarray(1.0)
    opt_state = tx.init(weight)

    def loss_fn(weight):
        return (weight.astype(jnp.float16) * 3.0).astype(jnp.float32) ** 2

    for _ in range(15):
        grads = ols.scaled_grad(loss_fn, opt_state)(weight)
        updates, opt_state = tx.update(grads, opt_state, weight)
        weight = optax.apply_updates(weight, updates)
    metrics = ols.loss_scale_metrics(opt_state)
    assert 2 <= metrics["total_notfinite"] <= 15
    assert metrics["notfinite_count"] == 0


class LeNet5(nn.Module):
    """The MindSpore page's network."""

    @nn.compact
    def __call__(self, x):
        for features in (6, 16):
            x = nn.Conv(features, (5, 5), padding="VALID")(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        init = nn.initializers.normal(0.02)
        for features in (120, 84):
            x = nn.relu(nn.Dense(features, kernel_init=init)(x))
        return nn.Dense(10, kernel_init=init)(x)


def train_lenet(rule, level, epochs=2):
    """Losses after each epoch, and the optimizer state."""
    rng = np.random.default_rng(0)
    images = np.float32(rng.normal(size=(32, 32, 32, 32, 1)))  # 32 batches of 32.
    labels = rng.integers(0, 10, size=(32, 32))
    model = LeNet5()
    apply = ols.autocast(model.apply, level=level)  # The loss is in float32, as there.
    params = model.init(jax.random.key(0), images[0])
    tx = ols.loss_scaled(optax.sgd(0.01, momentum=0.9), rule)

    def loss_fn(params, image, label):
        logits = apply(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    epoch = jax.jit(lambda carry: jax.lax.scan(step, carry, (images, labels)))
    carry, losses = (params, tx.init(params)), []
    for _ in range(epochs):
        carry, loss = epoch(carry)
        losses.append(float(loss[-1]))
    return losses, carry[1]


MANAGERS = {
    "fixed, drop the update on overflow": (ols.presets.mindspore_fixed(), 2.0**7),
    "fixed, update even on overflow": (
        ols.presets.mindspore_fixed(1024.0, drop_overflow_update=False),
        2.0**10,
    ),
    "dynamic": (
        ols.presets.mindspore_dynamic(scale_factor=4, scale_window=3000),
        2.0**24,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("manager", MANAGERS)
def test_the_lenet_of_the_mindspore_page_trains_under_both_managers(manager):
    # amp_level="O0", float32; the page prints losses from 2.268 to 2.313 for ten
    # epochs on labels that are random: ln(10) is 2.303.
    rule, loss_scale = MANAGERS[manager]
    losses, opt_state = train_lenet(rule, "O0")
    assert all(2.25 < loss < 2.35 for loss in losses)
    assert ols.get_loss_scale(opt_state) == loss_scale
    assert ols.loss_scale_metrics(opt_state)["total_notfinite"] == 0


@pytest.mark.parametrize("level", ["O2", pytest.param("O3", marks=pytest.mark.slow)])
def test_the_lenet_of_the_mindspore_page_trains_in_mixed_precision(level):
    # amp_level="O2" and "O3" with a dynamic manager, which finds its scale.
    rule, first = MANAGERS["dynamic"]
    losses, opt_state = train_lenet(rule, level)
    metrics = ols.loss_scale_metrics(opt_state)
    assert all(2.25 < loss < 2.35 for loss in losses)
    assert 0 < metrics["total_notfinite"] < 15
    assert metrics["loss_scale"] == first * 0.25 ** int(metrics["total_notfinite"])


def test_optimizers_that_share_a_scale_skip_separately_and_back_off_once():
    # torch: test_grad_scaling_multiple. The scale of each `loss_scaled` is 1, as the
    # gradients that it is given are unscaled; it only skips.
    rule = ols.presets.torch(128.0, growth_interval=1)
    shared = rule.init()
    tx = ols.loss_scaled(optax.sgd(1.0), ols.static_loss_scale(1.0))
    params = {"generator": jnp.ones(2), "critic": jnp.ones(2)}
    opt_states = {name: tx.init(param) for name, param in params.items()}
    for bad in (None, "generator", None, "both"):
        grads = {name: jnp.full(2, 0.5) for name in params}
        for name in grads:
            if bad in (name, "both"):
                grads[name] = grads[name].at[0].set(jnp.inf)
        before = params
        grads = ols.unscale(ols.scale(grads, shared), shared)
        for name in params:
            updates, opt_states[name] = tx.update(grads[name], opt_states[name])
            params = {**params, name: optax.apply_updates(params[name], updates)}
        shared = rule.adjust(shared, ols.all_finite(grads))
        for name in params:
            assert np.all((params[name] == before[name]) == (bad in (name, "both")))
    assert shared.loss_scale == 128.0 * 2 * 0.5 * 2 * 0.5
    skipped = {
        name: int(state.loss_scale_state.total_notfinite)
        for name, state in opt_states.items()
    }
    assert skipped == {"generator": 2, "critic": 1}


def test_each_loss_can_have_a_scale_of_its_own():
    # apex: num_losses, loss_id. One optimizer skips when any loss overflowed; each
    # scale backs off only for its own loss.
    rule = ols.presets.apex(2.0**15, scale_window=2)
    states = [rule.init(), rule.init()]
    tx = ols.loss_scaled(optax.sgd(1.0), ols.static_loss_scale(1.0))
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


@pytest.mark.parametrize("max_norm", [0.7, 1e6])
def test_gradients_can_be_clipped_between_unscale_and_update(max_norm):
    # torch: unscale_, clip_grad_norm_, step. Inside the wrapper, or by hand.
    grads = jnp.asarray([3.0, 4.0])
    tx = ols.loss_scaled(
        optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(1.0))
    )
    opt_state = tx.init(grads)
    inside, _ = tx.update(ols.scale(grads, opt_state), opt_state)
    np.testing.assert_allclose(inside, -grads * min(1.0, max_norm / 5.0), rtol=1e-6)

    state = ols.dynamic_loss_scale().init()
    unscaled = ols.unscale(ols.scale(grads, state), state)
    finite = ols.all_finite(unscaled)  # Before the clip, which would hide infinities.
    clip = optax.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(unscaled, clip.init(unscaled))
    assert finite
    assert_same_bits(inside, -clipped)


# Clipping by value, which must not hide an infinity: 10 of `test_known_bugs.py`.
