"""Strict JAX, eight CPU devices, and repeatable property tests."""

import collections

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
        max_examples=8 if is_fast else 60,
    )
    hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Property tests run in the slow command, too, and most cases of large tables."""
    counts = collections.Counter()
    for item in items:
        is_property = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        if is_property and config.option.markexpr == "slow":
            item.add_marker("slow")
        every = item.get_closest_marker("fast_every")
        if every is not None:
            function = item.nodeid.partition("[")[0]
            if counts[function] % every.args[0]:
                item.add_marker("slow")
            counts[function] += 1
