"""Strict JAX, eight CPU devices, and repeatable property tests."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=60
)
hypothesis.settings.load_profile("repeatable")
