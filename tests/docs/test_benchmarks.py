"""The benchmarks run, each at its smallest size, and keep the limits that are promised.

The limits are written here, and not read from the recorded results.
"""

import importlib
import json
import re
import sys

import jax
import numpy as np
import pytest

import autocast
import on_gpu
import optax_lossscale as ols
import rules
import summary
import whole_step
from _lib import compiled_text, plain_models, steps, update_times
from _lib.tables import recorded, with_output
from helpers.compat import IS_JAX_0_7, sets_devices_again
from helpers.files import project_files
from helpers.inner import standard_promotion
from helpers.programs import equations_of

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


def test_every_script_has_its_page_of_results_with_its_commands_and_tables():
    scripts = project_files("benchmarks/*.py")
    recording = {x.stem for x in scripts if "add_outputs(" in x.read_text()}
    files = project_files("benchmarks/results/*.md")
    pages = {x.stem: x.read_text() for x in files}
    assert pages.keys() - recording == {"on_h100"}  # A GPU that is not at hand.
    for script in recording:
        commands = re.findall(r"```bash\npython benchmarks/(\w+)", pages[script])
        assert {*commands} == {script}
        assert len(recorded(script)) >= len(commands)


def test_a_recorded_output_replaces_what_stood_below_its_command():
    page = (
        "# Title\n\n```bash\npython benchmarks/a.py --ways 'by hand'\n```\n\nold\n\n"
        "## More\n\n```bash\npython benchmarks/a.py\n```\n\nold\n"
    )
    one = with_output(page, ["benchmarks/a.py", "--ways", "by hand"], "new")
    assert one == page.replace("old", "new", 1)
    other = with_output(page, ["benchmarks/a.py"], "new")
    assert other == "new".join(page.rsplit("old", 1))
    with pytest.raises(SystemExit, match=r"no block with `python benchmarks/b.py`"):
        with_output(page, ["benchmarks/b.py"], "new")


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


