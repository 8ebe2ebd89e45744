"""Strict JAX, eight CPU devices unless JAX is told, and repeatable property tests."""

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

# Their files import libraries that only the extras `frameworks` and `trainers` install.
FOREIGN = [pathlib.Path(__file__).parent / name for name in ("frameworks", "ported")]
collect_ignore = [
    path
    for library, paths in {
        "keras": ["frameworks", "ported"],
        "rejax": ["frameworks/test_rejax.py"],
        "tunix": ["frameworks/test_tunix.py"],
    }.items()
    if importlib.util.find_spec(library) is None
    for path in paths
]


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

    The fast command does not make an example that fails smaller, which takes minutes.
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
    """Marks tests of other frameworks, and skips those that need more devices.

    Property tests run in both the fast and the slow command.
    """
    for item in items:
        if jax.device_count() < 8 and item.get_closest_marker("several_devices"):
            item.add_marker(pytest.mark.skip(reason="needs eight devices"))
        if any(folder in item.path.parents for folder in FOREIGN):
            item.add_marker("frameworks")
            item.add_marker(pytest.mark.filterwarnings("default"))
        is_property = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        if is_property and config.option.markexpr == "slow":
            item.add_marker("slow")
