"""The example programs train, continue after a kill, and agree across precisions."""

import argparse
import importlib
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from _lib.tables import print_table
from options import parse_options
from precision import (
    PRECISIONS,
    cast,
    cast_params,
    scale_figures,
    with_loss_scale,
)

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SMALL = {
    "gpt": ["--layers", "1", "--width", "32", "--learning-rate", "0.01"],
    "resnet": ["--width", "4", "--batch", "32"],
    "lstm": ["--width", "16", "--batch", "64"],
    "ppo": ["--games", "8", "--moves", "8"],
}


def command(task: str, *options: object) -> list[str]:
    """Returns the command of a run of 20 steps with a report every 5 steps."""
    program = str(EXAMPLES / f"train_{task}.py")
    always = ["--steps", "20", "--report", "5", *SMALL[task]]
    return [sys.executable, program, *always, *map(str, options)]


def run(task: str, *options: object) -> None:
    """Runs a program to its end."""
    subprocess.run(
        command(task, *options), check=True, capture_output=True, timeout=300
    )


def result(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def options_of(precision: str) -> argparse.Namespace:
    return argparse.Namespace(precision=precision, rule="dynamic")


@pytest.mark.parametrize(
    ("precision", "wrap", "of_params", "loss_scale"),
    [
        ("float32", lambda fun: fun, jnp.float32, 1.0),
        ("bfloat16", lambda fun: ols.autocast(fun, jnp.bfloat16), jnp.float32, 1.0),
        ("float8", ols.autocast(dtype=jnp.float8_e4m3fn), jnp.float32, 1.0),
        ("float16", ols.autocast, jnp.float32, 2.0**15),
        ("float16-unscaled", ols.autocast, jnp.float32, 1.0),
        ("O2", ols.autocast(level="O2"), jnp.float32, 2.0**15),
        ("masters", ols.autocast(level="O2"), jnp.float16, 2.0**15),
        ("compact-masters", ols.autocast(level="O2"), jnp.float16, 2.0**15),
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
    assert ("float8_e4m3fn" in programs[0]) == (precision == "float8")
    state = with_loss_scale(optax.sgd(0.1), options).init(params)
    assert ols.get_loss_scale(state) == loss_scale
    assert len(PRECISIONS) == 8


def test_the_flushed_share_counts_zeros_that_are_not_zero_in_float32():
    state = ols.loss_scaled(optax.sgd(0.1)).init(jnp.ones(5))
    grads = [jnp.array([0.0, 0.0, 1.0]), jnp.array([jnp.inf, 0.0])]
    exact = [jnp.array([0.0, 1e-9, 1.0]), jnp.array([1.0, 1.0])]
    figures = scale_figures(state, grads, exact)
    assert figures["flushed"] == 0.5  # Two of the four that are not zero.
    assert (figures["loss_scale"], figures["skipped"]) == (2.0**15, 0)


def test_programs_are_short_enough_to_read():
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")
    }
    assert len(lengths) == 7
    assert max(lengths.values()) <= 200, lengths


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be at least 1"),
        (["--seed", "-1"], "argument --seed: must be a whole number, got -1"),
        (["--seed", str(2**32)], f"must be a whole number, got {2**32}"),
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
        parse_options("A program.", steps=1, report=1)
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gpt", "resnet", "lstm"])
def test_the_loss_falls_and_float16_is_near_float32(task, tmp_path):
    losses = {}
    for precision in ("float32", "float16"):
        path = tmp_path / f"{precision}.json"
        run(task, "--precision", precision, "--json", path)
        losses[precision] = [record["loss"] for record in result(path)["records"]]
    assert len(losses["float32"]) == 4
    assert losses["float16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["float16"] != losses["float32"]
    assert losses["float32"][-1] < losses["float32"][0]


@pytest.mark.slow
def test_the_gpt_trains_in_float8(tmp_path):
    losses = {}
    for precision in ("float32", "float8"):
        path = tmp_path / f"{precision}.json"
        run("gpt", "--precision", precision, "--json", path)
        losses[precision] = [record["loss"] for record in result(path)["records"]]
    assert losses["float8"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["float8"] != losses["float32"]


@pytest.mark.slow
def test_the_policy_that_plays_is_nearer_to_the_trained_one_in_float16(tmp_path):
    # The loss of PPO does not fall, because its values grow with the scores.
    mismatches = []
    for precision in ("float32", "float16", "bfloat16"):
        path = tmp_path / f"{precision}.json"
        run("ppo", "--precision", precision, "--json", path)
        records = result(path)["records"]
        assert all(math.isfinite(record["loss"]) for record in records)
        assert all(record["held_out_score"] > 0 for record in records)
        mismatches.append(sum(record["policy_kl"] for record in records))
    assert mismatches[0] < mismatches[1] < mismatches[2]


@pytest.mark.slow
@pytest.mark.parametrize("task", SMALL)
def test_a_killed_run_continues_with_the_same_bits(task, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    precision = "compact-masters" if task == "gpt" else "masters"
    options = ["--precision", precision, "--folder"]
    run(task, *options, whole, "--json", tmp_path / "whole.json")
    options += [killed, "--json", tmp_path / "killed.json"]
    process = subprocess.Popen(command(task, *options), stderr=subprocess.DEVNULL)
    saved = killed / "checkpoints" / "5"
    while not saved.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed.json").exists()
    run(task, *options)
    assert result(tmp_path / "killed.json") == result(tmp_path / "whole.json")
    log = (killed / "log.jsonl").read_text()
    assert log == (whole / "log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines()] == [5, 10, 15, 20]


@pytest.mark.slow
def test_the_gpt_trains_to_the_same_bits_with_compact_masters(tmp_path):
    curves = []
    for precision in ("masters", "compact-masters"):
        path = tmp_path / precision
        run("gpt", "--precision", precision, "--json", path)
        curves.append(result(path)["records"])
    assert curves[0] == curves[1]
    assert curves[0][-1]["loss"] < curves[0][0]["loss"]


@pytest.mark.slow
def test_two_processes_that_share_parameters_train_as_one_device_does(tmp_path):
    run("gpt", "--precision", "masters", "--json", tmp_path / "one.json")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--precision", "masters", "--json", tmp_path / "two.json"]
    options += ["--mesh", "fsdp", "--devices", 2, "--folder", tmp_path / "run"]
    options += ["--coordinator", f"localhost:{port}", "--processes", 2, "--process"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(command("gpt", *options, index), env=environment)
        for index in range(2)
    ]
    assert [process.wait(300) for process in processes] == [0, 0]
    one, two = (result(tmp_path / f"{name}.json") for name in ("one", "two"))
    figure = "held_out_bits_per_byte"
    curves = [[record[figure] for record in each["records"]] for each in (one, two)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-2)


@pytest.mark.slow
def test_a_folder_with_another_run_is_refused(tmp_path):
    run("gpt", "--folder", tmp_path)
    again = command("gpt", "--folder", tmp_path, "--width", "64")
    ended = subprocess.run(again, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "holds another run: precision float16, rule dynamic" in ended.stderr


@pytest.mark.parametrize("task", SMALL)
def test_the_page_of_evidence_shows_the_tables_of_the_recorded_runs(task, capsys):
    real_models = importlib.import_module("real_models")
    runs = [run for run in real_models.load() if run["task"] == task]
    print_table(real_models.rows_of(real_models.TASKS[task], runs))
    page = (real_models.FOLDER / "README.md").read_text()
    assert capsys.readouterr().out in page
    for arm in real_models.TASKS[task].arms:
        seeds = {run["seed"] for run in runs if run["arm"] == arm}
        assert seeds == {0, 1, 2}, arm
