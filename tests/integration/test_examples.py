"""The example programs train, continue after a kill, and agree across precisions."""

import argparse
import functools
import importlib
import json
import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_lossscale as ols
from _lib.tables import table_of
from helpers.compare import assert_same_bits
from helpers.compat import sets_devices_again
from helpers.inner import adam, standard_promotion
from loop import has_checkpoint, train
from options import above_zero, parse_options
from precision import cast, cast_params, scale_figures, with_loss_scale

SMALL = {
    "gpt": ["--layers", "1", "--width", "32"],
    "resnet": ["--width", "4", "--batch", "32"],
    "lstm": ["--width", "16", "--batch", "64"],
    "ppo": ["--games", "8", "--moves", "8"],
    "grpo": ["--width", "32", "--layers", "1", "--digits", "3", "--pretrain", "5"],
}


@pytest.mark.parametrize(
    ("precision", "level", "dtype", "of_params", "loss_scale"),
    [
        ("float32", "O0", jnp.float32, jnp.float32, 1.0),
        ("bfloat16", "O1", jnp.bfloat16, jnp.float32, 1.0),
        ("float16", "O1", jnp.float16, jnp.float32, 2.0**15),
        ("float16-unscaled", "O1", jnp.float16, jnp.float32, 1.0),
        ("O2", "O2", jnp.float16, jnp.float32, 2.0**15),
        ("masters", "O2", jnp.float16, jnp.float16, 2.0**15),
    ],
)
def test_a_precision_is_what_its_name_says(
    precision, level, dtype, of_params, loss_scale
):
    options = argparse.Namespace(precision=precision, rule="dynamic")
    params = cast_params({"w": jnp.ones((32, 16))}, options)
    assert params["w"].dtype == of_params
    seen = []

    def fun(w, x):
        seen.append(x.dtype)  # Level O2 casts arguments.
        return jnp.exp(x @ w)

    x = jnp.linspace(0.0, 0.1, 32 * 16).reshape(16, 32)
    w = params["w"].astype(jnp.float32)
    result = cast(fun, options)(w, x)
    assert seen[-1] == (jnp.float16 if level == "O2" else jnp.float32)
    if level != "O0":
        fun = ols.autocast(fun, dtype, level=level)
    np.testing.assert_array_equal(result, fun(w, x))
    state = with_loss_scale(optax.sgd(0.1), options).init(params)
    assert ols.get_loss_scale(state) == loss_scale


def test_the_flushed_share_counts_zeros_that_are_not_zero_in_float32():
    state = ols.loss_scaled(optax.sgd(0.1)).init(jnp.ones(5))
    grads = [jnp.array([0.0, 0.0, 1.0]), jnp.array([jnp.inf, 0.0])]
    exact = [jnp.array([0.0, 1e-9, 1.0]), jnp.array([1.0, 1.0])]
    figures = scale_figures(state, grads, exact)
    assert figures["flushed"] == 0.5  # Two of the four that are not zero.
    assert (figures["loss_scale"], figures["skipped"]) == (2.0**15, 0)


def options_of(folder, **others):
    defaults = {"steps": 5, "report": 2, "mesh": "data", "json": None, "plot": None}
    return argparse.Namespace(folder=folder, **defaults | others)


def run_of(tx, options, mean=0.0, stops_at=None, devices=1):
    """Trains one number on random ones, and returns the end of the run."""

    def start():
        params = jnp.float32(3.0)
        return params, tx.init(params)

    def batch_of(index):
        if index == stops_at:
            while not has_checkpoint(options.folder):  # Orbax writes it meanwhile.
                time.sleep(0.01)
            raise RuntimeError("stopped")
        return np.random.default_rng(index).normal(mean, size=8).astype(np.float32)

    def step(state, batch):
        params, opt_state = state
        loss, grads = ols.scaled_value_and_grad(
            lambda p: jnp.mean((p - batch) ** 2), opt_state
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (params + updates, opt_state), loss

    def evaluate(state):
        return {"params": state[0], "loss_scale": ols.get_loss_scale(state)}

    some = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=some)
    return train(options, mesh, start, batch_of, step, evaluate)


