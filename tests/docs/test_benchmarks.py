"""The benchmarks run, and their results stay within fixed limits.

The limits are written here; the tables of `benchmarks/README.md` are not read.
"""

import importlib
import json
import pathlib
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autocast
import optax_lossscale as ols
from _lib import plain_models
from helpers.compat import IS_JAX_0_7

pytestmark = pytest.mark.slow
BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 has no jax.set_mesh")
def test_every_way_of_running_gives_the_same_result_and_skips_together(tmp_path):
    path = tmp_path / "ways.json"
    command = [sys.executable, BENCHMARKS / "ways_of_running.py", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = json.loads(path.read_text())
    assert len(rows) == 15
    for name, row in rows.items():
        assert row["skipped together"], name
        assert row["largest difference"] < 1e-6, name
        several_axes = name == "jit, sharded over both axes"
        assert row["collectives"] <= (3 if several_axes else 1), name


@pytest.mark.skipif(
    IS_JAX_0_7, reason="on CPU, XLA of JAX 0.7 stores more arrays than later ones"
)
def test_the_compiled_step_moves_few_more_bytes_than_the_least_possible(tmp_path):
    path = tmp_path / "cost.json"
    script = BENCHMARKS / "compiled_cost.py"
    command = [sys.executable, script, "--platforms", "cpu", "--quick", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = {row["way"]: row for row in json.loads(path.read_text())["rows"]}
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
    compiled_text = importlib.import_module("_lib.compiled_text")
    a_slice, a_loop, a_copy = 32 + 4 + 32, 5 * (32 + 32), 64
    expected = a_slice + a_loop + a_copy, 1 + 5
    assert compiled_text.bytes_and_kernels(PROGRAM) == expected


PROGRAM_FOR_TPU = """HloModule step

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %y = f32[8]{0} negate(%x)
  ROOT %next = (s32[], f32[8]{0}) tuple(%i, %y)
}

%condition (state: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(64)
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %is_less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (first: (s32[], f32[8])) -> (s32[], f32[8]) {
  %first = (s32[], f32[8]{0}) parameter(0)
  ROOT %loop = (s32[], f32[8]{0}) while(%first), condition=%condition, body=%body
}
"""


def test_a_loop_of_a_program_for_tpu_runs_up_to_the_limit_of_its_counter():
    compiled_text = importlib.import_module("_lib.compiled_text")
    expected = 64 * (32 + 32), 64
    assert compiled_text.bytes_and_kernels(PROGRAM_FOR_TPU) == expected
    unknown = PROGRAM_FOR_TPU.replace("constant(64)", "parameter(1)")
    assert compiled_text.bytes_and_kernels(unknown) == (32 + 32, 1)


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
    compiled_text = importlib.import_module("_lib.compiled_text")
    whole_step = importlib.import_module("whole_step")
    products = compiled_text.products_of(PRODUCTS)
    assert products == {"f16": 2, "f32": 1, "bf16/f32": 1}
    words = whole_step.in_words(products)
    assert words == "1 bfloat16/float32, 2 float16, 1 float32"


def test_the_products_of_a_whole_step_are_those_of_both_passes():
    whole_step = importlib.import_module("whole_step")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        (row,) = whole_step.product_rows(["here"], "LSTM", ["float32"])
    # Each of two LSTMs multiplies its input and its state by weights, and the last
    # layer its input. The backward pass has two products for each of these five.
    assert row["here, small"] == "15 float32"


def test_whole_steps_are_timed_here_with_and_without_loss_scaling(tmp_path):
    path = tmp_path / "steps.json"
    command = [sys.executable, BENCHMARKS / "whole_step.py", "--platforms", "here"]
    command += ["--models", "LSTM", "--quick", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    rows = json.loads(path.read_text())["LSTM"]
    assert len(rows) == 11
    assert all(float(row["ms"]) > 0 for row in rows)
    assert {row["loss scaling"] for row in rows if row["precision"] == "float32"} == {
        "none"
    }


def test_tiny_models_take_the_script_for_gpus_to_its_end_on_a_cpu(tmp_path):
    path = tmp_path / "on_gpu.json"
    command = [sys.executable, BENCHMARKS / "on_gpu.py", "--tiny", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    tables = json.loads(path.read_text())
    for model in ("GPT, 125 M", "ResNet-50"):
        rows = tables[model]
        assert [(row["precision"], row["loss scaling"]) for row in rows] == [
            ("float32, highest", "none"),
            ("TF32", "none"),
            ("autocast, bfloat16", "none"),
            ("autocast, float8", "none"),
            ("by hand", "none"),
            ("by hand", "loss_scaled"),
            ("by hand", "flax DynamicScale"),
            ("autocast, O1", "none"),
            ("autocast, O1", "loss_scaled"),
            ("autocast, O2", "none"),
            ("autocast, O2", "loss_scaled"),
            ("O2, masters", "none"),
            ("O2, masters", "loss_scaled"),
        ]
        assert rows[0]["time / float32"] == "1.000"
        for row in rows:
            assert float(row["ms"]) > 0, row
            assert float(row["time / float32"]) > 0, row
            assert float(row["peak MB"]) > 0, row
            if row["loss scaling"] == "none":
                assert row["time / bare"] == "1.000"
    ways = [row["way"] for row in tables["The update alone"]]
    assert ways == [
        "bare optimizer",
        "optax_lossscale",
        "with warn_after=50",
        "flax DynamicScale",
        "optax.apply_if_finite",
    ]
    (tests,) = tables["The tests that need a GPU"]
    assert "passed" in tests["outcome"] or "skipped" in tests["outcome"]
    assert "failed" not in tests["outcome"]


def test_a_precision_that_runs_out_of_memory_says_so_and_the_others_are_measured(
    monkeypatch,
):
    on_gpu = importlib.import_module("on_gpu")
    costs = importlib.import_module("_lib.costs")

    def measure(platform, model, precision, optimizer, scalers, is_tiny, **_):
        if precision == "float32, highest":
            jnp.zeros(2**50)
        if precision == "TF32":
            raise jax.errors.JaxRuntimeError("INTERNAL: no algorithm worked")
        cost = costs.Cost(
            0, 0, 0, memory=10**7, trace_s=0.0, compile_s=0.0, products=Counter()
        )
        return [on_gpu.Measured(cost, 0, time_s=0.002) for _ in scalers]

    monkeypatch.setattr(on_gpu, "measure", measure)
    float32, tf32, *others = on_gpu.rows_of("ResNet-50", is_tiny=True)
    assert float32["ms"] == "out of memory"
    assert tf32["ms"] == "failed"
    assert len(others) == 11
    for row in others:
        assert list(row) == list(float32) == list(tf32)
        assert (row["ms"], row["peak MB"], row["time / float32"]) == (
            "2.00",
            "10.00",
            "",
        )


def test_the_memory_of_a_step_counts_donated_arguments_once():
    costs = importlib.import_module("_lib.costs")
    array = jax.ShapeDtypeStruct((1000,), jnp.float32)

    def step(params, state, grads):
        return params - grads, state + grads, grads * 2

    _, cost = costs.compile_step(step, (array, array, array), jax.devices("cpu")[0])
    # Three arguments and the third result, 4000 bytes each, and a few pointers of XLA.
    assert 16_000 <= cost.memory < 16_200


def test_float32_products_have_the_precision_that_the_way_names():
    steps = importlib.import_module("_lib.steps")
    names = {"float32": "DEFAULT", "float32, highest": "HIGHEST", "TF32": "HIGH"}
    for way, name in names.items():
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            step = steps.make_step("LSTM", way, "adamw", "none", small=True)
            text = jax.jit(step.run).lower(*step.args).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert products
        for line in products:
            assert f"precision = [{name}, {name}]" in line, line


def test_the_overhead_is_measured_for_every_way(tmp_path):
    path = tmp_path / "overhead.json"
    command = [sys.executable, BENCHMARKS / "step_overhead.py", "--quick"]
    command += ["--leaves", "2", "--size", "100", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    tables = json.loads(path.read_text())
    assert len(tables["rows"]) == 7
    assert tables["eager"] > 0


def test_on_made_up_traces_headroom_beats_the_default_rule_of_torch(tmp_path):
    path, picture = tmp_path / "rules.json", tmp_path / "rules.png"
    script = BENCHMARKS / "rules.py"
    command = [sys.executable, script, "--json", path, "--plot", picture]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    results = json.loads(path.read_text())
    torch = results["synthetic"]["presets.torch"]
    headroom = results["synthetic"]["headroom_loss_scale"]
    assert len(torch) == 5
    for kind in torch:
        assert headroom[kind]["unused bits"] < torch[kind]["unused bits"], kind
        if kind != "spikes of 8 bits":  # There it skips more.
            assert headroom[kind]["skips"] < torch[kind]["skips"], kind
    assert headroom["sudden rise of 9 bits"]["skips"] <= 3
    spikes = "spikes of 8 bits"
    assert headroom[spikes]["skips"] > 2 * torch[spikes]["skips"]
    assert headroom[spikes]["flushed"] < torch[spikes]["flushed"] / 10
    for rule in ("presets.torch", "smooth_loss_scale", "headroom_loss_scale"):
        for kind, figures in results["recorded"][rule].items():
            assert figures["skips"] == 0, (rule, kind)
            assert figures["flushed"] < 1e-4, (rule, kind)
    for row in results["bad batches"]:
        bits, flushed, zero = map(float, row["at most more"].split(" / "))
        assert bits < 1, row
        assert flushed < 1, row
        assert zero <= 0, row
    assert len(results["activations"]) == 6
    assert len(results["recorded"]["headroom_loss_scale"]) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_hardest_history_has_no_long_row_of_zeros_where_torch_has_none(tmp_path):
    path = tmp_path / "hardest.json"
    script = BENCHMARKS / "hardest_histories.py"
    command = [sys.executable, script, "--generations", "10", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    rows = json.loads(path.read_text())
    assert len(rows) == 4
    for row in rows:
        assert row["zeros in a row"] <= 64, row
        if row["magnitudes"] == "30 bits":
            assert row["in all"] <= 64, row


def test_autocast_runs_every_product_of_fourteen_models_low(tmp_path):
    path = tmp_path / "autocast.json"
    command = [sys.executable, BENCHMARKS / "autocast.py", "--json", path]
    command += ["--platforms"]  # Compiled for none.
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    tables = json.loads(path.read_text())
    assert len(tables["Models"]) == 14
    for row in tables["Models"]:
        assert row["products"] == row["in float16"] != "0", row
        assert float(row["gradient error"].rstrip("%")) < 1, row


@pytest.mark.parametrize("way", ["by hand", "autocast, O1", "autocast, O3"])
@pytest.mark.parametrize("model", sorted(plain_models.MODELS))
@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_plain_models_train_in_every_way(model, way):
    dtype, stream, level = autocast.WAYS[way]
    loss_fn, params, batch = plain_models.MODELS[model](dtype, stream, True)
    if level is not None:
        loss_fn = ols.autocast(loss_fn, level=level)
    args = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), (params, *batch))
    loss, grads = jax.value_and_grad(loss_fn)(*args)
    assert loss.dtype == jnp.float32
    assert np.isfinite(loss)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(grads))


@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 has no jax.set_mesh")
def test_by_autocast_gradients_cross_devices_in_float32(tmp_path):
    path = tmp_path / "collectives.json"
    command = [sys.executable, BENCHMARKS / "collectives.py", "--quick", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    tables = json.loads(path.read_text())
    for row in tables["The gradient"]:
        is_low = "Flax" in row["model"] or "O2" in row["model"]
        assert ("f16" in row["gradients, MB"]) == is_low, row
    alone, plain, scaled = tables["The whole step"]
    for column in ("gradients, MB", "parameters, MB", "activations, MB"):
        assert alone[column] == plain[column] == scaled[column]
    assert "f16" not in scaled["gradients, MB"]
    assert plain["copies of a piece"] == scaled["copies of a piece"]
    errors = {(row["gradient of"], row["model"]): row for row in tables["Error"]}
    assert float(errors["one product", "autocast"]["on 8"]) < 1e-6
    assert float(errors["one product", "Flax, dtype=float16"]["on 8"]) > 3e-4


@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 has no jax.set_mesh")
def test_gradients_in_float8_are_as_near_as_those_of_flax(tmp_path):
    path = tmp_path / "float8.json"
    command = [sys.executable, BENCHMARKS / "float8.py", "--quick", "--json", path]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = json.loads(path.read_text())["Error of the gradients"]
    errors = {
        name: float(error.rstrip("%")) for name, error in list(rows[-1].items())[1:]
    }
    assert rows[-1]["layer"] == "all"
    assert 1 < errors["float8"] < 12
    assert (
        errors["last layer in bfloat16"] < 1.1 * errors["Flax's Fp8DirectDotGeneralOp"]
    )
    assert errors["first and last in bfloat16"] < errors["last layer in bfloat16"]
    assert errors["bfloat16"] < 0.2 * errors["float8"]


def test_tracing_and_eager_calls_are_timed_in_every_framework(tmp_path):
    path = tmp_path / "speed.json"
    command = [sys.executable, BENCHMARKS / "autocast_speed.py", "--json", path]
    command += ["--layers", "1", "--rounds", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    tables = json.loads(path.read_text())
    assert len(tables["Tracing the gradient"]) == 6
    assert len(tables["Calls outside jit"]) == 2


def test_cells_that_markdown_would_turn_bold_are_printed_in_backticks(capsys):
    tables = importlib.import_module("_lib.tables")
    tables.print_table(
        [{"operation": "__pow__", "scales": "2**3 2**3"}, {"a": 1, "b": 2}]
    )
    _, _, quoted, plain = capsys.readouterr().out.splitlines()
    assert quoted == "| `__pow__` | `2**3 2**3` |"
    assert plain.split() == ["|", "1", "|", "2", "|"]


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda p: p.stem)
def test_no_benchmark_finds_out_at_its_end_that_its_file_cannot_be_written(path):
    # Read and not run, so that each new benchmark is covered at no cost.
    source = path.read_text()
    assert ('"--json"' not in source) or ("type=check_output_file" in source)
    assert "type=pathlib.Path" not in source
