"""Behaviour that only an NVIDIA GPU shows, and whole runs in float16 on it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.history import scales_after
from optax_lossscale import demo

TINY = 2.0**-130  # Subnormal; a CPU flushes it.

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason="there is no NVIDIA GPU here"
    ),
]


def test_float16_subnormals_are_not_flushed():
    grads = np.arange(1, 1024, dtype=np.float16) * np.float16(2.0**-24)
    state = ols.static_loss_scale(2.0**10).init()
    exact = grads.astype(np.float32) / 2**10
    unscaled = jax.jit(ols.unscale)(jnp.asarray(grads), state)
    np.testing.assert_array_equal(unscaled, exact)


@pytest.mark.parametrize(
    ("settings", "maxima"),
    [
        ({}, [TINY]),
        ({}, [TINY, np.inf]),
        ({"init_scale": 2.0**-20, "recent": 4}, [TINY] * 8),
        ({}, [1.5] * 20 + [np.inf] * 3 + [TINY] * 2),
    ],
    ids=["once", "before an overflow", "in a row", "after a search"],
)
def test_subnormal_gradients_count_as_zeros_as_on_a_cpu(settings, maxima):
    rule = ols.headroom_loss_scale(**settings)
    zeros = [0.0 if maximum == TINY else maximum for maximum in maxima]
    assert_same_bits(scales_after(rule, maxima), scales_after(rule, zeros))


def test_a_step_in_which_a_float16_matmul_overflows_is_skipped():
    tx = ols.loss_scaled(optax.sgd(0.1))
    weight = jnp.full((256, 8), 256.0)
    opt_state = tx.init(weight)

    def loss_fn(weight):
        # The sums are 256 * 256 * 256, infinite in float16.
        out = jnp.full((4, 256), 256.0, jnp.float16) @ weight.astype(jnp.float16)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    @jax.jit
    def step(weight, opt_state):
        grads = ols.scaled_grad(loss_fn, opt_state)(weight)
        updates, opt_state = tx.update(grads, opt_state, weight)
        return optax.apply_updates(weight, updates), opt_state

    after, opt_state = step(weight, opt_state)
    np.testing.assert_array_equal(after, weight)
    assert ols.get_loss_scale(opt_state) == 2.0**14


def test_the_demo_fails_in_plain_float16_and_matches_float32_with_a_dynamic_scale(
    tmp_path, capsys
):
    demo.main(["--plot", str(tmp_path / "demo.png")])
    table = capsys.readouterr().out
    accuracy = {
        cells[1].strip(): float(cells[2])
        for cells in (line.split("|") for line in table.splitlines())
        if len(cells) > 2 and cells[1].strip() in demo.VARIANTS
    }
    assert accuracy["float16"] < 0.2
    assert abs(accuracy["float16_dynamic"] - accuracy["float32"]) < 0.015
