"""A compiled step reads the gradients once more than the bare one, and copies nothing.

Updates are masked as soon as they are computed for that; see `test_early_masks.py`.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7
from helpers.inner import lenient

pytestmark = pytest.mark.skipif(
    IS_JAX_0_7, reason="on CPU, XLA of JAX 0.7 stores more arrays than later ones"
)
LEAVES, SIZE = 4, 100_000
PARAMS = [jax.ShapeDtypeStruct((SIZE,), jnp.float32)] * LEAVES
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)),
}
RULES = {"dynamic": ols.dynamic_loss_scale(), "headroom": ols.headroom_loss_scale()}


def compiled(tx, dtype):
    def step(params, state, grads):
        # The bare optimizer is given what `loss_scaled` gives it.
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, PARAMS)
    grads = [jax.ShapeDtypeStruct(param.shape, dtype) for param in PARAMS]
    step = jax.jit(step, donate_argnums=(0, 1))
    return step.lower(PARAMS, state, grads).compile()


@pytest.mark.parametrize(
    ("name", "rule", "dtype"),
    [
        ("adamw", "dynamic", "float16"),
        ("adamw", "headroom", "float32"),
        ("clipped", "dynamic", "float32"),
    ],
)
def test_a_step_reads_the_gradients_once_more_and_copies_no_moment(name, rule, dtype):
    bare = lenient(OPTIMIZERS[name])
    plain = compiled(bare, dtype)
    scaled = compiled(ols.loss_scaled(bare, RULES[rule]), dtype)
    entries = LEAVES * SIZE
    read = jnp.dtype(dtype).itemsize * entries
    # XLA for CPU writes and reads what it reduces: bools, or magnitudes.
    read += 2 * entries * (4 if rule == "headroom" else 1)
    if name == "clipped":  # Both the norm and the update read unscaled gradients.
        read += 2 * 4 * entries
    before, after = (x.cost_analysis()["bytes accessed"] for x in (plain, scaled))
    assert after <= 1.02 * (before + read)
    before, after = (x.memory_analysis().temp_size_in_bytes for x in (plain, scaled))
    kept = 4.1 if rule == "headroom" or name == "clipped" else 1.1
    assert after < before + kept * entries  # Two moments would be 8 bytes each.