def test_a_run_that_was_stopped_continues_with_the_same_bits(tmp_path, capsys):
    tx = ols.loss_scaled(adam(), ols.dynamic_loss_scale(growth_interval=2))
    whole, stopped = options_of(tmp_path / "a"), options_of(tmp_path / "b")
    run = functools.partial(run_of, tx, devices=min(2, jax.device_count()))
    end = run(whole)
    last_report = capsys.readouterr().out
    with pytest.raises(RuntimeError, match="stopped"):
        run(stopped, stops_at=3)
    assert [log["step"] for log in logs_of(stopped)] == [2]
    assert_same_bits(run(stopped), end)
    assert capsys.readouterr().out == last_report
    assert logs_of(stopped) == logs_of(whole)
    assert [log["step"] for log in logs_of(whole)] == [2, 4, 5]
    # Adam's first step is as long as its learning rate, 0.1.
    expected = np.mean((2.9 - np.random.default_rng(1).normal(size=8)) ** 2)
    np.testing.assert_allclose(logs_of(whole)[0]["loss"], expected, rtol=1e-5)
    assert ols.get_loss_scale(end) == 2.0**17
    with pytest.raises(SystemExit, match=r"holds another run, with steps 5$"):
        run(options_of(whole.folder, steps=6))


def logs_of(options):
    log = (options.folder / "log.jsonl").read_text()
    return [json.loads(line) for line in log.splitlines()]


def test_a_run_whose_steps_are_all_skipped_or_whose_parameters_are_lost_stops():
    options = options_of(None, steps=60, report=60)
    tx = ols.loss_scaled(optax.sgd(0.1))
    with pytest.raises(
        ols.LossScaleStalledError, match="the last 60 steps were skipped"
    ):
        run_of(tx, options, mean=np.inf)
    tx = ols.loss_scaled(optax.sgd(0.1), ols.no_loss_scale())
    with pytest.raises(SystemExit, match=r"The training diverged. Step 60 gave"):
        run_of(tx, options, mean=np.nan)


def test_an_unfinished_checkpoint_is_ignored(tmp_path):
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
        (["--seed", str(2**32)], f"must be a whole number, got {2**32}"),
        (["--heat", "0"], "argument --heat: must be finite and above 0, got 0"),
        (["--json", "nowhere/a.json"], "there is no folder nowhere"),
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
@pytest.mark.parametrize("task", SMALL)
def test_a_program_trains_on_several_devices(task, tmp_path, monkeypatch):
    # In this process, which has eight devices.
    options = [*SMALL[task], "--precision", "masters", "--devices", "8"]
    options += ["--steps", "2", "--report", "1", "--json", str(tmp_path / "run.json")]
    monkeypatch.setattr(sys, "argv", [task, *options])
    with standard_promotion():
        importlib.import_module(f"train_{task}").main()
    records = json.loads((tmp_path / "run.json").read_text())["records"]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert math.isfinite(record["loss"])
        assert record.get("flushed", 0) < 0.01
        assert record["skipped"] == 0


@pytest.mark.parametrize("task", SMALL)
def test_the_page_of_evidence_shows_the_tables_of_the_recorded_runs(
    task, tmp_path, capsys
):
    real_models = importlib.import_module("real_models")
    runs = [run for run in real_models.load([task]) if run["task"] == task]
    print(table_of(real_models.rows_of(real_models.TASKS[task], runs)))
    folder = real_models.BENCHMARKS / real_models.TASKS[task].folder
    page = (folder / "README.md").read_text()
    assert capsys.readouterr().out in page
    for arm in real_models.TASKS[task].arms:
        seeds = {run["seed"] for run in runs if run["arm"] == arm}
        assert seeds == {0, 1, 2}, arm
    real_models.draw(real_models.TASKS[task], runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
