"""Trains a million steps with faulty gradients, for every rule and two optimizers.

    python tests/tools/faults.py [--steps N]

The gradients span 16 decades and are scaled and cast to float16, so that they overflow
and underflow; some are NaN, infinite or zero. The script prints a line for each case.
It fails unless parameters and moments stay finite, every skipped step leaves them as
they were, scales stay inside their bounds, and every count equals that of an oracle in
plain NumPy.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ols

BOUNDS = 2.0**-10, 2.0**20
LIMITS = {"min_scale": BOUNDS[0], "max_scale": BOUNDS[1]}
RULES = {
    "dynamic": ols.dynamic_loss_scale(growth_interval=20, **LIMITS),
    "dynamic, hysteresis": ols.dynamic_loss_scale(
        growth_interval=20, hysteresis=3, hysteresis_refill="growth", **LIMITS
    ),
    "static": ols.static_loss_scale(2.0**10),
    "headroom": ols.headroom_loss_scale(**LIMITS),
}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "sgd, momentum": optax.sgd(1e-3, momentum=0.9),
}
FAULTS = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 0.0])


def draw(key):
    """A gradient, `f32[4]`; sometimes one entry is a fault."""
    keys = jax.random.split(key, 5)
    size = 10.0 ** jax.random.uniform(keys[0], minval=-12.0, maxval=4.0)
    grads = size * jax.random.normal(keys[1], (4,))
    fault = FAULTS[jax.random.randint(keys[2], (), 0, 4)]
    place = jax.random.randint(keys[3], (), 0, 4)
    is_hit = jax.random.bernoulli(keys[4], 0.02)
    return jnp.where((jnp.arange(4) == place) & is_hit, fault, grads)


def all_of(tree):
    return jnp.all(jnp.stack(jax.tree.leaves(tree)))


def run(rule, optimizer, steps, seed=0):
    """Trains, and returns observations of each step."""
    tx = ols.loss_scaled(optimizer, rule)

    def step(carry, key):
        params, state = carry
        scale = ols.get_loss_scale(state)
        grads = {"w": (draw(key) * scale).astype(jnp.float16)}
        # The expected verdict, computed from the optimizer's arguments.
        is_finite = jnp.all(jnp.abs(grads["w"].astype(jnp.float32) / scale) < jnp.inf)
        updates, after = tx.update(grads, state, params)
        moved = optax.apply_updates(params, updates)
        old, new = (params, state.inner_state), (moved, after.inner_state)
        counts = after.loss_scale_state
        seen = {
            "finite": is_finite,
            "kept": all_of(jax.tree.map(jnp.array_equal, old, new)),
            "sound": all_of(jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), new)),
            "scale": counts.loss_scale,
            "counts": jnp.stack(
                [counts.step_count, counts.total_notfinite, counts.notfinite_count]
            ),
        }
        return (moved, after), seen

    params = {"w": jnp.ones(4)}
    keys = jax.random.split(jax.random.key(seed), steps)
    _, seen = jax.jit(lambda c: jax.lax.scan(step, c, keys))((params, tx.init(params)))
    return {name: np.asarray(value) for name, value in seen.items()}


def check(seen):
    """Raises unless all observations are right; returns the share of skipped steps."""
    finite, steps = seen["finite"], len(seen["finite"])
    assert seen["sound"].all(), "a parameter or a moment is not finite"
    assert seen["kept"][~finite].all(), "a skipped step changed something"
    assert (seen["scale"] >= BOUNDS[0]).all()
    assert (seen["scale"] <= BOUNDS[1]).all()
    number = np.arange(1, steps + 1)
    in_row = number - np.maximum.accumulate(np.where(finite, number, 0))
    counts = np.stack([number, np.cumsum(~finite), in_row], axis=1)
    np.testing.assert_array_equal(seen["counts"], counts)
    return float(np.mean(~finite))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    for name, rule in RULES.items():
        for optimizer, tx in OPTIMIZERS.items():
            start = time.perf_counter()
            seen = run(rule, tx, steps)
            skipped = check(seen)
            exponents = np.log2([seen["scale"].min(), seen["scale"].max()])
            print(
                f"{name:20} {optimizer:14} {steps} steps, {skipped:6.2%} skipped, "
                f"scales 2**{exponents[0]:g} to 2**{exponents[1]:g}, "
                f"{time.perf_counter() - start:.0f} s"
            )


if __name__ == "__main__":
    main()
