"""The example programs train, continue after a kill, and agree across precisions."""

import argparse
import functools
import importlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from _lib.tables import table_of
from helpers.compat import sets_devices_again
from helpers.inner import standard_promotion
from loop import has_checkpoint
from options import above_zero, parse_options
from precision import PRECISIONS, cast, cast_params, scale_figures, with_loss_scale

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SMALL = {
    "gpt": ["--layers", "1", "--width", "32"],
    "resnet": ["--width", "4", "--batch", "32"],
    "lstm": ["--width", "16", "--batch", "64"],
    "ppo": ["--games", "8", "--moves", "8"],
    "grpo": ["--width", "32", "--layers", "1", "--digits", "3", "--pretrain", "5"],
}


def command(task: str, *options: object) -> list[str]:
    program = str(EXAMPLES / f"train_{task}.py")
    options = *SMALL[task], "--precision", "masters", *map(str, options)
    return [sys.executable, program, *options]


def result(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def options_of(precision: str) -> argparse.Namespace:
    return argparse.Namespace(precision=precision, rule="dynamic")


@pytest.mark.parametrize(
    ("precision", "wrap", "of_params", "loss_scale"),
    [
        ("float32", lambda fun: fun, jnp.float32, 1.0),
        ("bfloat16", lambda fun: ols.autocast(fun, jnp.bfloat16), jnp.float32, 1.0),
        ("float16", ols.autocast, jnp.float32, 2.0**15),
        ("float16-unscaled", ols.autocast, jnp.float32, 1.0),
        ("O2", ols.autocast(level="O2"), jnp.float32, 2.0**15),
        ("masters", ols.autocast(level="O2"), jnp.float16, 2.0**15),
    ],
)
def test_a_precision_is_what_its_name_says(precision, wrap, of_params, loss_scale):
    options = options_of(precision)
    params = cast_params({"w": jnp.ones((32, 16))}, options)
    assert params["w"].dtype == of_params

    def fun(params, x):
        return jnp.exp(x @ params["w"])

    with jax.numpy_dtype_promotion("standard"):
        programs = [
            str(jax.make_jaxpr(each)(params, jnp.ones((16, 32))))
            for each in (cast(fun, options), wrap(fun))
        ]
    assert programs[0] == programs[1]
    assert ("f16" in programs[0]) == (precision != "float32")
    state = with_loss_scale(optax.sgd(0.1), options).init(params)
    assert ols.get_loss_scale(state) == loss_scale
    assert len(PRECISIONS) == 6


def test_the_flushed_share_counts_zeros_that_are_not_zero_in_float32():
    state = ols.loss_scaled(optax.sgd(0.1)).init(jnp.ones(5))
    grads = [jnp.array([0.0, 0.0, 1.0]), jnp.array([jnp.inf, 0.0])]
    exact = [jnp.array([0.0, 1e-9, 1.0]), jnp.array([1.0, 1.0])]
    figures = scale_figures(state, grads, exact)
    assert figures["flushed"] == 0.5  # Two of the four that are not zero.
    assert (figures["loss_scale"], figures["skipped"]) == (2.0**15, 0)


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path):
    assert not has_checkpoint(None)
    unfinished = tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "5").mkdir()
    assert has_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1"),
        (["--seed", "-1"], "argument --seed: must be a whole number, got -1"),
        (["--seed", str(2**32)], f"must be a whole number, got {2**32}"),
        (["--heat", "0"], "argument --heat: must be finite and above 0, got 0"),
        (["--heat", "nan"], "argument --heat: must be finite and above 0, got nan"),
        (["--json", "nowhere/a.json"], "there is no folder nowhere"),
        (["--json", "."], ". is a folder"),
        (["--plot", "a.xyz"], "must end in one of .png, .pdf, .svg"),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_start(
    arguments, message, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        parse_options("A program.", steps=1, report=1, heat=(above_zero, 1.0, "heat"))
    assert message in capsys.readouterr().err


# Each program compiles a step and an evaluation, which takes 10 to 20 seconds.
@sets_devices_again
@pytest.mark.slow
@pytest.mark.parametrize("task", ["resnet", "lstm", "ppo", "grpo"])
def test_a_program_trains_on_several_devices(task, tmp_path, monkeypatch):
    # In this process, which has eight devices.
    options = ["--devices", 8, "--steps", 4, "--report", 2]
    options += ["--json", tmp_path / "run.json"]
    monkeypatch.setattr(sys, "argv", command(task, *options)[1:])
    with standard_promotion():
        importlib.import_module(f"train_{task}").main()
    records = result(tmp_path / "run.json")["records"]
    assert [record["step"] for record in records] == [2, 4]
    for record in records:
        assert math.isfinite(record["loss"])
        assert record.get("flushed", 0) < 0.01
        assert record["skipped"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gpt", "grpo"])
def test_a_killed_run_continues_with_the_same_bits(task, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = ["--steps", 20, "--report", 5]
    # What one run has compiled need not be compiled again in the next.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    run = functools.partial(subprocess.run, env=environment, text=True, timeout=300)
    of_whole = ["--folder", whole, "--json", tmp_path / "whole.json"]
    of_killed = ["--folder", killed, "--json", tmp_path / "killed.json"]
    run(command(task, *steps, *of_whole), check=True)
    options = command(task, *steps, *of_killed)
    process = subprocess.Popen(options, env=environment)
    while not (killed / "checkpoints" / "5").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed.json").exists()
    run(options, check=True)
    assert result(tmp_path / "killed.json") == result(tmp_path / "whole.json")
    log = (killed / "log.jsonl").read_text()
    assert log == (whole / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines()] == [5, 10, 15, 20]
    other = run([*options, "--width", "96"], stderr=subprocess.PIPE)
    assert other.returncode == 1
    # It names nothing but what differs.
    assert re.search(r"holds another run, with width \d+\s*$", other.stderr)


@pytest.mark.parametrize("task", ["gpt", "resnet", "lstm", "ppo", "grpo"])
def test_the_page_of_evidence_shows_the_tables_of_the_recorded_runs(task, capsys):
    real_models = importlib.import_module("real_models")
    runs = [run for run in real_models.load([task]) if run["task"] == task]
    print(table_of(real_models.rows_of(real_models.TASKS[task], runs)))
    folder = real_models.BENCHMARKS / real_models.TASKS[task].folder
    page = (folder / "README.md").read_text()
    assert capsys.readouterr().out in page
    for arm in real_models.TASKS[task].arms:
        seeds = {run["seed"] for run in runs if run["arm"] == arm}
        assert seeds == {0, 1, 2}, arm
