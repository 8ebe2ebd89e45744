"""The page on PyTorch's `GradScaler`, statement by statement, with its numbers.

The page's usage example, the clipping example of PyTorch's own tutorial, and the page's
case of a loss that multiplies itself by 100. PyTorch is not needed: the numbers are
worked out by hand here, or are the page's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Users have JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# The page's usage example. Its data are random; here every input is 1 and every target
# is 1, so that the numbers can be worked out by hand.

NUM_EPOCHS = 3
DATA_LOADER = [(jnp.ones((8, 10)), jnp.ones((8, 1)))] * 10
LINEAR = {"weight": jnp.full((10, 1), 0.5), "bias": jnp.zeros(1)}


def model(params, inputs):
    """`nn.Linear(10, 1)`."""
    return inputs @ params["weight"] + params["bias"]


def mse_loss(output, target):
    """`nn.MSELoss()`."""
    return jnp.mean((output - target) ** 2)


def error_after(updates):
    """By hand: `output - target` after some steps of SGD at a rate of 1e-3.

    It starts at 10 * 0.5 - 1 = 4. Each of the eleven parameters moves by 2e-3 times the
    error, so one step multiplies the error by 1 - 11 * 2e-3.
    """
    return 4.0 * (1.0 - 11 * 2e-3) ** updates


def check_result_of_the_page(params, state):
    # At first the gradient of each of the eight outputs is 2 * 4 / 8 = 1, and the scale
    # itself overflows float16 at 65536. So the first of the 30 steps is skipped. The
    # gradients of the parameters, 8 times the scale, are float32 sums. (In PyTorch they
    # are float16, so that four steps are skipped.)
    assert state.total_notfinite == 1
    assert state.loss_scale == 32768.0
    assert state.rule_state.growth_count == 29
    error = model(params, DATA_LOADER[0][0])[0, 0] - 1.0
    np.testing.assert_allclose(error, error_after(29), rtol=5e-3)


def test_the_usage_example_of_the_page_runs_statement_by_statement():
    params = LINEAR  # model = nn.Linear(10, 1).cuda()
    optimizer = optax.sgd(1e-3)  # optimizer = optim.SGD(model.parameters(), lr=1e-3)
    scaler = ols.presets.torch()  # scaler = GradScaler()
    tx = ols.loss_scaled(optimizer, scaler)
    opt_state = tx.init(params)

    @ols.autocast  # with autocast(device_type='cuda', dtype=torch.float16):
    def forward(params, inputs, target):
        output = model(params, inputs)  # output = model(input)
        return mse_loss(output, target)  # loss = loss_fn(output, target)

    @jax.jit
    def step(params, opt_state, inputs, target):
        # scaler.scale(loss).backward()
        grads = ols.scaled_grad(forward, opt_state)(params, inputs, target)
        # scaler.step(optimizer), and scaler.update()
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(NUM_EPOCHS):
        for inputs, target in DATA_LOADER:
            # optimizer.zero_grad() has no counterpart: gradients are values.
            params, opt_state = step(params, opt_state, inputs, target)
    check_result_of_the_page(params, ols.find_loss_scale_state(opt_state))


def test_the_usage_example_of_the_page_runs_with_each_method_by_hand():
    params = LINEAR
    optimizer = optax.sgd(1e-3)
    scaler = ols.presets.torch()
    optimizer_state, state = optimizer.init(params), scaler.init()

    def scaled_loss(params, state, inputs, target):
        loss = mse_loss(ols.autocast(model)(params, inputs), target)
        return ols.scale(loss, state)  # scaler.scale(loss)

    @jax.jit
    def step(params, optimizer_state, state, inputs, target):
        grads = jax.grad(scaled_loss)(params, state, inputs, target)  # .backward()
        grads = ols.unscale(grads, state)  # scaler.step(optimizer): it unscales,
        finite = ols.all_finite(grads)  # looks for inf and NaN,
        updates, stepped = optimizer.update(grads, optimizer_state)  # and steps
        stepped = optax.apply_updates(params, updates), stepped
        kept = params, optimizer_state  # or skips.
        params, optimizer_state = optax.tree.where(finite, stepped, kept)
        return params, optimizer_state, scaler.adjust(state, finite)  # scaler.update()

    for _ in range(NUM_EPOCHS):
        for inputs, target in DATA_LOADER:
            params, optimizer_state, state = step(
                params, optimizer_state, state, inputs, target
            )
    check_result_of_the_page(params, state)


# The tutorial's clipping: unscale_, clip, step, update. The gradients of
# 3 * a + 4 * b are 3 and 4, of norm 5. Clipped to a norm of 1 they are 0.6 and 0.8.


def slope_loss(params, factor=1.0):
    return factor * jnp.dot(jnp.asarray([3.0, 4.0]), params)


def unscale_clip_step(clip, params, factor=1.0, **grads_unscaled):
    tx = ols.loss_scaled(optax.sgd(1.0), ols.presets.torch(2.0**10))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        # scaler.scale(loss).backward()
        grads = ols.scaled_grad(slope_loss, opt_state)(params, factor)
        # scaler.unscale_(optimizer), which also looks for inf and NaN
        grads = ols.unscale(grads, opt_state)
        finite = ols.all_finite(grads)
        # torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        grads, _ = clip.update(grads, clip.init(params))
        # scaler.step(optimizer), and scaler.update()
        updates, opt_state = tx.update(
            grads, opt_state, params, grads_finite=finite, **grads_unscaled
        )
        return optax.apply_updates(params, updates), opt_state

    return step(params, opt_state)


def test_unscale_clip_and_step_give_the_numbers_by_hand():
    clip = optax.clip_by_global_norm(1.0)
    params, opt_state = unscale_clip_step(clip, jnp.ones(2), grads_unscaled=True)
    np.testing.assert_allclose(params, [1.0 - 0.6, 1.0 - 0.8], rtol=1e-6)
    assert ols.get_loss_scale(opt_state) == 2.0**10


def test_without_grads_unscaled_the_update_would_divide_a_second_time():
    clip = optax.clip_by_global_norm(1.0)
    params, _ = unscale_clip_step(clip, jnp.zeros(2))
    np.testing.assert_allclose(params, [-0.6 / 2**10, -0.8 / 2**10], rtol=1e-6)


@pytest.mark.parametrize(
    "clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0)], ids=["value", "norm"]
)
def test_a_clip_between_unscale_and_step_does_not_hide_an_infinity(clip):
    # The verdict comes before the clip, as torch's `unscale_` takes it.
    params, opt_state = unscale_clip_step(
        clip, jnp.ones(2), factor=jnp.inf, grads_unscaled=True
    )
    np.testing.assert_array_equal(params, [1.0, 1.0])
    assert ols.get_loss_scale(opt_state) == 2.0**9


def test_a_clip_inside_the_wrapper_gives_the_same_numbers():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = ols.loss_scaled(clipped, ols.presets.torch(2.0**10))
    opt_state = tx.init(jnp.ones(2))
    grads = ols.scaled_grad(slope_loss, opt_state)(jnp.ones(2))
    updates, _ = tx.update(grads, opt_state)
    np.testing.assert_allclose(updates, [-0.6, -0.8], rtol=1e-6)


# The page's own case: a loss that is multiplied by C = 100 before it is scaled.

C = 100.0


def test_the_total_factors_of_both_scenarios_are_those_of_the_page():
    totals = {s: ols.scale(C, ols.presets.torch(s).init()) for s in (65536.0, 4096.0)}
    assert totals == {65536.0: 6_553_600.0, 4096.0: 409_600.0}
    assert totals[65536.0] / totals[4096.0] == 16.0


@pytest.mark.parametrize(
    ("grad", "scale", "scaled", "is_finite"),
    [
        (1e-5, 2.0**16, 65.5, True),
        (1e-2, 2.0**16, 65_536.0, False),
        (1e-2, 2.0**12, 4_096.0, True),
    ],
)
def test_a_gradient_of_the_scenarios_overflows_as_the_page_says(
    grad, scale, scaled, is_finite
):
    times = ols.scale(grad * C, ols.presets.torch(scale).init())
    np.testing.assert_allclose(times, scaled, rtol=1e-3)
    assert np.isfinite(times.astype(jnp.float16)) == is_finite
    headroom = ols.diagnostics.headroom_bits(jnp.float32(grad), scale=C * scale)
    assert (headroom > 0) == is_finite


def compensated_loss(params, inputs, constant=C):
    """A linear layer under autocast, whose raw gradient is 0.01 for inputs of 1."""
    output = ols.autocast(jnp.dot)(inputs, params)
    return 0.01 * output * constant


def train(init_scale, constant=C, steps=4):
    tx = ols.loss_scaled(optax.sgd(1.0 / constant), ols.presets.torch(init_scale))
    params = jnp.ones(3)
    opt_state = tx.init(params)
    skips = []
    for _ in range(steps):
        grads = ols.scaled_grad(compensated_loss, opt_state)(
            params, jnp.ones(3), constant
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        skips.append(not ols.find_loss_scale_state(opt_state).last_finite)
    return params, skips


def test_scenario_a_overflows_in_a_float16_backward_pass_and_scenario_b_does_not():
    _, skips = train(2.0**16, steps=1)
    assert skips == [True]
    _, skips = train(2.0**12, steps=1)
    assert skips == [False]


def test_headroom_and_suggestion_find_the_constant_that_overflows():
    raw = jax.grad(compensated_loss)(jnp.ones(3), jnp.ones(3), 1.0)
    grads = jax.grad(compensated_loss)(jnp.ones(3), jnp.ones(3), C)
    headroom_bits = ols.diagnostics.headroom_bits
    # 65504 / 0.01 = 2**22.6 and 65504 / 1 = 2**16 less a thousandth.
    np.testing.assert_allclose(headroom_bits(raw, scale=2.0**16), 6.6, atol=0.05)
    np.testing.assert_allclose(headroom_bits(grads, scale=2.0**16), 0.0, atol=0.01)
    assert ols.diagnostics.suggest_init_scale(raw) == 2.0**20
    assert ols.diagnostics.suggest_init_scale(grads) == 2.0**13


def test_each_cure_of_the_constant_that_overflows_trains():
    # A lower initial scale, the rule itself after one skip, and no constant. Each
    # applied step moves each parameter by 0.01.
    for init_scale, constant, expected in [
        (2.0**12, C, [False, False, False, False]),
        (2.0**16, C, [True, False, False, False]),
        (2.0**16, 1.0, [False, False, False, False]),
    ]:
        params, skips = train(init_scale, constant)
        assert skips == expected
        moved = 1.0 - 0.01 * expected.count(False)
        np.testing.assert_allclose(params, np.full(3, moved), rtol=1e-3)
