"""The headroom rule by hand; `test_histories.py` compares it with its definition."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.history import scales_after

INF = math.inf


@pytest.mark.parametrize(
    ("settings", "maxima", "exponents"),
    [
        # The right scale is reached in one step: 65504 / 2**-6 is below 2**22.
        ({"history": 1, "margin_bits": 2.0}, [2.0**-6, 8.0, 2.0**-6], [19, 10, 19]),
        # An overflow costs one bit, which comes back: the peak is 3 and loses a bit in
        # 10 steps; 65504 / 3 is 0.41 bits above 2**14, so 6 steps suffice.
        (
            {"history": 40, "recent": 4, "margin_bits": 0.0},
            [1.5, INF] + [1.5] * 9,
            [15] + [14] * 6 + [15] * 4,
        ),
        # In a row of overflows each further one divides the scale by 2**8, until a
        # finite step tells the peak.
        ({}, [1.0] + [INF] * 3 + [1.0], [15, 14, 6, -2, 14]),
        # After as many steps of zeros as are remembered, everything may be flushed.
        ({"init_scale": 2.0**10, "recent": 2}, [0.0] * 4, [10, 14, 18, 22]),
    ],
)
def test_the_scale_leaves_headroom_above_the_largest_recent_gradient(
    settings, maxima, exponents
):
    rule = ols.headroom_loss_scale(**settings)
    assert np.log2(scales_after(rule, maxima)).tolist() == exponents


def test_the_scale_is_exact_for_maxima_at_powers_of_two_and_just_above():
    # XLA's log2 is not exact.
    rule = ols.headroom_loss_scale(
        margin_bits=0.0, history=1, min_scale=2.0**-60, max_scale=2.0**60
    )
    exponents = np.arange(-30, 31, 5)
    fits = np.ldexp(np.float32(65504), exponents)
    above = np.nextafter(fits, np.float32(INF))
    assert np.log2(scales_after(rule, fits)).tolist() == (-exponents).tolist()
    assert np.log2(scales_after(rule, above)).tolist() == (-exponents - 1).tolist()


def test_isolated_nan_batches_do_not_compound():
    steps = ([1.0] * 80 + [INF]) * 6
    assert min(scales_after(ols.headroom_loss_scale(history=300), steps)) == 2.0**14


def test_the_wrapper_gives_the_rule_the_largest_unscaled_gradient():
    tx = ols.loss_scaled(optax.sgd(0.1), ols.headroom_loss_scale(2.0**4))
    params = jnp.ones(4097)
    state = tx.init(params)
    # 3 * 2**8 / 2**4 = 48, and 65504 * 2**-0.75 / 48 is between 2**9 and 2**10.
    grads = jnp.ones(4097).at[70].set(-3.0 * 2**8)
    _, after = jax.jit(tx.update)(grads, state, params)
    assert ols.get_loss_scale(after) == 2.0**9
    # XLA's maximum on a CPU loses a NaN among so many entries.
    updates, skipped = jax.jit(tx.update)(grads.at[5].set(jnp.nan), after, params)
    assert ols.get_loss_scale(skipped) == 2.0**8
    assert not updates.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"history": 0}, "`history` must be at least 1"),
        ({"margin_bits": -1.0}, "`margin_bits` must be"),
        ({"min_scale": 5.0, "max_scale": 7.0}, "power of two"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ols.headroom_loss_scale(**settings)


def test_a_run_goes_on_under_another_margin():
    one, other = (
        ols.headroom_loss_scale(history=4, margin_bits=bits) for bits in (0.0, 3.0)
    )
    state = one.adjust(one.init(), True, 1.0)
    assert state.loss_scale == 2.0**15
    assert other.adjust(state, True, 1.0).loss_scale == 2.0**12
