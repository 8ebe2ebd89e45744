"""Strict JAX, eight CPU devices unless JAX is told, and repeatable property tests."""

import collections
import importlib.util
import os
import pathlib

import hypothesis
import jax
import pytest

from helpers import inner

jax.config.update("jax_num_cpu_devices", int(os.getenv("JAX_NUM_CPU_DEVICES", "8")))
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Their files import libraries that only the extra `frameworks` installs.
FOREIGN = [pathlib.Path(__file__).parent / name for name in ("frameworks", "ported")]
HAS_FRAMEWORKS = importlib.util.find_spec("haiku") is not None
collect_ignore = [] if HAS_FRAMEWORKS else [str(folder) for folder in FOREIGN]


@pytest.fixture
def standard_promotion():
    """JAX's own promotion of dtypes and ranks, which other libraries rely on."""
    with inner.standard_promotion():
        yield


@pytest.fixture(autouse=True)
def _foreign_code_is_not_strict(request):
    if any(folder in request.path.parents for folder in FOREIGN):
        request.getfixturevalue("standard_promotion")


def pytest_configure(config):
    """Property tests try few examples in the fast command, and many in any other.

    There one that fails is not made smaller either, which takes minutes.
    """
    is_fast = config.option.markexpr.startswith("not slow")
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        max_examples=8 if is_fast else 60,
        phases=phases if is_fast else list(hypothesis.Phase),
    )
    hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Says which tests are slow, and skips those that need more devices than JAX has.

    Of a test with several cases the fast command runs every sixth, up to four, and the
    slow command the others. Property tests run in both. Those of `scaling` run whole.
    """
    counts = collections.Counter()
    for item in items:
        if jax.device_count() < 8 and item.get_closest_marker("several_devices"):
            item.add_marker(pytest.mark.skip(reason="needs eight devices"))
        if any(folder in item.path.parents for folder in FOREIGN):
            item.add_marker("frameworks")
            item.add_marker(pytest.mark.filterwarnings("default"))
        is_property = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        if is_property and config.option.markexpr == "slow":
            item.add_marker("slow")
        function, _, case = item.nodeid.partition("[")
        is_whole = item.path.parent.name == "scaling"
        if case and not is_whole and (counts[function] % 6 or counts[function] >= 24):
            item.add_marker("slow")
        counts[function] += 1
