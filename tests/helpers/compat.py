"""What older versions of JAX and Flax have under other names, or lack."""

import jax
import pytest
from flax import nnx

if hasattr(jax, "enable_x64"):
    enable_x64, set_mesh = jax.enable_x64, jax.set_mesh
else:  # JAX 0.7
    from jax.experimental import enable_x64 as enable_x64

    set_mesh = jax.sharding.use_mesh

IS_JAX_0_7 = jax.__version_info__ < (0, 8)

needs_nnx_list = pytest.mark.skipif(
    not hasattr(nnx, "List"), reason="the model needs nnx.List, of Flax 0.12"
)
