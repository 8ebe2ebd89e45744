"""Behaviour that only an NVIDIA GPU shows, and whole runs in float16 on it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import optax_lossscale as ols
from optax_lossscale import demo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason="there is no NVIDIA GPU here"
    ),
]


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_float16_subnormals_are_not_flushed():
    grads = np.arange(1, 1024, dtype=np.float16) * np.float16(2.0**-24)
    state = ols.static_loss_scale(2.0**10).init()
    exact = grads.astype(np.float32) / 2**10
    unscaled = jax.jit(ols.unscale)(jnp.asarray(grads), state)
    np.testing.assert_array_equal(unscaled, exact)


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


class Transformer(nn.Module):
    """Two blocks, to predict the next of 32 tokens."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 64, dtype=self.dtype)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x += nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, mask=mask)
            y = nn.Dense(256, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x += nn.Dense(64, dtype=self.dtype)(nn.gelu(y))
        return nn.Dense(32, dtype=self.dtype)(x).astype(jnp.float32)


def train_transformer(dtype, rule):
    model = Transformer(dtype)
    start = jax.random.randint(jax.random.key(1), (64, 1), 0, 32)
    tokens = (
        start + 5 * jnp.arange(33)
    ) % 32  # Each token is the one before plus five.
    params = model.init(jax.random.key(0), tokens[:, :-1])
    tx = ols.loss_scaled(optax.adam(3e-3), rule)

    def loss_fn(params):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    def step(carry, _):
        params, opt_state = carry
        loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, length=100))
    (_, opt_state), losses = run((params, tx.init(params)))
    return losses, opt_state


def test_a_small_transformer_trains_as_well_in_float16_as_in_float32():
    exact, _ = train_transformer(jnp.float32, ols.no_loss_scale())
    losses, opt_state = train_transformer(jnp.float16, ols.dynamic_loss_scale())
    assert exact[0] > 3.0
    assert exact[-1] < 0.1
    assert losses[-1] < 0.1
    assert ols.loss_scale_metrics(opt_state)["total_notfinite"] < 10


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
