"""What JAX 0.7 has under other names, or lacks."""

import jax
import jax.experimental

IS_JAX_0_7 = jax.__version_info__ < (0, 8)
enable_x64 = jax.experimental.enable_x64 if IS_JAX_0_7 else jax.enable_x64
