"""The examples on the pages of other systems, and the recipes for them, as tests.

Keras 3 and R's keras3, MindSpore's guides, and recipes. The pages of PyTorch and
tf.keras are in `test_pytorch_page.py` and `test_tf_keras_page.py`. The pages in
docs/migration show the same to read.
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


def test_the_second_example_of_the_tf_keras_page_works_with_the_pure_functions():
    rule = ols.presets.tf_keras()
    state, var = rule.init(), jnp.asarray(0.5)
    scaled_grad = jax.grad(lambda var: ols.scale(square(var), state))(var)
    grad = ols.unscale(scaled_grad, state)
    state = rule.adjust(state, ols.all_finite(grad))
    assert var - 0.25 * grad == 0.25
    assert state.rule_state.growth_count == 1


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


def run(rule, magnitude, steps):
    """Which of some steps are skipped, if the largest gradient stays the same."""

    def step(state, _):
        finite = state.loss_scale * magnitude <= 65504
        return rule.adjust(state, finite), ~finite

    return jax.lax.scan(step, rule.init(), length=steps)[1]


@pytest.mark.parametrize("skips", [2, 8, 15])
def test_two_to_fifteen_first_steps_are_skipped_for_gradients_of_that_many_bits(skips):
    # tf.keras's page: the first 2 to 15 steps are skipped. The scale starts at 2**15,
    # so each bit of the largest gradient costs one step.
    skipped = run(ols.presets.tf_keras(), 2.0**skips, 100)
    assert skipped[:skips].all()
    assert not skipped[skips:].any()


@pytest.mark.parametrize("growth_interval", [20, 2000])
def test_about_one_step_in_a_growth_interval_is_skipped_in_the_long_run(
    growth_interval,
):
    # tf.keras's page: 0.05 %, 1 / dynamic_growth_steps. Exactly, each overflow is
    # followed by as many finite steps as the interval has.
    rule = ols.presets.tf_keras(dynamic_growth_steps=growth_interval)
    skipped = run(rule, 1.0, 10 * (growth_interval + 1))
    assert skipped.sum() == 10


def test_a_scale_too_high_comes_down_2000_times_faster_than_one_too_low_climbs():
    # Keras's page: a loss scale that is too high gets lowered far more quickly. The
    # largest scale that fits a gradient of 1 is 2**15; both start five bits off.
    def steps_until_it_fits(rule):
        state, steps = rule.init(), 0
        while state.loss_scale != 2.0**15:
            state = rule.adjust(state, state.loss_scale <= 65504)
            steps += 1
        return steps

    assert steps_until_it_fits(ols.presets.keras(2.0**20)) == 5
    low = ols.presets.keras(2.0**10, dynamic_growth_steps=20)
    assert steps_until_it_fits(low) == 5 * 20  # 5 * 2000 at Keras's default.


def test_the_first_steps_of_a_high_initial_scale_are_skipped_as_in_keras():
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


# PyTorch's setters: a new rule, and the state that there is.


def test_a_new_growth_interval_takes_effect_with_the_old_state():
    # set_growth_interval(4) after three finite steps: the fourth lets the scale grow.
    params = jnp.ones(2)
    old = ols.loss_scaled(optax.adam(0.1), ols.presets.torch(8.0))
    new = ols.loss_scaled(optax.adam(0.1), ols.presets.torch(growth_interval=4))
    opt_state = old.init(params)
    for _ in range(3):
        _, opt_state = old.update(ols.scale(params, opt_state), opt_state, params)
    _, opt_state = new.update(ols.scale(params, opt_state), opt_state, params)
    assert ols.get_loss_scale(opt_state) == 16.0
    assert optax.tree.get(opt_state.inner_state, "count") == 4


def test_new_growth_and_backoff_factors_take_effect_with_the_old_state():
    # set_growth_factor(4.0) and set_backoff_factor(0.25).
    state = ols.presets.torch(8.0).init()
    rule = ols.presets.torch(growth_factor=4.0, backoff_factor=0.25, growth_interval=1)
    assert rule.adjust(state, True).loss_scale == 32.0
    assert rule.adjust(state, False).loss_scale == 2.0


def test_update_with_a_new_scale_keeps_the_growth_tracker():
    # scaler.update(1024.0): torch sets the scale and leaves the tracker alone.
    state = ols.presets.torch(8.0, growth_interval=100).init()
    state = ols.presets.torch(8.0).adjust(state, True)
    state = ols.set_loss_scale(state, 1024.0)
    assert (state.loss_scale, state.rule_state.growth_count) == (1024.0, 1)


def test_ftrl_without_penalties_takes_the_steps_of_adagrad_from_zero_weights():
    # Keras's FTRL with `l1 = l2 = beta = 0`; Optax has none.
    grads = np.random.default_rng(0).normal(size=20)
    rate, accumulator, linear, weight = 0.1, 0.1, 0.0, 0.0
    tx = ols.loss_scaled(optax.adagrad(rate, accumulator, eps=0.0))
    params = jnp.zeros(())
    opt_state = tx.init(params)
    for grad in grads:
        before, accumulator = accumulator, accumulator + grad**2
        linear += grad - (accumulator**0.5 - before**0.5) / rate * weight
        weight = -linear / (accumulator**0.5 / rate)
        grad = ols.scale(jnp.float32(grad), opt_state)
        updates, opt_state = tx.update(grad, opt_state)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params, weight, rtol=1e-4)


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


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", pytest.param("O3", marks=pytest.mark.slow)])
def test_the_lenet_of_the_mindspore_page_trains_in_mixed_precision(level):
    # amp_level="O2" and "O3" with a dynamic manager, which finds its scale.
    rule, first = MANAGERS["dynamic"]
    losses, opt_state = train_lenet(rule, level)
    metrics = ols.loss_scale_metrics(opt_state)
    assert all(2.25 < loss < 2.35 for loss in losses)
    assert 0 < metrics["total_notfinite"] < 15
    assert metrics["loss_scale"] == first * 0.25 ** int(metrics["total_notfinite"])


def skips_alone(optimizer):
    """Optax's own wrapper: the optimizer skips each gradient that is not finite."""
    return optax.apply_if_finite(optimizer, max_consecutive_errors=2**31 - 1)


