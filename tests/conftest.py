"""Strict JAX, eight CPU devices, and repeatable property tests."""

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    """Property tests try few examples in the fast command, and many in any other."""
    is_fast = config.option.markexpr == "not slow"
    hypothesis.settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        max_examples=10 if is_fast else 60,
    )
    hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Property tests run in the slow command, too."""
    if config.option.markexpr == "slow":
        for item in items:
            if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
                item.add_marker("slow")
