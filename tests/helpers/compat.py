"""Functions that have other names in older JAX."""

import jax

if hasattr(jax, "enable_x64"):
    enable_x64, set_mesh = jax.enable_x64, jax.set_mesh
else:  # JAX 0.7
    from jax.experimental import enable_x64 as enable_x64

    set_mesh = jax.sharding.use_mesh

IS_JAX_0_7 = jax.__version_info__ < (0, 8)
