"""Recognize normalization layers by their names, as whole words.

A name ends with what it names: `attention_norm` is a normalization layer, `norm_mlp`
and `pre_norm_block` are not. So these names are recognized, after any prefix:

* a kind and `norm` or `normalization`, such as `LayerNorm`, `layer_norm`, `MyRMSNorm`,
  `input_layernorm`, `BatchNormalization`;
* between underscores also `norm`, `normalization`, `bn`, `gn` and `ln` alone, such as
  `norm`, `q_norm`, `conv_bn`; but not norms of vectors, such as `global_norm`;
* in names of classes also `Norm` and `Normalization` alone, such as `GemmaNorm`,
  `T5Norm`; but not behind another layer or a position, such as `ConvNorm` and
  `PreNorm`, which are blocks that contain other layers.

Numbers and words that may follow are ignored: `LayerNorm_0`, `BatchNorm2d`, `norm1`,
`ln_f`, `norm_final`, `ln_scale`.
"""

import functools
import re

import jax

from optax_lossscale._ground.tree import path_name
from optax_lossscale._ground.types import PyTree

_KINDS = "batch|group|instance|layer|rms|scale"
_NORM = r"norm|normali[sz]ation"
_ALONE = re.compile(rf"(?i){_NORM}|bn|gn|ln")
_WITH_KIND = re.compile(rf"(?i).*({_KINDS})({_NORM})")
# The end of a name such as `GemmaNorm`; the group is the word before `Norm`.
_IN_CLASS = re.compile(r".*?([A-Z]*|[A-Z][a-z]*)\d*[dD]?(?:Norm|Normali[sz]ation)")
_OF_BLOCKS = re.compile("(?i)pre|post|conv|linear|dense")
# Words that may follow the name: positions, parameters, and parts of a function.
_SUFFIXES = re.compile(
    "(?i)pre|post|before|after|first|last|final|in|out|input|output|layer|embedding"
    "|scale|bias|weight|gamma|beta|offset|mean|var"
    "|fn|fwd|bwd|forward|backward|apply|impl|[a-z]"
)
# Words before `norm` that make it the norm of a vector or a matrix, or a wrapper that
# changes the weights of other layers.
_MEASURED = re.compile(
    "(?i)error|fro(benius)?|global|(grad|gradient|param|update|weight)s?|inf|l|matrix"
    "|max|nuclear|p|safe|spectral|squared|tree|unitwise|vector"
)


@functools.cache
def is_normalization(names: str) -> bool:
    """Whether a part of a path such as `"block/LayerNorm_0"` names such a layer."""
    return any(map(_is_layer, re.split(r"[^\w-]+", names)))


def _is_layer(name: str) -> bool:
    words = _words(name)
    if not words:
        return False
    if _WITH_KIND.fullmatch(words[-1]):
        return True
    if _ALONE.fullmatch(words[-1]):
        return not any(map(_MEASURED.fullmatch, words[-2:-1]))
    in_class = _IN_CLASS.fullmatch(words[-1])
    if in_class is None:
        return False
    before = in_class[1]
    return not (_MEASURED.fullmatch(before) or _OF_BLOCKS.fullmatch(before))


def _words(name: str) -> list[str]:
    """The words of a name between underscores, without what may follow the layer."""
    parts = (re.sub(r"(?i)\d+d?$", "", part) for part in re.split("[_-]", name))
    words = [part for part in parts if part]
    while words[1:] and _SUFFIXES.fullmatch(words[-1]):
        words.pop()
    return words


def in_normalization(tree: PyTree) -> list[bool]:
    """For each leaf, whether it belongs to a normalization layer."""

    def is_layer(node: object) -> bool:
        return is_normalization(type(node).__name__)

    flags = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_layer)[0]:
        is_one = is_layer(node) or is_normalization(path_name(path))
        flags += [is_one] * len(jax.tree.leaves(node))
    return flags
