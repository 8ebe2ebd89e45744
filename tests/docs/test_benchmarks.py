"""Each benchmark runs at its smallest size, and the limits that pages promise hold.

The limits are written here, and not read from the recorded results.
"""

import importlib
import json
import sys

import jax
import pytest

import on_gpu
import rules
import summary
from _lib import compiled_text, update_times
from helpers.compat import IS_JAX_0_7, sets_devices_again
from helpers.inner import standard_promotion

pytestmark = pytest.mark.filterwarnings("default:SelfAttention:DeprecationWarning")
# A script compiles many programs: each takes 3 to 30 seconds.
slow = pytest.mark.slow


@pytest.fixture
def run_script(monkeypatch, tmp_path):
    """Runs a script in this process, and returns the tables that it writes."""

    def run(name, *options):
        path = tmp_path / "tables.json"
        monkeypatch.setattr(sys, "argv", [name, *options, "--json", str(path)])
        with standard_promotion():
            importlib.import_module(name).main()
        return json.loads(path.read_text())

    return run


def test_the_summary_has_the_recorded_figures():
    page = summary.README.read_text()
    assert summary.with_tables(page) == page


@slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("step_overhead", ["--quick", "--leaves", "2", "--size", "100"]),
        (
            "whole_step",
            [
                *("--platforms", "here", "--models", "LSTM", "--quick"),
                *("--ways", "autocast, O1"),
            ],
        ),
        ("autocast_speed", ["--layers", "1", "--rounds", "1"]),
        ("autocast", ["--models", "MLP (Equinox)", "--platforms"]),
    ],
)
def test_a_script_prints_its_tables(run_script, script, options):
    tables = run_script(script, *options)
    assert next(iter(tables.values()))


@slow
def test_each_optimization_can_be_taken_out(run_script, monkeypatch):
    optimizations = importlib.import_module("optimizations")
    monkeypatch.setattr(update_times, "ROUNDS", 1)
    monkeypatch.setitem(optimizations.LEAVES, "60 x 100000", [(200, 200), (7,)])
    options = "--platforms", "cpu", "--leaves", "60 x 100000"
    rows = run_script("optimizations", *options)["Times"]
    assert [row["without"] for row in rows] == ["nothing", *optimizations.WITHOUT]
    assert all(float(row["CPU, time"]) > 0 for row in rows)


@slow
@sets_devices_again
@pytest.mark.several_devices
def test_every_way_of_running_gives_the_same_result_and_skips_together(run_script):
    (rows,) = run_script("ways_of_running", "--quick").values()
    assert len(rows) == 4
    for row in rows:
        assert row["together"] == "yes", row
        assert float(row["largest difference"]) < 1e-6, row
        assert row["collectives"] <= 1, row


@slow
@pytest.mark.skipif(
    IS_JAX_0_7, reason="on CPU, XLA of JAX 0.7 stores more arrays than later ones"
)
def test_the_compiled_step_moves_few_more_bytes_than_the_least_possible(run_script):
    (table,) = run_script("compiled_cost", "--platforms", "cpu", "--quick").values()
    rows = {row["way"]: row for row in table}
    assert float(rows["optax_lossscale"]["/ limit"]) < 1.06
    assert float(rows["optax_lossscale"]["temporary MB more"]) <= 6
    assert float(rows["flax DynamicScale"]["/ limit"]) > 1.5
    assert float(rows["by hand"]["temporary MB more"]) > 24


