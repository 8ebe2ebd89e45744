"""The operations that `torch.autocast` lists for CUDA, written in JAX.

`OPERATIONS` maps PyTorch's name to the dtype of its result there, the function in JAX,
and the reason why autocast gives another dtype here (empty if it gives the same). See
https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.scipy.ndimage import map_coordinates

# Takes a float16 product `h` and a float32 array `a`, both 4 x 4.
Function = Callable[[Any, Any], Any]

ADDEND = "an addend that is not broadcast is no bias, and stays float32"
STATE = "the products are float16; the state keeps its float32"
PRODUCT = "a product, as `matmul` is"


def conv(h: Any, a: Any, axes: int, function: Any = lax.conv, **settings: Any) -> Any:
    """Convolves over `axes` spatial axes, with batch and channels of size 2."""
    shape = (2, 2, *(2,) * axes)
    h, kernel = (jnp.resize(x, shape) for x in (h, a))
    return function(h, kernel, (1,) * axes, "SAME", **settings)


def conv_transpose(h: Any, a: Any, axes: int) -> Any:
    """Applies a transposed convolution over `axes` spatial axes."""
    letters = "DHW"[-axes:]
    numbers = (f"NC{letters}", f"IO{letters}", f"NC{letters}")
    return conv(h, a, axes, lax.conv_transpose, dimension_numbers=numbers)


def gates(h: Any, a: Any) -> Any:
    """Computes the gates of a recurrent cell from input and state."""
    return jax.nn.sigmoid(h @ a + a @ a + a[0])


def normalize(h: Any, axis: int) -> Any:
    """Shifts to mean 0 and scales to variance 1 along an axis."""
    mean = jnp.mean(h, axis, keepdims=True)
    return (h - mean) * lax.rsqrt(jnp.var(h, axis, keepdims=True) + 1e-5)


def cosine(h: Any, a: Any) -> Any:
    """Computes the cosine similarity of each pair of rows."""
    norms = jnp.linalg.norm(h, axis=-1) * jnp.linalg.norm(a, axis=-1)
    return jnp.sum(h * a, -1) / norms


def hinge(x: Any) -> Any:
    """Computes the mean hinge loss of margins."""
    return jnp.mean(jnp.maximum(0, 1 - x))


# PyTorch lists these as run in float16.
LOW: dict[str, tuple[Function, str]] = {
    "__matmul__": (lambda h, a: h @ a, ""),
    "addbmm": (lambda h, a: a + jnp.einsum("bi,bj->ij", h, a), ADDEND),
    "addmm": (lambda h, a: a + h @ a, ADDEND),
    "addmv": (lambda h, a: a[0] + h @ a[0], ""),
    "addr": (lambda h, a: a + jnp.outer(h[0], a[0]), ADDEND),
    "baddbmm": (lambda h, a: a[None] + h[None] @ a[None], ADDEND),
    "bmm": (lambda h, a: h[None] @ a[None], ""),
    "chain_matmul": (lambda h, a: jnp.linalg.multi_dot([h, a, h]), ""),
    "multi_dot": (lambda h, a: jnp.linalg.multi_dot([h, a, h]), ""),
    "conv1d": (lambda h, a: conv(h, a, 1), ""),
    "conv2d": (lambda h, a: conv(h, a, 2), ""),
    "conv3d": (lambda h, a: conv(h, a, 3), ""),
    "conv_transpose1d": (lambda h, a: conv_transpose(h, a, 1), ""),
    "conv_transpose2d": (lambda h, a: conv_transpose(h, a, 2), ""),
    "conv_transpose3d": (lambda h, a: conv_transpose(h, a, 3), ""),
    "GRUCell": (lambda h, a: gates(h, a) * a, STATE),
    "linear": (lambda h, a: h @ a.T + a[0], ""),
    "LSTMCell": (lambda h, a: gates(h, a) * a, STATE),
    "matmul": (jnp.matmul, ""),
    "mm": (jnp.matmul, ""),
    "mv": (lambda h, a: h @ a[0], ""),
    "prelu": (
        lambda h, a: jnp.where(h > 0, h, a[0] * h),
        "elementwise; its float32 parameter widens",
    ),
    "RNNCell": (lambda h, a: jnp.tanh(h @ a + a @ a + a[0]), ""),
}
# PyTorch lists these as run in float32.
FULL: dict[str, tuple[Function, str]] = {
    "__pow__": (lambda h, a: h**2, ""),
    "__pow__, 3": (lambda h, a: h**3, ""),
    "__rdiv__": (lambda h, a: 1 / h, ""),
    "__rpow__": (lambda h, a: 2.0**h, ""),
    "__rtruediv__": (lambda h, a: 1 / h, ""),
    "acos": (lambda h, a: jnp.acos(h), ""),
    "asin": (lambda h, a: jnp.asin(h), ""),
    "binary_cross_entropy_with_logits": (optax.sigmoid_binary_cross_entropy, ""),
    "cosh": (lambda h, a: jnp.cosh(h), ""),
    "cosine_embedding_loss": (lambda h, a: jnp.mean(1 - cosine(h, a)), ""),
    "cdist": (lambda h, a: jnp.linalg.norm(h[:, None] - a[None], axis=-1), ""),
    "cosine_similarity": (cosine, ""),
    "cross_entropy": (lambda h, a: optax.softmax_cross_entropy(h, a).mean(), ""),
    "cumprod": (lambda h, a: jnp.cumprod(h, 0), ""),
    "cumsum": (lambda h, a: jnp.cumsum(h, 0), ""),
    "dist": (lambda h, a: jnp.linalg.norm(h - a), ""),
    "erfinv": (lambda h, a: jax.scipy.special.erfinv(h), ""),
    "exp": (lambda h, a: jnp.exp(h), ""),
    "expm1": (lambda h, a: jnp.expm1(h), ""),
    "group_norm": (lambda h, a: normalize(h.reshape(2, 8), 1), ""),
    "hinge_embedding_loss": (lambda h, a: hinge(h), ""),
    "kl_div": (lambda h, a: jnp.sum(a * (jnp.log(a) - h)), ""),
    "l1_loss": (lambda h, a: jnp.mean(jnp.abs(h - a)), ""),
    "layer_norm": (lambda h, a: normalize(h, -1), ""),
    "log": (lambda h, a: jnp.log(h), ""),
    "log_softmax": (lambda h, a: jax.nn.log_softmax(h), ""),
    "log10": (lambda h, a: jnp.log10(h), ""),
    "log1p": (lambda h, a: jnp.log1p(h), ""),
    "log2": (lambda h, a: jnp.log2(h), ""),
    "margin_ranking_loss": (lambda h, a: hinge(h - h.T), ""),
    "mse_loss": (lambda h, a: jnp.mean((h - a) ** 2), ""),
    "multilabel_margin_loss": (lambda h, a: hinge(h[:, :1] - h), ""),
    "multi_margin_loss": (lambda h, a: hinge(h[:, :1] - h), ""),
    "nll_loss": (lambda h, a: -jnp.mean(h[:, 0]), ""),
    "norm": (lambda h, a: jnp.linalg.norm(h), ""),
    "normalize": (lambda h, a: h / jnp.linalg.norm(h), ""),
    "pdist": (lambda h, a: jnp.linalg.norm(h[:, None] - h[None], axis=-1), ""),
    "poisson_nll_loss": (lambda h, a: jnp.mean(jnp.exp(h) - a * h), ""),
    "pow": (lambda h, a: h**2.5, ""),
    "prod": (lambda h, a: jnp.prod(h), ""),
    "reciprocal": (lambda h, a: jnp.reciprocal(h), ""),
    "renorm": (lambda h, a: h / jnp.linalg.norm(h, axis=0), ""),
    "rsqrt": (lambda h, a: lax.rsqrt(h), ""),
    "sinh": (lambda h, a: jnp.sinh(h), ""),
    "smooth_l1_loss": (lambda h, a: jnp.mean(optax.huber_loss(h, a)), ""),
    "soft_margin_loss": (lambda h, a: jnp.mean(jax.nn.softplus(-h)), ""),
    "softmax": (lambda h, a: jax.nn.softmax(h), ""),
    "softmin": (lambda h, a: jax.nn.softmax(-h), ""),
    "softplus": (lambda h, a: jax.nn.softplus(h), ""),
    "sum": (lambda h, a: jnp.sum(h), ""),
    "tan": (lambda h, a: jnp.tan(h), ""),
    "triplet_margin_loss": (lambda h, a: hinge(jnp.linalg.norm(h - a, axis=-1)), ""),
}
# PyTorch runs these in the widest dtype of their operands, which is float32 here.
WIDEST: dict[str, tuple[Function, str]] = {
    "addcdiv": (lambda h, a: h + a / h, ""),
    "addcmul": (lambda h, a: h + a * h, ""),
    "atan2": (jnp.atan2, ""),
    "bilinear": (lambda h, a: jnp.einsum("bi,ij,bj->b", h, a, h), PRODUCT),
    "cross": (lambda h, a: jnp.cross(h[:, :3], a[:, :3]), ""),
    "dot": (lambda h, a: jnp.dot(h[0], a[0]), PRODUCT),
    "grid_sample": (lambda h, a: map_coordinates(h, [a, a], 1), ""),
    "index_put": (lambda h, a: h.at[0].set(a[0]), ""),
    "scatter_add": (lambda h, a: h.at[0].add(a[0]), ""),
    "tensordot": (lambda h, a: jnp.tensordot(h, a), PRODUCT),
}
# PyTorch does not list these, and runs them in the dtype of their operand.
OTHERS: dict[str, tuple[Function, str]] = {
    "batch_norm": (lambda h, a: normalize(h, 0), "its sums are float32"),
    "dropout": (lambda h, a: jnp.where(a > 0, h / 0.9, 0), ""),
    "gelu": (lambda h, a: jax.nn.gelu(h), ""),
    "max_pool": (lambda h, a: jnp.max(h, 0), ""),
    "mean": (lambda h, a: jnp.mean(h), "a sum"),
    "relu": (lambda h, a: jax.nn.relu(h), ""),
    "sigmoid": (lambda h, a: jax.nn.sigmoid(h), ""),
    "silu": (lambda h, a: jax.nn.silu(h), ""),
    "sqrt": (lambda h, a: jnp.sqrt(h), ""),
    "tanh": (lambda h, a: jnp.tanh(h), ""),
    "where": (lambda h, a: jnp.where(a > 0, h, -jnp.inf), ""),
}
OPERATIONS = {
    name: (dtype, *row)
    for dtype, table in [
        ("float16", LOW),
        ("float32", FULL),
        ("float32", WIDEST),
        ("float16", OTHERS),
    ]
    for name, row in table.items()
}
