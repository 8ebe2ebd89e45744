"""Programs of other projects train in float16 as they do in float32."""

import importlib

import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.files import project_files
from helpers.ported import (
    SEEDS,
    dtypes_of_products,
    final_score,
    has_nan,
    protected,
    trained,
    with_nan,
)

NAMES = sorted(
    path.stem
    for path in project_files("tests/ported/*.py")
    if not path.stem.startswith("test_")
)


@pytest.fixture(params=NAMES, scope="module")
def program_type(request):
    return importlib.import_module(f"ported.{request.param}").Program


def assert_within_seed_noise(finals, float32_runs):
    """The difference of the means is smaller than max - min of the float32 runs.

    With four seeds, max - min is on average three standard errors of this difference.
    """
    expected = [run.final for run in float32_runs]
    difference = abs(np.mean(finals) - np.mean(expected))
    assert difference < np.ptp(expected), (finals, expected)


def test_float16_reaches_the_loss_of_float32(program_type):
    float32_program, float32_runs = trained(program_type, half=False)
    float16_program, float16_runs = trained(program_type, half=True)
    assert set(dtypes_of_products(float32_program)) == {"float32"}
    dtypes = dtypes_of_products(float16_program)
    assert dtypes.count("float16") > program_type.low_share * len(dtypes), dtypes
    for run in [*float32_runs, *float16_runs]:
        assert run.final < program_type.falls_to * run.first, run[::2]
    assert_within_seed_noise([run.final for run in float16_runs], float32_runs)


def test_a_batch_with_a_nan_is_survived(program_type):
    float32_program, float32_runs = trained(program_type, half=False)
    program, float16_runs = trained(program_type, half=True)
    finals = []
    for seed, run in zip(SEEDS, float16_runs, strict=True):
        spoiled = with_nan(program.batches(seed)[0])
        state, _ = program.step(run.middle, spoiled)
        assert_same_bits(protected(state), protected(run.middle))
        scales = ols.get_loss_scale(state), ols.get_loss_scale(run.middle)
        assert scales[0] == scales[1] / 2
        finals.append(final_score(program, state, seed))
    assert_within_seed_noise(finals, float32_runs)
    # The same batch is the end of the original program.
    state, _ = float32_program.step(float32_runs[0].middle, spoiled)
    assert has_nan(protected(state))
