"""What JAX 0.7 has under other names, or cannot do."""

import jax
import jax.experimental
import pytest

IS_JAX_0_7 = jax.__version_info__ < (0, 8)
enable_x64 = jax.experimental.enable_x64 if IS_JAX_0_7 else jax.enable_x64

sets_devices_again = pytest.mark.skipif(
    IS_JAX_0_7, reason="JAX 0.7 cannot change its number of CPU devices later"
)