@slow  # It compiles a step four times.
def test_each_optimization_can_be_taken_out(run_script, monkeypatch):
    optimizations = importlib.import_module("optimizations")
    monkeypatch.setattr(update_times, "ROUNDS", 1)
    monkeypatch.setitem(optimizations.LEAVES, "60 x 100000", [(200, 200), (7,)])
    rows = run_script("optimizations", "--platforms", "cpu", "--leaves", "60 x 100000")[
        "Times"
    ]
    assert [row["without"] for row in rows] == ["nothing", *optimizations.WITHOUT]
    assert all(float(row["CPU, time"]) > 0 for row in rows)


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
  %start = ((f32[100,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]) slice-start(%a), slice={[0:2]}
  %done = f32[2,8]{1,0:S(1)} slice-done(%start)
  ROOT %loop = (s32[], f32[8]{0}) while(%first), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501


def test_loops_count_as_often_as_they_run_and_slices_as_what_they_take():
    a_slice, a_loop, a_copy = 32 + 4 + 32, 5 * (32 + 32), 64
    expected = a_slice + a_loop + a_copy, 1 + 5
    assert compiled_text.bytes_and_kernels(PROGRAM) == expected


# Programs for a TPU do not say how often a loop runs; its condition compares a counter.
CONDITION = """
%c (state: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(64)
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %is_less = pred[] compare(%i, %limit), direction=LT
}
"""


@pytest.mark.parametrize(
    ("limit", "times"), [("constant(64)", 64), ("parameter(1)", 1)]
)
def test_a_loop_of_a_program_for_tpu_runs_up_to_the_limit_of_its_counter(limit, times):
    program = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    program += CONDITION.replace("constant(64)", limit)
    others = 32 + 4 + 32 + 64
    expected = others + times * (32 + 32), 1 + times
    assert compiled_text.bytes_and_kernels(program) == expected


PRODUCTS = """HloModule step

%fused (a: f16[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f16[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %wide = f32[8,8]{1,0} convert(%a)
  ROOT %product = f32[8,8]{1,0} dot(%wide, %b), lhs_contracting_dims={1}
}

%fused_on_tpu (a: bf16[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = f32[8,8]{1,0:T(8,128)} parameter(1)
  ROOT %product = f32[8,8]{1,0:T(8,128)} convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (a: f16[8,8], b: f32[8,8], c: bf16[8,8]) -> f32[8,8] {
  %a = f16[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %c = bf16[8,8]{1,0} parameter(2)
  %one = (f16[8,8]{1,0}, s8[64]{0}) custom-call(%a, %a), custom_call_target="__cublas$gemm"
  %two = (f16[8,8]{1,0}, s8[0]{0}) custom-call(%a, %a, %b), custom_call_target="__cudnn$convForward"
  %no = f32[8,8]{1,0} custom-call(%b, %b), custom_call_target="Sharding"
  %three = f32[8,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused
  ROOT %four = f32[8,8]{1,0} fusion(%c, %b), kind=kOutput, calls=%fused_on_tpu
}
"""  # noqa: E501


def test_products_are_counted_by_the_dtypes_that_they_multiply():
    products = compiled_text.products_of(PRODUCTS)
    assert products == {"f16": 2, "f32": 1, "bf16/f32": 1}
    assert whole_step.in_words(products) == "1 bfloat16/float32, 2 float16, 1 float32"


@slow
def test_whole_steps_are_timed_here_with_and_without_loss_scaling(run_script):
    options = "--platforms", "here", "--models", "LSTM", "--ways", "autocast, O1"
    rows = run_script("whole_step", *options, "--quick")["LSTM"]
    assert [row["loss scaling"] for row in rows] == ["none", "loss_scaled"]
    assert all(float(row["ms"]) > 0 for row in rows)


@slow
def test_a_step_can_be_measured_with_float32_gradients_between_products():
    def results_of_products(way):
        with standard_promotion():
            step = steps.make_step("GPT", way, "adamw", "none", small=True)
            program = jax.make_jaxpr(step.run)(*step.args)
        products = [e for e in equations_of(program) if "product" in e.params]
        return [str(each.outvars[0].aval.dtype) for each in products]

    wide = results_of_products("autocast, O1, float32 gradients")
    own = results_of_products("autocast, O1")
    # Two of three products are in the backward pass.
    assert wide.count("float32") == len(wide) * 2 // 3
    assert len(own) == len(wide)
    # Of the products of attention both factors are activations.
    assert 0 < own.count("float32") < len(own) // 3


@slow
def test_tiny_models_take_the_parts_for_gpus_to_their_ends(
    run_script, monkeypatch, capsys
):
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
    assert all(float(row["time / float32"]) > 0 for row in scaled)
    (batch,) = tables[f"largest batch: {model}"]
    assert int(batch["batch"]) > 2  # The batch of the tiny model.
    assert [row["way"] for row in tables["The update alone"]] == on_gpu.UPDATES
    assert f"\n### {model}\n" in capsys.readouterr().out


def out_of_memory_above(limit):
    def run_once(step):
        size = on_gpu.batch_size(step)
        if size > limit:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {size} examples")
        return size

    return run_once


def test_a_batch_that_is_too_large_is_made_smaller_by_a_sixteenth(monkeypatch):
    step = on_gpu.make_step("LSTM", "TF32", "adamw", "none", True)
    # 160 - 10 = 150, and 150 - 9 = 141.
    monkeypatch.setattr(on_gpu, "run_once", out_of_memory_above(149))
    assert on_gpu.run_or_shrink(step, 160) == (141, 141)
    monkeypatch.setattr(on_gpu, "run_once", out_of_memory_above(100))
    with pytest.raises(jax.errors.JaxRuntimeError, match="133 examples"):
        on_gpu.run_or_shrink(step, 160)


def test_results_of_another_gpu_are_not_continued(tmp_path):
    on_gpu.start(tmp_path / "results.json", "a V100")
    on_gpu.start(tmp_path / "results.json", "a V100")
    with pytest.raises(SystemExit, match=r"has results of a V100. This is a T4."):
        on_gpu.start(tmp_path / "results.json", "a T4")


def test_failed_tests_are_read_from_finished_and_from_killed_runs(tmp_path):
    (tmp_path / "tests, gpu.log").write_text(
        "tests/a.py::test_x[a b] FAILED  [ 50%]\n"
        "FAILED tests/a.py::test_x[a b] - AssertionError: 1 | 2\n"
        "===== 1 failed, 1 passed in 2.00s =====\n"
    )
    (tmp_path / "tests, docs.unfinished.log").write_text(
        "[gw0] [ 10%] FAILED tests/b.py::test_y \n"
        "[gw1] [ 20%] PASSED tests/b.py::test_z \n"
    )
    tables = on_gpu.tables_of_tests(tmp_path)
    assert [row["outcome"] for row in tables["Tests"]] == [
        "killed after 2 tests",
        "1 failed, 1 passed in 2.00s",
    ]
    assert [row["test"] for row in tables["Tests that failed"]] == [
        "tests/b.py::test_y",
        r"tests/a.py::test_x[a b] - AssertionError: 1 \| 2",
    ]


@slow
def test_the_overhead_is_measured_for_every_way(run_script):
    options = "--quick", "--leaves", "2", "--size", "100"
    tables = run_script("step_overhead", *options)
    assert len(tables["Ways to scale the loss"]) == 6
    (outside,) = tables["Outside jit"]
    assert float(outside["time"]) > 0


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
def test_autocast_runs_every_product_of_a_model_low(run_script):
    models = "MLP (Equinox)", "GRU by scan (plain)", "mixture of experts, top_k (plain)"
    options = "--models", *models, "--platforms"  # Whole steps for no platform.
    for row in run_script("autocast", *options)["Models"]:
        assert row["products"] == row["in float16"] != "0", row
        assert float(row["gradient error"].rstrip("%")) < 1, row


@pytest.mark.parametrize("way", ["by hand", "autocast, O1", "autocast, O3"])
@pytest.mark.parametrize("model", plain_models.MODELS)
@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_plain_models_have_float32_gradients_in_every_way(model, way):
    dtype, stream, level, _ = autocast.WAYS[way]
    loss_fn, params, batch = plain_models.MODELS[model](dtype, stream, True)
    if level is not None:
        loss_fn = ols.autocast(loss_fn, level=level)
    results = jax.eval_shape(jax.value_and_grad(loss_fn), params, *batch)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(results))


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


@slow
def test_a_loop_saves_no_more_than_in_float32_whatever_its_layers_are(run_script):
    for row in run_script("loop_memory")["Bytes an entry"]:
        name, *others, chosen = row.values()
        assert float(chosen) <= min(map(float, others)) * 1.02, name


@slow
def test_tracing_and_eager_calls_are_timed_in_every_framework(run_script):
    tables = run_script("autocast_speed", "--layers", "1", "--rounds", "1")
    assert len(tables["Tracing the gradient"]) == 6
    assert len(tables["Calls outside jit"]) == 2
