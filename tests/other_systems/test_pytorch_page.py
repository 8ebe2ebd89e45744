"""The page on PyTorch's `GradScaler`, statement by statement, with its numbers.

The page's usage example, and the clipping example of PyTorch's own tutorial. PyTorch is
not needed: the numbers are worked out by hand here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

pytestmark = pytest.mark.usefixtures("standard_promotion")


# The page's usage example. Its data are random; here every input is 1 and every target
# is 1, so that the numbers can be worked out by hand.

NUM_EPOCHS = 3
DATA_LOADER = [(jnp.ones((8, 10)), jnp.ones((8, 1)))] * 10


def model(params, inputs):
    """`nn.Linear(10, 1)`."""
    return inputs @ params["weight"] + params["bias"]


def mse_loss(output, target):
    """`nn.MSELoss()`."""
    return jnp.mean((output - target) ** 2)


@pytest.mark.slow
def test_the_usage_example_of_the_page_runs_statement_by_statement():
    # model = nn.Linear(10, 1).cuda()
    params = {"weight": jnp.full((10, 1), 0.5), "bias": jnp.zeros(1)}
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
    # At first the gradient of each of the eight outputs is 2 * 4 / 8 = 1, and the scale
    # itself overflows float16 at 65536. So the first of the 30 steps is skipped. The
    # gradients of the parameters, 8 times the scale, are float32 sums. (In PyTorch they
    # are float16, so that four steps are skipped.)
    state = ols.find_loss_scale_state(opt_state)
    assert state.total_notfinite == 1
    assert state.loss_scale == 32768.0
    assert state.rule_state.growth_count == 29
    # The error starts at 10 * 0.5 - 1 = 4. Each of the eleven parameters moves by 2e-3
    # times the error, so one step multiplies the error by 1 - 11 * 2e-3.
    error = model(params, DATA_LOADER[0][0])[0, 0] - 1.0
    np.testing.assert_allclose(error, 4.0 * (1.0 - 11 * 2e-3) ** 29, rtol=5e-3)


# The tutorial's clipping: unscale_, clip, step, update. The gradients of
# 3 * a + 4 * b are 3 and 4, of norm 5. Clipped to a norm of 1 they are 0.6 and 0.8.


def slope_loss(params, factor=1.0):
    return factor * jnp.dot(jnp.asarray([3.0, 4.0]), params)


def unscale_clip_step(clip, params, factor=1.0):
    tx = ols.loss_scaled(optax.sgd(1.0), ols.presets.torch(2.0**10))
    opt_state = tx.init(params)
    # scaler.scale(loss).backward()
    grads = ols.scaled_grad(slope_loss, opt_state)(params, factor)
    # scaler.unscale_(optimizer), which also looks for inf and NaN
    grads = ols.unscale(grads, opt_state)
    finite = ols.all_finite(grads)
    # torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    grads, _ = clip.update(grads, clip.init(params))
    # scaler.step(optimizer), and scaler.update()
    updates, opt_state = tx.update(
        grads, opt_state, params, grads_finite=finite, grads_unscaled=True
    )
    return optax.apply_updates(params, updates), opt_state


@pytest.mark.slow
def test_unscale_clip_and_step_give_the_numbers_by_hand():
    params, opt_state = unscale_clip_step(optax.clip_by_global_norm(1.0), jnp.ones(2))
    np.testing.assert_allclose(params, [1.0 - 0.6, 1.0 - 0.8], rtol=1e-6)
    assert ols.get_loss_scale(opt_state) == 2.0**10


@pytest.mark.parametrize(
    "clip", [optax.clip(1.0), optax.clip_by_global_norm(1.0)], ids=["value", "norm"]
)
def test_a_clip_between_unscale_and_step_does_not_hide_an_infinity(clip):
    # The verdict comes before the clip, as torch's `unscale_` takes it.
    params, opt_state = unscale_clip_step(clip, jnp.ones(2), factor=jnp.inf)
    np.testing.assert_array_equal(params, [1.0, 1.0])
    assert ols.get_loss_scale(opt_state) == 2.0**9