PROGRAM = """HloModule step

%fused (a: f32[100,8], i: s32[]) -> f32[8] {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,8]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%row)
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %y = f32[8]{0} negate(%x)
  ROOT %next = (s32[], f32[8]{0}) tuple(%i, %y)
}

ENTRY %main (a: f32[100,8], i: s32[]) -> (s32[], f32[8]) {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[8]{0} fusion(%a, %i), kind=kLoop, calls=%fused
  %first = (s32[], f32[8]{0}) tuple(%i, %row)
  ROOT %loop = (s32[], f32[8]{0}) while(%first), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501


def test_loops_count_as_often_as_they_run_and_slices_as_what_they_take():
    a_slice, a_loop = 32 + 4 + 32, 5 * (32 + 32)
    assert compiled_text.bytes_and_kernels(PROGRAM) == (a_slice + a_loop, 1 + 5)


@slow
def test_tiny_models_take_the_parts_for_gpus_to_their_ends(run_script, monkeypatch):
    monkeypatch.setattr(on_gpu, "PRECISIONS", [on_gpu.EXACT, "by hand"])
    monkeypatch.setattr(on_gpu, "PRECISIONS_OF_BATCHES", ["O2, masters"])
    model = "GPT, 125 M"
    run_script("on_gpu", "start", "--tiny")
    run_script("on_gpu", "steps", model, "--tiny")
    run_script("on_gpu", "largest batch", model, "--tiny")
    measured = run_script("on_gpu", "update", "--tiny")
    # A part that is run again finds its rows, and measures nothing.
    monkeypatch.setattr(on_gpu, "measure", None)
    assert run_script("on_gpu", "steps", model, "--tiny") == measured
    jax.config.update("jax_disable_most_optimizations", False)  # As it was.
    tables = run_script("on_gpu", "report")["tables"]
    exact, bare, *scaled = tables[model]
    assert exact["time / float32"] == bare["time / bare"] == "1.000"
    assert [row["loss scaling"] for row in scaled] == on_gpu.SCALERS[1:]
    (batch,) = tables[f"largest batch: {model}"]
    assert int(batch["batch"]) > 2  # The batch of the tiny model.
    assert [row["way"] for row in tables["The update alone"]] == on_gpu.UPDATES


@slow
def test_on_made_up_traces_headroom_beats_the_default_rule_of_torch(
    run_script, tmp_path
):
    picture = tmp_path / "rules.png"
    tables = run_script("rules", "--quick", "--plot", str(picture))
    bad_batches = list(tables.values())[2]
    made_up, recorded = (
        rules.figures(traces, rules.run_all(rules.COMPARED, traces))
        for traces in (rules.synthetic_traces(), rules.recorded_traces())
    )
    torch, headroom = made_up["presets.torch"], made_up["headroom_loss_scale"]
    spikes = "spikes of 8 bits"  # There it skips more.
    for kind in torch:
        assert headroom[kind]["unused bits"] < torch[kind]["unused bits"], kind
        is_less = headroom[kind]["skips"] < torch[kind]["skips"]
        assert is_less == (kind != spikes), kind
    assert headroom["sudden rise of 9 bits"]["skips"] <= 3
    assert headroom[spikes]["flushed"] < torch[spikes]["flushed"] / 10
    for kind, figures in recorded["headroom_loss_scale"].items():
        assert figures["skips"] == 0, kind
        assert figures["flushed"] < 1e-4, kind
    for row in bad_batches:
        bits, flushed, zero = map(float, row["at most more"].split(" / "))
        assert max(bits, flushed) < 1, row
        assert zero <= 0, row
    assert picture.read_bytes().startswith(b"\x89PNG")


@slow
def test_the_hardest_history_has_no_long_row_of_zeros_where_torch_has_none(run_script):
    (rows,) = run_script("hardest_histories", "--generations", "3").values()
    for row in rows:
        assert row["zeros in a row"] <= 64, row
        if row["magnitudes"] == "30 bits":
            assert row["in all"] <= 64, row


@slow
@sets_devices_again
@pytest.mark.several_devices
def test_by_autocast_gradients_cross_devices_in_float32(run_script):
    tables = run_script("collectives", "--quick")
    for row in tables["The gradient"]:
        is_low = "Flax" in row["model"] or "O2" in row["model"]
        assert ("f16" in row["gradients, MB"]) == is_low, row
    alone, plain, scaled = tables["The whole step"]
    for column in ("gradients, MB", "parameters, MB", "activations, MB"):
        assert alone[column] == plain[column] == scaled[column]
    assert "f16" not in scaled["gradients, MB"]
    assert plain["copies of a piece"] == scaled["copies of a piece"]
    errors = {row["model"]: float(row["on 8"]) for row in tables["Error"]}
    assert errors["autocast"] < 1e-6
    assert errors["Flax, dtype=float16"] > 3e-4
