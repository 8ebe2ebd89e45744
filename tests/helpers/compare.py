"""Comparisons of every bit and every type."""

import jax
import numpy as np


def bits(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.shape, array.dtype.name, array.tobytes()


def assert_same_bits(actual, expected):
    """Same structure, shapes, dtypes and bits: -0.0 is not 0.0, NaN is NaN."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    for leaf, (path, other) in zip(jax.tree.leaves(actual), paths, strict=True):
        assert bits(leaf) == bits(other), (
            f"{jax.tree_util.keystr(path)}: {leaf} is not {other}"
        )


def assert_within_ulp(actual, expected, max_ulp=4):
    """Same structure, shapes and dtypes; floating values within a few ulp."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    for leaf, (path, other) in zip(jax.tree.leaves(actual), paths, strict=True):
        assert leaf.dtype == other.dtype
        if jax.numpy.issubdtype(leaf.dtype, np.floating):
            leaf, other = np.asarray(leaf), np.asarray(other)
            same = (leaf == other) | (np.isnan(leaf) & np.isnan(other))
            with np.errstate(invalid="ignore"):  # Of infinities.
                ulp = np.abs(leaf - other) / np.spacing(np.abs(other))
            ulp = np.where(same, 0, ulp)
            assert np.max(ulp, initial=0) <= max_ulp, (
                f"{jax.tree_util.keystr(path)}: {leaf} is {ulp} ulp from {other}"
            )
        else:
            assert_same_bits(leaf, other)


def types(tree):
    """Shape, dtype, weak type and sharding of every leaf, by path."""
    return {
        jax.tree_util.keystr(path): str(jax.typeof(leaf))
        + str(jax.typeof(leaf).weak_type)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
