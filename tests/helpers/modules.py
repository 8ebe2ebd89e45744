"""Modules of the frameworks, and comparisons of two that a call changes."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from helpers.inner import standard_promotion

ROWS = jax.random.normal(jax.random.key(0), (8, 4))


class Net(nnx.Module):
    """Each call moves the mean and the variance, and counts the dropout masks."""

    def __init__(self, seed=0, width=4):
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        with standard_promotion():
            return self.dropout(jax.nn.relu(self.norm(self.linear(x))))  # layers

    def encode(self, x):
        return self(x)


class NnxNet(nnx.Module):
    """Products with some kernels of shape (4, 4), in layers of a list."""

    def __init__(self, kernels):
        make = functools.partial(nnx.Linear, 4, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.layers = nnx.List([make() for _ in kernels])
        for layer, kernel in zip(self.layers, kernels, strict=True):
            layer.kernel = nnx.Param(kernel)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)  # layer
        return x


class EquinoxNet(eqx.Module):
    """The same in Equinox, for one row."""

    layers: list

    def __init__(self, kernels):
        make = functools.partial(eqx.nn.Linear, 4, 4, use_bias=False)
        self.layers = [
            eqx.tree_at(lambda x: x.weight, make(key=jax.random.key(0)), kernel.T)
            for kernel in kernels
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)  # layer
        return x


class LinenNet(linen.Module):
    """The same in Linen, which keeps the kernels apart."""

    depth: int

    @linen.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = linen.Dense(4, use_bias=False)(x)  # layer
        return x


class Framework(NamedTuple):
    """How nets are made and called in a framework.

    Attributes:
      net: The class of the net.
      make: From kernels of shape (4, 4), makes what is differentiated.
      call: Takes this and some rows.
      scope: The scope of the second layer.
    """

    net: type
    make: Callable
    call: Callable
    scope: str


FRAMEWORKS = {
    "linen": Framework(
        LinenNet,
        lambda kernels: {f"Dense_{i}": {"kernel": k} for i, k in enumerate(kernels)},
        lambda params, x: LinenNet(len(params)).apply({"params": params}, x),
        "LinenNet/Dense_1",
    ),
    "nnx": Framework(NnxNet, NnxNet, lambda net, x: net(x), ""),
    "equinox": Framework(
        EquinoxNet,
        EquinoxNet,
        lambda net, x: jax.vmap(net)(x),
        "eqx.nn.Linear",  # Equinox names the classes of its own layers.
    ),
}


def mean_square(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def arrays_of(tree):
    """All arrays of modules and other trees, with keys as numbers."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape")]
    is_key = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    pairs = zip(leaves, is_key, strict=True)
    return [np.asarray(jax.random.key_data(x) if flag else x) for x, flag in pairs]


def assert_same_state(actual, expected, rtol=2e-2):
    """Arrays agree within the rounding of float16, so small counts exactly."""
    for a, e in zip(arrays_of(actual), arrays_of(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        atol = rtol * max(float(np.max(np.abs(e), initial=0)), 0.1)
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)
