"""Recognize normalization layers by their names."""

import functools
import re

import jax

from optax_lossscale._tree import path_name
from optax_lossscale._types import PyTree

# A name such as `LayerNorm_0`, `batch_norm`, `norm1`, `normalization`, `ln_f`, `bn2`.
_NORMALIZATION = re.compile(
    r"(?i)(?<![a-z0-9_])"
    r"((\w*_)?(bn|gn|ln|norm|normali[sz]ation)"
    r"|\w*(batch|group|instance|layer|rms)_?norm(ali[sz]ation)?)"
    r"(_?\d+d?)?(_\w+)?(?![a-z0-9_])"
)


@functools.cache
def is_normalization(names: str) -> bool:
    """Whether a path such as `"block/LayerNorm_0"` names a normalization layer."""
    return _NORMALIZATION.search(names) is not None


def in_normalization(tree: PyTree) -> list[bool]:
    """For each leaf, whether it belongs to a normalization layer."""

    def is_layer(node: object) -> bool:
        return is_normalization(type(node).__name__)

    flags = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_layer)[0]:
        is_one = is_layer(node) or is_normalization(path_name(path))
        flags += [is_one] * len(jax.tree.leaves(node))
    return flags
