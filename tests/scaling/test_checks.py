"""The checks of settings by themselves; each setting is tested with its rule."""

import pytest

from optax_lossscale._checks import check_number


def test_the_error_for_a_setting_without_an_upper_limit_names_no_upper_limit():
    with pytest.raises(
        ValueError, match=r"^`x` must be finite, at least 0, got -1.0.$"
    ):
        check_number("x", -1.0, 0.0)
