"""Fused attention under autocast, compiled for an NVIDIA H200 without one.

pip install -e '.[test]' 'jax[cuda12]'
JAX_PLATFORMS=cpu python -m pytest tests/integration/test_fused_attention.py
"""

import jax
import pytest

import fused_attention

pytest.importorskip("jax_cuda12_plugin", reason="jax[cuda12] is not installed")


@jax.numpy_dtype_promotion("standard")  # JAX's attention needs it.
@jax.numpy_rank_promotion("allow")
def row(way):
    return fused_attention.row(way)


def test_attention_marked_by_low_precision_is_one_call_of_cudnn_each_way():
    unfused, fused = row("autocast"), row("autocast, fused attention")
    assert (unfused["fused, forward"], unfused["fused, backward"]) == ("0", "0")
    assert (fused["fused, forward"], fused["fused, backward"]) == ("1", "1")
    # Attention weights of 16 MB are stored no more, neither in float16 nor in float32.
    assert float(unfused["temporary MB"]) - float(fused["temporary MB"]) > 16