def test_optimizers_that_share_a_scale_skip_separately_and_back_off_once():
    # torch: test_grad_scaling_multiple. Each optimizer is Adam, whose moments and count
    # a skip must not move.
    rule = ols.presets.torch(128.0, growth_interval=1)
    tx = skips_alone(optax.adam(0.1))
    params = {"generator": jnp.ones(2), "critic": jnp.ones(2)}
    carry = params, {name: tx.init(param) for name, param in params.items()}

    @jax.jit
    def step(carry, shared, scaled):
        params, opt_states = carry
        grads = ols.unscale(scaled, shared)
        for name in params:
            updates, opt_state = tx.update(grads[name], opt_states[name], params[name])
            opt_states = {**opt_states, name: opt_state}
            params = {**params, name: optax.apply_updates(params[name], updates)}
        return (params, opt_states), rule.adjust(shared, ols.all_finite(grads))

    def of(name, carry):
        params, opt_states = carry
        return params[name], opt_states[name].inner_state

    shared = rule.init()
    for bad in (None, "generator", None, "both"):
        scaled = {name: jnp.full(2, 64.0) for name in params}
        for name in params:
            if bad in (name, "both"):
                scaled[name] = scaled[name].at[0].set(jnp.inf)
        before = carry
        carry, shared = step(carry, shared, scaled)
        for name in params:
            if bad in (name, "both"):
                assert_same_bits(of(name, carry), of(name, before))
            else:
                assert np.all(of(name, carry)[0] < of(name, before)[0])
    assert shared.loss_scale == 128.0 * 2 * 0.5 * 2 * 0.5
    skipped = {name: int(state.total_notfinite) for name, state in carry[1].items()}
    assert skipped == {"generator": 2, "critic": 1}


def test_an_optimizer_that_skips_alone_never_gives_in():
    # Beyond `max_consecutive_errors`, `apply_if_finite` applies what is not finite; the
    # count stops at 2**31 - 1, so with that number it never does.
    tx = skips_alone(optax.sgd(1.0))
    opt_state = tx.init(jnp.ones(2))
    opt_state = opt_state._replace(notfinite_count=jnp.int32(2**31 - 2))
    for _ in range(3):
        updates, opt_state = jax.jit(tx.update)(jnp.full(2, jnp.nan), opt_state)
        np.testing.assert_array_equal(updates, [0.0, 0.0])


def test_each_loss_can_have_a_scale_of_its_own():
    # apex: num_losses, loss_id. One optimizer skips when any loss overflowed; each
    # scale backs off only for its own loss.
    rule = ols.presets.apex(2.0**15, scale_window=2)
    states = [rule.init(), rule.init()]
    tx = skips_alone(optax.sgd(1.0))
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
